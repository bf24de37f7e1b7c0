"""Results as JSON: one file per GPU and day, holding every raw figure, what was measured and with which command."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

from . import environment

SCHEMA = 1
SECTIONS = ("check", "ops", "model", "sampler")
FOLDER = environment.ROOT / "bench" / "results"


def new(facts: dict) -> dict:
    return {"schema": SCHEMA, "commit": environment.commit(), "source": environment.source_digest(), "environment": facts, "sections": {}}


def file_name(facts: dict) -> str:
    gpu = re.sub(r"[^a-z0-9]+", "-", (facts["gpu"] or "cpu").lower()).strip("-")
    return f"{gpu}-{facts['time'][:10]}.json"


def add(results: dict, name: str, section: dict, command: str) -> None:
    """Put a section in. A model section joins one already there: a point measured again replaces the earlier one."""
    section = {**section, "command": command, "started": time.strftime("%Y-%m-%dT%H:%M:%S")}
    earlier = results["sections"].get(name)
    if name == "model" and earlier:
        def point(p):
            return p["pixels"], p["text"], p["batch"]

        fresh = {point(p) for p in section["points"]}
        section["points"] = sorted([p for p in earlier["points"] if point(p) not in fresh] + section["points"], key=point)
        section["command"] = earlier["command"] + " ; " + section["command"]
        for flag in ("identical", "fused"):
            if flag in earlier:
                section[flag] = section.get(flag, earlier[flag]) and earlier[flag]
    results["sections"][name] = section


def why_not_join(results: dict, facts: dict) -> str | None:
    """Why this run's figures may not be put beside those of an earlier file, or None."""
    problems = problems_of(results)
    if problems:
        return problems[0]
    for what, then, now in (
        ("GPU", results["environment"]["gpu"], facts["gpu"]), ("torch", results["environment"]["torch"], facts["torch"]),
        ("ComfyUI", results["environment"]["core"], facts["core"]), ("source", results["source"], environment.source_digest()),
    ):
        if then != now:
            return f"its {what} is {then}, this run's is {now}"
    return None


def load(path) -> dict:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def save(results: dict, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_rounded(results), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return path


def free_path(folder: Path, name: str) -> Path:
    """`name` in `folder`, or with a number when that file is there: results are never overwritten."""
    path, number = folder / name, 2
    while path.exists():
        path, number = folder / f"{Path(name).stem}-{number}.json", number + 1
    return path


def _rounded(value):
    """Six significant digits are more than any figure here has; NaN and infinities become None, as JSON has none."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if value == value and abs(value) != float("inf") else None
    if isinstance(value, dict):
        return {str(k): _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, (list, tuple)) else value


REQUIRED = {
    None: ("schema", "commit", "source", "environment", "sections"),
    "environment": ("gpu", "driver", "torch", "cuda", "nvrtc", "core", "pack", "python", "platform", "time"),
    "check": ("build", "rows", "identical", "fused", "seconds", "command"),
    "ops": ("rows", "up", "command"),
    "model": ("subject", "size", "points", "fused", "command"),
    "sampler": ("subject", "sampler", "arms", "identical", "fused", "command"),
}
POINT = ("pixels", "text", "batch", "arms", "launches", "first_call_ms")
ARM = ("claims", "skipped", "identical", "ms", "host_ms")


def problems_of(results: dict) -> list:
    """What keeps this from being a results file of ours: an empty list when nothing does."""
    def missing(where, thing, keys):
        return [f"{where} lacks {key!r}" for key in keys if key not in thing]

    found = missing("the file", results, REQUIRED[None])
    if found:
        return found
    if results["schema"] != SCHEMA:
        return [f"schema {results['schema']}, not {SCHEMA}"]
    found = missing("environment", results["environment"], REQUIRED["environment"])
    for name, section in results["sections"].items():
        found += missing(name, section, REQUIRED.get(name, ())) if name in SECTIONS else [f"unknown section {name!r}"]
    for p in results["sections"].get("model", {}).get("points", []):
        if not p.get("skipped"):
            found += missing("a point", p, POINT)
            found += [problem for arm in p.get("arms", {}).values() for problem in missing("an arm", arm, ARM)]
    return found


# --- the sentence ---


def verdict(results: dict) -> tuple:
    """(True, False or None for "not compared", the sentence that ends the output)."""
    compared, fused, why = [], False, None
    sections = {name: s for name, s in results["sections"].items() if "identical" in s}
    for name, s in sections.items():
        fused, why = fused or s.get("fused", name == "ops"), why or s.get("not_fused")
        if name == "check":
            compared.append(f"{len({r['op'] for r in s['rows']})} operations against core's expressions on {sum(r['values'] for r in s['rows']):,} values in "
                            f"{sum(r['cases'] for r in s['rows']):,} cases")
        elif name == "ops":
            compared.append(f"the timed kernels on {sum(r['values'] for r in s['rows']):,} values")
        elif name == "model":
            sizes = ", ".join(f"{p['pixels']}²/{p['text']}" + (f" batch {p['batch']}" if p["batch"] > 1 else "") for p in s["points"] if not p.get("skipped"))
            compared.append(f"the whole transformer's output with and without the pack at {sizes}")
        else:
            compared.append(f"final latents of {s['steps']} steps over {s['repeats']} repeats with and without the node")
    if not compared:
        return None, "bit-identical: not compared in this run."
    identical = all(s["identical"] for s in sections.values())
    aside = "" if fused else f" Nothing was fused, both sides ran core's own operations: {why or 'see above'}."
    return identical, f"bit-identical: {'yes' if identical else 'NO'}. Compared: {'; '.join(compared)}.{aside}"
