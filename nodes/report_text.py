"""A report (the dictionary that fusion/report.py documents) in words that a painter understands."""

from ..fusion.report import NO_CALL

STATES = {
    "proven": "proven bit for bit on this GPU",
    "bounded": "checked on this GPU: differs from ComfyUI by rounding only",
    "partly": "proven for some shapes, left to ComfyUI for others",
    "disabled": "switched off",
    "refused": "left to ComfyUI",
    "idle": "not needed in this run",
}


def describe(report):
    """Several lines. A missing or empty entry leaves its line out: reports of other versions stay readable."""
    clock = str(report.get("started") or "")[11:]
    head = "FLUX Fast Path" + _with(" · run {}", report.get("run")) + _with(" · {}", clock) + _with(" · {}", report.get("tier"))
    paragraphs = [[head, *_outcome(report)], _fused(report), _high(report), _disabled(report), _notes(report), _versions(report)]
    return "\n\n".join("\n".join(lines) for lines in paragraphs if lines)


def _outcome(report):
    broken = {"interrupted": "The run was interrupted before it ended.", "error": "The run ended with an error."}.get(report.get("outcome"))
    if report.get("state") != "fused":
        lines = [f"The fast path stepped aside: {report.get('reason') or 'no reason was recorded'}."]
        lines.append(broken or "The image is unaffected: ComfyUI drew it in its usual way, at its usual speed.")
    elif report.get("steps") == 0:
        return [broken or NO_CALL]
    else:
        lines = [_where(report)]
        if broken:
            lines.append(broken)
        elif (report.get("high") or {}).get("state") == "mounted":
            lines.append("Tier high: the image is very close to the lossless one, not bit-identical.")
        else:
            lines.append("The image is bit-identical to ComfyUI without this pack.")
    return lines + _time(report)


def _where(report):
    total, mounted = sum((report.get("blocks") or {}).values()), report.get("blocks_mounted")
    blocks = f" in {mounted} of {total} blocks" if total and mounted is not None else ""
    return f"The fast path was on{blocks}" + _with(" of {}", report.get("model")) + _with(", on {}", report.get("gpu")) + _with(" ({})", report.get("dtype")) + "."


def _time(report):
    parts = [
        _with("{} model calls", report.get("steps") or None) + _with(" in {:.1f} s", report.get("seconds")),
        _with("{:.0f} ms each", report.get("ms_per_step")),
        _saved(report.get("saved_ms_per_step"), "about {:.1f} ms saved in each", "{:.1f} ms more in each"),
    ]
    parts = [part for part in parts if part]
    return [", ".join(parts) + "."] if parts else []


def _saved(value, less, more):
    return "" if value is None else (less if value >= 0 else more).format(abs(value))


def _fused(report):
    lines = []
    for op in report.get("ops") or []:
        if op.get("state") == "idle" and not op.get("sites"):
            continue
        line = f"  {op.get('label') or op.get('op')}: {op.get('sites', 0)} places, {STATES.get(op.get('state'), op.get('state'))}"
        saved = _saved(op.get("saved_ms_per_step") or None, ", saves {:.1f} ms per model call", ", costs {:.1f} ms per model call")
        why = _with(" ({})", op.get("reason") if op.get("state") in ("refused", "partly") else None)
        lines.append(line + why + saved)
    return ["What was fused:", *lines] if lines else []


def _high(report):
    high = report.get("high")
    if not high:
        return []
    if high.get("state") == "mounted":
        line = f"Tier high runs in {high.get('sites')} of {high.get('of')} places"
        lines = [line + _with(", largest relative error {:.2g}", high.get("max_relative_error")) + "."]
    else:
        lines = ["Tier high stepped aside, so this run was lossless."]
    return lines + [f"  {reason}" for reason in high.get("reasons") or []]


def _disabled(report):
    labels = {op.get("op"): op.get("label") for op in report.get("ops") or []}
    lines = [f"  {labels.get(item.get('op')) or item.get('op')}" + _with(": {}", item.get("reason")) for item in report.get("disabled") or []]
    return ["Switched off on this GPU (ComfyUI's own code runs there, at its usual speed):", *dict.fromkeys(lines)] if lines else []


def _notes(report):
    notes = [f"  {note}" for note in report.get("notes") or []]
    return ["Left to ComfyUI:", *notes] if notes else []


def _versions(report):
    named = (("FLUX Fast Path {}", "version"), ("ComfyUI {}", "core"), ("PyTorch {}", "torch"))
    versions = [_with(text, report.get(key)) for text, key in named]
    versions = [version for version in versions if version]
    return [" · ".join(versions)] if versions else []


def _with(text, value):
    return "" if value is None or value == "" else text.format(value)
