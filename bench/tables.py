"""Tables, from the results file alone: what the terminal shows and what render.py writes into the README. Headers say what is compared."""

from .aims import aims
from .arms import ORDER


def markdown(headers, rows) -> str:
    """A Markdown table padded so that it reads well in a terminal too."""
    cells = [[str(c) for c in row] for row in (headers, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]

    def line(row):
        return "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths)) + " |"

    return "\n".join([line(cells[0]), "|" + "|".join("-" * (w + 2) for w in widths) + "|", *map(line, cells[1:])])


def number(value, digits=1, unit="") -> str:
    return "–" if value is None else f"{value:,.{digits}f}{unit}"


def times(value, digits=2) -> str:
    return "–" if value is None else f"{value:.{digits}f}×"


def yes(value) -> str:
    return "–" if value is None else "yes" if value else "no"


def mib(arm):
    return None if arm.get("peak") is None else (arm["peak"] - arm["resting"]) / 2**20


def label(p) -> str:
    return f"{p['pixels']}² / {p['text']}" + (f" × {p['batch']}" if p["batch"] > 1 else "")


def median(arm):
    return (arm or {}).get("spread", {}).get("median")


def ratio(eager, arm):
    return median(eager) / median(arm) if median(eager) and median(arm) else None


def environment(r) -> str:
    e = r["environment"]
    commit = f"commit {r['commit'][:12]}" if r["commit"] else f"commit unknown, source {r['source']}"
    core = f"ComfyUI {e['core']}, comfy-kitchen {e['comfy_kitchen']}" if e["core"] else "no ComfyUI (reference model)"
    clocks = e.get("clocks_at_start") or {}
    power = f", power limit {number(clocks.get('power_limit_w'), 0, ' W')}" if clocks else ""
    gpu = f"{e['gpu']}, {e['memory_gib']} GiB, driver {e['driver'] or 'unknown'}{power}" if e["gpu"] else "no NVIDIA GPU"
    return f"{gpu}; torch {e['torch']}, CUDA {e['cuda']}, NVRTC {e['nvrtc'] or 'not found'}; {core}; Python {e['python']}; {commit}; {e['time'][:10]}"


def check(r) -> str:
    """Kernel against core's eager expression, bits compared."""
    s = r["sections"]["check"]
    rows = [[f"{x['label']}, {x['dtype']}", f"{x['fused_cases']} of {x['cases']}", f"{x['values']:,}", f"{x['different']:,}",
             "yes" if not x["different"] else "NO", number(x["seconds"], 1)] for x in s["rows"]]
    return markdown(["kernel against core's eager expression", "cases that ran the kernel", "values compared", "bits differ in", "bit-identical", "seconds"], rows)


def ops(r) -> str:
    s = r["sections"]["ops"]
    rows = []
    for x in s["rows"]:
        arms = x["arms"]
        fused, eager = arms["fused"]["us"], arms["eager"]["us"]
        rows.append([x["label"], x["shape"], number(eager["median"]), f"{number(fused['median'])} ({number(fused['min'])}–{number(fused['p90'])})" if x["fused"] else "stepped aside",
                     times(x["ratio"]), number(x["gb_s"], 0), number(100 * x["of_copy"], 0, " %"), number(arms["copy"]["us"]["median"]),
                     f"{number(x['host_us']['eager'])} / {number(x['host_us']['fused'])}"])
    headers = ["kernel (bf16, GPU time)", "shape", "eager µs", "fused µs (min–p90)", "eager / fused", "GB/s", f"of copy bandwidth ({s['copy']['gb_s']:,.0f} GB/s)",
               "a copy of as many bytes, µs", "host µs eager / fused"] if rows else ["kernels"]
    return markdown(headers, rows or [[s.get("skipped")]])


def up(r) -> str:
    rows = []
    for x in r["sections"]["ops"]["up"]:
        us = {name: arm["us"]["median"] for name, arm in x["arms"].items()}
        high = [number(us["high"]), times(us["eager"] / us["high"], 3), f"{x['relative_error']['high']:.1e}"] if x["high_mounted"] else ["–"] * 3
        rows.append([f"{x['rows']} × {x['in']} → {x['out']}", number(us["eager"]), number(us["product"]), number(us["epilogue"]), f"{x['relative_error']['epilogue']:.1e}", *high])
    headers = ["GELU up-projection (bf16, GPU time)", "eager: product, then GELU, µs", "product alone, µs", "torch's GELU epilogue, µs", "its relative deviation from eager",
               "tier high, µs", "eager / high", "its relative deviation from eager"]
    return markdown(headers, rows)


def model(r) -> str:
    """One line a size: the README's table."""
    rows = []
    for p in r["sections"]["model"]["points"]:
        a = p["arms"]
        if p.get("skipped"):
            rows.append([label(p), p["skipped"], *["–"] * 5])
            continue
        eager = a["eager"]
        cells = [f"{number(median(a[n]))} ({times(ratio(eager, a[n]))})" if median(a.get(n)) else "–" for n in ORDER[1:]]
        if not sum(p["launches"].values()):
            cells[0] = "nothing fused"
        rows.append([label(p), number(median(eager)), *cells, yes(a["lossless"]["identical"])])
    headers = ["image / text tokens", "eager core, ms/step", "lossless, ms (eager / lossless)", "high, ms (eager / high; not bit-exact)", "torch.compile per block, ms (eager / compile)",
               "matrix products + attention only: the limit, ms", "lossless = eager, bit for bit"]
    return markdown(headers, rows)


def arms(r) -> str:
    """One line an arm: the terminal's table."""
    rows = []
    for p in r["sections"]["model"]["points"]:
        for name in ORDER if not p.get("skipped") else ():
            a = p["arms"][name]
            if a["skipped"]:
                rows.append([label(p), name, f"left out: {a['skipped']}", *["–"] * 6])
                continue
            s = a["spread"]
            notes = [a["note"]] if a["note"] else []
            notes += [f"compiled in {a['compile_seconds']:.0f} s"] if a.get("compile_seconds") is not None else []
            notes += [f"deviates {a['deviation']:.1e}"] if a["identical"] is False and a["deviation"] is not None else []
            notes += ["not repeatable"] if a.get("repeats_identical") is False else []
            rows.append([label(p), name, f"{number(s['median'], 2)} ({number(s['min'], 2)}; {number(s['p10'], 2)}–{number(s['p90'], 2)})", times(None if name == "lossless" and not sum(p["launches"].values()) else ratio(p["arms"]["eager"], a), 3),
                         yes(a["identical"]) if name != "eager" else f"repeats: {yes(a['identical'])}", number(a["host"]["median"], 1), number(mib(a), 0), str(s["n"]), ", ".join(notes)])
    headers = ["image / text", "arm", "ms/step: median (min; p10–p90)", "eager / arm", "bits = eager's", "host ms to issue a step", "peak MiB above rest", "steps", "note"]
    return markdown(headers, rows)


def step(r) -> str:
    """What a fused step consists of."""
    rows = []
    for p in r["sections"]["model"]["points"]:
        if not p.get("skipped"):
            parts = ", ".join(f"{op} {n} of {p['sites'].get(op, 0)}" for op, n in p["launches"].items())
            rows.append([label(p), parts, number(p["host_us_per_launch"], 1), number(p["mount_ms"], 2), number(p["first_call_ms"], 0)])
    return markdown(["image / text", "fused launches a step, of sites", "host µs of a step / fused launches", "of which mounting, ms a step", "first fused call, ms (proofs included)"], rows)


def sampler(r) -> str:
    s, rows = r["sections"]["sampler"], []
    plain = s["arms"]["plain"]
    for name, a in s["arms"].items():
        if a["skipped"]:
            rows.append([name, f"left out: {a['skipped']}", *["–"] * 3])
            continue
        t = a["spread"]
        rows.append([name, f"{number(t['median'], 3)} ({number(t['min'], 3)}–{number(t['p90'], 3)})", times(ratio(plain, a) if s["fused"] else None, 3), f"{a['unique_hashes']} in {len(a['hashes'])}: {a['hashes'][0]}",
                     yes(a["identical"])])
    headers = [f"{s['pixels']}² / {s['text']}, {s['steps']} steps, batch {s['batch']}", f"seconds a run: median of {max(plain['spread']['n'], 0)} (min–p90)", "plain / arm",
               "distinct latent hashes", "latents = plain's, bit for bit"]
    return markdown(headers, rows)


def aims_table(r) -> str:
    return markdown(["aim (DESIGN, measured on an H200)", "measured here", "met"], aims(r))


# The seed of this project, as its authors published it; another host program, another baseline, so no like for like.
PUBLISHED = [["SGLang, as published", "1.9 % of denoise time", "4.1 % of denoise time"]]


def published(r) -> str:
    rows = list(PUBLISHED)
    s = r["sections"].get("sampler") or {"arms": {}}
    plain, cells = s["arms"].get("plain"), []
    for name in ("FLUX Fast Path", "FLUX Quality Tier: high"):
        found = ratio(plain, s["arms"].get(name)) if plain and s["fused"] else None
        cells.append("–" if found is None else f"{100 * (1 - 1 / found):.1f} % of sampling time")
    rows.append([f"this pack, ComfyUI {r['environment']['core'] or '(reference model)'}, {r['environment']['gpu'] or 'no GPU'}", *cells])
    return markdown(["saved, against the same program without it", "lossless", "high"], rows)


TABLES = {  # name of a README marker -> (section it needs, function)
    "environment": (None, environment), "check": ("check", check), "ops": ("ops", ops), "up": ("ops", up), "model": ("model", model), "arms": ("model", arms),
    "step": ("model", step), "aims": ("model", aims_table), "sampler": ("sampler", sampler), "published": ("sampler", published),
}


def table(results: dict, name: str):
    """The named table, or None when the results hold no such section."""
    section, make = TABLES[name]
    return make(results) if section is None or section in results["sections"] else None
