"""`ops`: each kernel beside core's eager expression and beside a plain copy, at FLUX.1's shapes (bfloat16, batch 1).

Times are GPU time of the kernels (torch.profiler), over operands that rotate through more memory than the L2 holds; graph replays of the
same calls are kept in the JSON as a second opinion. The contract (equal bits) is asserted before anything is timed.
"""

import random
import time

import torch
import torch.nn.functional as F

from ..kernels import build
from ..kernels.head_concat import head_concat
from ..kernels.layer_norm_modulate import layer_norm_modulate
from ..kernels.proof import REGISTRY
from ..kernels.qk_norm_rope import qk_norm_rope
from ..kernels.residual_gate import residual_gate
from . import cases, timing
from .check import differing, reasons
from .progress import say

D, HEADS, HEAD, MLP = 3072, 24, 128, 12288
IMAGE, TEXT = 4096, 512


def workload(make):
    """(operation, shape in words, function that makes operands, least bytes that must move: each input read, each output written once)."""
    rope = cases.ropes()[-1]
    for rows in (IMAGE, TEXT, IMAGE + TEXT):
        yield residual_gate, f"(1,{rows},{D})", lambda rows=rows: make.residual_gate(1, rows, D), 2 * D * (3 * rows + 1)
    for rows in (IMAGE, TEXT, IMAGE + TEXT):
        yield layer_norm_modulate, f"(1,{rows},{D})", lambda rows=rows: make.layer_norm_modulate(1, rows, D), 2 * D * (2 * rows + 2)
    rows = IMAGE + TEXT
    qk_bytes = rows * (2 * 2 * D * 2 + HEAD // 2 * 4 * 4)
    yield qk_norm_rope, f"q, k of {TEXT} + {IMAGE} tokens", lambda: make.qk_norm_rope(1, (TEXT, IMAGE), HEADS, HEAD, rope=rope), qk_bytes
    yield qk_norm_rope, f"q, k of {rows} tokens in linear1", lambda: make.qk_norm_rope(1, (rows,), HEADS, HEAD, extra=MLP, rope=rope), qk_bytes
    yield head_concat, f"v of {TEXT} + {IMAGE} tokens", lambda: make.head_concat(1, TEXT, IMAGE), 2 * 2 * rows * D
    yield cases.gelu_concat, f"(1,{rows},{D}+{MLP})", lambda: make.gelu_concat(1, rows, D, MLP), 2 * 2 * rows * (D + MLP)
    if "column_copy" in REGISTRY:
        yield REGISTRY["column_copy"], f"(1,{rows},{D}) into {D + MLP} columns", lambda: make.column_copy(1, rows, D, D + MLP), 2 * 2 * rows * D


def copies(device, size: int, count: int):
    """`count` copies that read and write `size` bytes in all, each."""
    pairs = [[torch.empty(size // 4, dtype=torch.int16, device=device).random_() for _ in range(2)] for _ in range(count)]
    return [lambda a=a, b=b: a.copy_(b) for a, b in pairs]


def sets_for(device, size: int) -> int:
    """How many sets of operands outgrow the L2 several times."""
    l2 = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 * 2**20
    return max(2, min(32, -(-4 * l2 // size)))


def measure(arms: dict, rounds: int, rng) -> dict:
    """Per arm (name -> calls): profiler µs and graph µs of every round, arms in a new order each round."""
    found = {name: {"profiler_us": [], "graph_us": []} for name in arms}
    for calls in arms.values():
        for call in calls:
            call()
    torch.cuda.synchronize()
    # The profiler first, graphs after it: some CUDA versions do not like to see the two at once.
    for _ in range(rounds):
        for name in rng.sample(sorted(arms), len(arms)):
            profiled = timing.profiled_us(arms[name])
            if profiled is not None:
                found[name]["profiler_us"].append(profiled)
    try:
        graphs = {name: timing.Replays(calls) for name, calls in arms.items()}
    except RuntimeError as error:  # something here cannot be captured; the profiler has its times
        say(f"no graph replays: {str(error).splitlines()[0]}")
        graphs = {}
    for _ in range(rounds):
        for name in rng.sample(sorted(graphs), len(graphs)):
            found[name]["graph_us"].append(graphs[name].us(6))
    for one in found.values():
        one["method"] = "profiler" if one["profiler_us"] else "graph"
        one["us"] = timing.spread(one["profiler_us"] or one["graph_us"])
    return found


def run(device, quick: bool, repeats=None) -> dict:
    started = time.perf_counter()
    reason = build.unavailable(device, torch.bfloat16)
    if reason:
        return {"skipped": f"no kernel to time: {reason}", "rows": [], "up": []}
    rounds, rng, make = repeats or (3 if quick else 9), random.Random(1), cases.Maker(torch.bfloat16, device, seed=6)
    with torch.inference_mode():
        say("measuring copy bandwidth")
        size = 2 * 2**30 if torch.cuda.mem_get_info(device)[0] > 16 * 2**30 else 2**28
        copy = measure({"copy": copies(device, size, 2)}, rounds, rng)["copy"]
        bandwidth = size / copy["us"]["median"] / 1e3
        section = {"copy": {"bytes": size, "gb_s": bandwidth, **copy}, "rows": [], "rotation": str(cases.ropes()[-1])}
        for op, shape, operands, moved in workload(make):
            say(f"timing {op.label} {shape}")
            section["rows"].append(row(device, op, shape, operands, moved, bandwidth, rounds, rng))
            torch.cuda.empty_cache()
        section["up"] = [up_projection(device, make, rows, rounds, rng) for rows in (IMAGE, TEXT, IMAGE + TEXT)]
    section["identical"] = all(r["different"] == 0 for r in section["rows"])
    section["seconds"] = time.perf_counter() - started
    return section


def row(device, op, shape, operands, moved, bandwidth, rounds, rng) -> dict:
    sets = [operands() for _ in range(sets_for(device, moved))]
    values, different = 0, 0
    for args in sets:
        compared = differing(op(*op.shadow(*args)), op.reference(*op.shadow(*args)))
        values, different = values + compared[0], different + compared[1]
    fused = any(plan.fused for plan in op.plans.values())
    arms = {
        "eager": [lambda a=a: op.reference(*a) for a in sets], "fused": [lambda a=a: op(*a) for a in sets], "copy": copies(device, moved, len(sets)),
    }
    found = measure(arms, rounds, rng)
    us = found["fused"]["us"]["median"]
    return {
        "op": op.name, "label": op.label, "shape": shape, "bytes": moved, "sets": len(sets), "values": values, "different": different, "fused": fused,
        "reasons": reasons(op) if not fused else [], "arms": found, "ratio": found["eager"]["us"]["median"] / us, "gb_s": moved / us / 1e3,
        "of_copy": moved / us / 1e3 / bandwidth,
        "host_us": {name: timing.host_us(arms[name]) for name in ("eager", "fused")},
    }


def up_projection(device, make, rows: int, rounds: int, rng) -> dict:
    """The GELU up-projections D -> 4 D that tier "high" is about: eager, its product alone, and torch's GELU epilogue (not bit-exact)."""
    say(f"timing the up-projection of {rows} rows")
    sets = [(make.values(1, rows, D), make.values(MLP, D, scale=D**-0.5), make.values(MLP, scale=0.02)) for _ in range(2)]

    def eager(x, w, b):
        return F.gelu(F.linear(x, w, b), approximate="tanh")

    def epilogue(x, w, b):
        return torch._addmm_activation(b, x[0], w.t(), use_gelu=True)[None]

    functions = {"eager": eager, "product": F.linear, "epilogue": epilogue}
    high = REGISTRY.get("linear_gelu")
    if high is not None:
        buffer = torch.empty(1, rows, D + MLP, dtype=torch.bfloat16, device=device)[..., D:]  # of the concat that follows, as in single blocks
        functions["high"] = lambda x, w, b: high(x, w, b, buffer)
        high(*sets[0], buffer)
    want = eager(*sets[0]).float()
    errors = {n: ((functions[n](*sets[0]).float() - want).norm() / want.norm()).item() for n in ("epilogue", "high") if n in functions}
    fused = high is not None and any(p.fused for p in high.plans.values() if p.launches)
    found = measure({name: [lambda a=a, f=f: f(*a) for a in sets] for name, f in functions.items()}, rounds, rng)
    return {"rows": rows, "in": D, "out": MLP, "arms": found, "relative_error": errors, "high_mounted": fused, "reasons": reasons(high) if high else []}
