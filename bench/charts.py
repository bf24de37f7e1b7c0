"""PNG charts of a results file, with matplotlib where it is installed."""

from pathlib import Path

from .arms import ORDER, WORDS
from .tables import label, median, ratio

COLOURS = {"eager": "#9aa3ad", "lossless": "#2f6fde", "high": "#7b4fc9", "compile": "#e08a2e", "skeleton": "#cfd6dd"}


def draw(results: dict, folder: Path):
    """Paths of the charts written, or why there are none."""
    try:
        import matplotlib
    except ImportError:
        return "no charts: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    found = [chart(pyplot, results, folder) for chart in (model_chart, kernels_chart)]
    return [path for path in found if path] or "no charts: the file holds neither model nor kernel times"


def _title(results, text: str) -> str:
    e = results["environment"]
    return f"{text}\n{e['gpu'] or 'CPU'}, torch {e['torch']}, " + (f"ComfyUI {e['core']}" if e["core"] else "reference model")


def _save(pyplot, figure, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=144, metadata={"Software": None})
    pyplot.close(figure)
    return path


def model_chart(pyplot, results, folder):
    """Speed of each arm relative to eager, per image size."""
    points = [p for p in results["sections"].get("model", {}).get("points", []) if not p.get("skipped") and p["batch"] == 1]
    names = [n for n in ORDER if any(median(p["arms"].get(n)) for p in points)]
    if not points:
        return None
    figure, axes = pyplot.subplots(figsize=(1.8 + 2.0 * len(points), 4))
    width = 0.84 / len(names)
    for i, name in enumerate(names):
        speeds = [ratio(p["arms"]["eager"], p["arms"].get(name)) or 0 for p in points]
        bars = axes.bar([x + (i - (len(names) - 1) / 2) * width for x in range(len(points))], speeds, width, color=COLOURS[name], label=WORDS[name])
        axes.bar_label(bars, [f"{s:.2f}×" if s else "" for s in speeds], fontsize=7)
    axes.axhline(1, color="#555", linewidth=0.8)
    axes.set_xticks(range(len(points)), [f"{label(p)}\neager {median(p['arms']['eager']):.0f} ms" for p in points])
    axes.set_ylabel("speed of a step, eager core = 1")
    axes.set_title(_title(results, "One step of the whole FLUX transformer (image² / text tokens)"), fontsize=9)
    axes.legend(fontsize=7, loc="upper center", ncols=2)
    axes.margins(y=0.45)
    return _save(pyplot, figure, folder / "bench-model.png")


def kernels_chart(pyplot, results, folder):
    """Least bytes that must move over time taken, as part of the copy bandwidth: eager and fused."""
    ops = results["sections"].get("ops", {})
    rows = list(reversed(ops.get("rows") or []))
    if not rows:
        return None
    copy = ops["copy"]["gb_s"]
    figure, axes = pyplot.subplots(figsize=(8, 1.5 + 0.42 * len(rows)))
    for shift, name, words in ((0.2, "eager", "eager core"), (-0.2, "fused", "fused")):
        part = [100 * r["bytes"] / r["arms"][name]["us"]["median"] / 1e3 / copy for r in rows]
        bars = axes.barh([y + shift for y in range(len(rows))], part, 0.38, color=COLOURS["eager" if name == "eager" else "lossless"], label=words)
        axes.bar_label(bars, [f" {r['arms'][name]['us']['median']:.1f} µs" for r in rows], fontsize=7)
    axes.axvline(100, color="#555", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [f"{r['label']}: {r['shape']}" for r in rows], fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xlabel(f"% of the copy bandwidth measured in the same run ({copy:,.0f} GB/s)", fontsize=8)
    axes.set_title(_title(results, "Kernels at FLUX.1's shapes, bfloat16, batch 1"), fontsize=9)
    figure.legend(fontsize=7, loc="upper left", ncols=1, frameon=False)  # above the axes: bars and their labels reach everywhere in them
    axes.set_xlim(0, max(100, *(bar.get_width() for bar in axes.patches)) * 1.13)
    axes.margins(y=0.01)
    return _save(pyplot, figure, folder / "bench-kernels.png")
