"""`check`: build the kernels and compare each with core's eager expression, bit by bit, on this GPU."""

import time

import torch

from ..kernels import build, nvrtc, proof
from ..kernels.slices import ColumnSlice
from . import cases
from .progress import say

DTYPES = (torch.bfloat16, torch.float16)


def differing(got, want) -> tuple:
    """(values compared, values whose bits differ)."""
    if not isinstance(want, torch.Tensor):
        pairs = [differing(g, w) for g, w in zip(got, want)]
        return sum(p[0] for p in pairs), sum(p[1] for p in pairs) + (len(got) != len(want))
    if got.shape != want.shape or got.dtype != want.dtype:
        return want.numel(), want.numel()
    return want.numel(), int((got.contiguous().view(torch.int16) != want.contiguous().view(torch.int16)).sum())


def launches(op) -> int:
    return sum(plan.launches for plan in list(op.plans.values()))


def reasons(op) -> list:
    """Why calls of `op` ran as core runs them."""
    return sorted({p.reason for p in op.plans.values() if p.reason} | {v.reason for v in op.verdicts.values() if v.reason})


def build_kernels(device) -> dict:
    """Seconds to build the kernels for each dtype here, or why there are none; without a GPU the compiler alone is tried."""
    found = {}
    for dtype in DTYPES:
        name = str(dtype)[6:]
        if device.type == "cuda":
            reason = build.unavailable(device, dtype)
            found[name] = {"seconds": build.build_seconds.get((device.index, dtype)), "reason": reason}
            continue
        started = time.perf_counter()
        try:
            build.compile_for(90, dtype)
            found[name] = {"seconds": time.perf_counter() - started, "reason": "compiled for sm_90 only to see that it compiles: there is no NVIDIA GPU"}
        except nvrtc.KernelError as error:
            found[name] = {"seconds": None, "reason": str(error).splitlines()[0]}
    return found


def prove(op, dtype, device, fuzz: int) -> dict:
    """One row: the dispatcher's result against the reference's, twice a case (first sight, then the short path)."""
    make, started, on_gpu = cases.Maker(dtype, device, seed=5), time.perf_counter(), device.type == "cuda"
    row = dict(op=op.name, label=op.label, dtype=str(dtype)[6:], cases=0, fused_cases=0, values=0, different=0, failures=[])

    def compare(name, args):
        want = op.reference(*op.shadow(*args))
        before = launches(op)
        for _ in range(2 if on_gpu else 1):
            values, different = differing(op(*op.shadow(*args)), want)
            row["values"] += values
            row["different"] += different
            if different and len(row["failures"]) < 8:
                row["failures"].append(f"{name}: {different} of {values} values differ; {describe(args)}")
        row["cases"] += 1
        row["fused_cases"] += launches(op) == before + 2

    for name, args in cases.flux_shapes(op, make, 1 if on_gpu else 128):
        compare(name, args)
    for i in range(fuzz):
        compare(f"random signature {i}", cases.random_signature(op, make))
        if len(op.plans) > proof.MAX_PLANS - 8:
            op.plans.clear()  # the dispatcher would do it too, in the midst of our counting
    for name, args in cases.exhaustive(op, make):
        compare(name, args)
    row.update(reasons=reasons(op), variants=sorted({str(v.variant) for v in op.verdicts.values() if v.state == "trusted"}), seconds=time.perf_counter() - started)
    return row


def describe(args) -> str:
    def one(a):
        if isinstance(a, ColumnSlice):
            return f"columns {a.start}+{a.width} of {tuple(a.base.shape)}"
        return f"{tuple(a.shape)} strides {a.stride()}" if isinstance(a, torch.Tensor) else f"{len(a)} stream(s)" if isinstance(a, tuple) else str(a)

    return ", ".join(one(a) for a in args)


def run(device, quick: bool, fuzz=None) -> dict:
    started = time.perf_counter()
    say("building the kernels")
    section = {"build": build_kernels(device), "fused": device.type == "cuda", "rows": [], "uncovered": cases.uncovered(), "fuzz": fuzz if fuzz is not None else 3 if device.type != "cuda" else 60 if quick else 400}
    with torch.inference_mode():
        for dtype in DTYPES:
            for op in cases.exact_ops():
                op.plans.clear()
                op.verdicts.clear()
                say(f"proving {op.label}, {str(dtype)[6:]}: FLUX's shapes, {section['fuzz']} random signatures, special values")
                section["rows"].append(prove(op, dtype, device, section["fuzz"]))
    proof.forget()  # what follows proves for itself, and is timed doing so
    section["identical"] = all(row["different"] == 0 for row in section["rows"])
    section["fused"] = any(row["fused_cases"] for row in section["rows"])
    section["seconds"] = time.perf_counter() - started
    return section
