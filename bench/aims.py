"""The aims that were set before the work began (DESIGN, section 7), each beside what this run measured."""

LOSSLESS = {(1024, 512): 1.25, (2048, 512): 1.13, (512, 256): 1.7}  # eager / lossless
HIGH = {(1024, 512): 1.013, (2048, 512): 1.013}  # lossless / high; 3 % is the further aim
GATE_US = {"(1,4096,3072)": 20.7, "(1,512,3072)": 13.2, "(1,4608,3072)": 23.1}
OF_COPY, FIRST_USE_SECONDS = 0.8, 2.0
MEMORY_ROOM = 1.0


def aims(results: dict) -> list:
    """[aim, measured, met] rows; "–" where this run has no such figure."""
    sections = results["sections"]
    points = {(p["pixels"], p["text"]): p for p in sections.get("model", {}).get("points", []) if p["batch"] == 1 and not p.get("skipped")}
    rows = []

    def add(aim, value, met, words):
        rows.append([aim, "not measured" if value is None else words, "–" if value is None else "yes" if met else "no"])

    def medians(point, *names):
        arms = [(points.get(point) or {"arms": {}})["arms"].get(name) or {} for name in names]
        return [(arm.get("spread") or {}).get("median") for arm in arms]

    points = {k: p for k, p in points.items() if sum(p["launches"].values())}  # where nothing was fused there is nothing to aim at
    for point, aim in LOSSLESS.items():
        eager, lossless = medians(point, "eager", "lossless")
        found = eager / lossless if eager and lossless else None
        add(f"lossless ≥ {aim}× eager at {point[0]}²/{point[1]}", found, found and found >= aim, found and f"{found:.3f}×")
    for point in sorted(points):
        compiled, lossless = medians(point, "compile", "lossless")
        found = compiled / lossless if compiled and lossless else None
        add(f"lossless faster than torch.compile at {point[0]}²/{point[1]}", found, found and found > 1, found and f"compile / lossless {found:.3f}×")
    for point, aim in HIGH.items():
        lossless, high = medians(point, "lossless", "high")
        found = lossless / high if lossless and high else None
        add(f"high ≥ {100 * (aim - 1):.1f} % over lossless at {point[0]}²/{point[1]}", found, found and found >= aim, found and f"{100 * (found - 1):.1f} %")
    rows += _kernels(sections.get("ops", {}).get("rows") or [])
    rows += _whole(sections.get("model", {}), points)
    return rows


def _kernels(timed) -> list:
    if not timed:
        return [[f"each kernel ≥ {100 * OF_COPY:.0f} % of copy bandwidth", "not measured", "–"]]
    worst = min(timed, key=lambda r: r["of_copy"])
    below = [r for r in timed if r["of_copy"] < OF_COPY]
    rows = [[f"each kernel ≥ {100 * OF_COPY:.0f} % of copy bandwidth", f"{len(timed) - len(below)} of {len(timed)}; least {100 * worst['of_copy']:.0f} % ({worst['label']} {worst['shape']})",
             "yes" if not below else "no"]]
    for row in timed:
        if row["op"] == "residual_gate" and row["shape"] in GATE_US:
            us, aim = row["arms"]["fused"]["us"]["median"], GATE_US[row["shape"]]
            rows.append([f"gate ≤ {aim} µs at {row['shape']}", f"{us:.1f} µs", "yes" if us <= aim else "no"])
    return rows


def _whole(model, points) -> list:
    if not points or not model.get("fused"):
        return [["first use, host time, memory", "not measured: nothing was fused", "–"]]
    rows = []
    # The point that was measured first paid for the first use; build happened just before it.
    first = max(points.values(), key=lambda p: p["first_call_ms"] - (p["arms"]["lossless"]["spread"]["median"] or 0))
    seconds = (first["first_call_ms"] - first["arms"]["lossless"]["spread"]["median"]) / 1e3 + max((s or 0 for s in model.get("build_seconds", {}).values()), default=0)
    rows.append([f"first use: build + all proofs ≤ {FIRST_USE_SECONDS:.0f} s", f"{seconds:.2f} s", "yes" if seconds <= FIRST_USE_SECONDS else "no"])
    for (pixels, text), p in sorted(points.items()):
        eager, fused = p["arms"]["eager"], p["arms"]["lossless"]
        if eager["host"]["median"] and fused["host"]["median"]:
            rows.append([f"host: a fused step costs less CPU than eager's at {pixels}²/{text}", f"{fused['host']['median']:.1f} against {eager['host']['median']:.1f} ms",
                         "yes" if fused["host"]["median"] < eager["host"]["median"] else "no"])
        if eager.get("peak") and fused.get("peak"):
            above = [(a["peak"] - a["resting"]) / 2**20 for a in (fused, eager)]
            rows.append([f"memory: peak of a step not above eager's at {pixels}²/{text}", f"{above[0]:,.0f} against {above[1]:,.0f} MiB above rest", "yes" if above[0] <= above[1] + MEMORY_ROOM else "no"])
    return rows
