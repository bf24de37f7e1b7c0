"""`model`: one step of the whole transformer, each arm beside eager core in the same run. Outputs are compared before anything is timed."""

import random
import time

import torch

from ..fusion import session
from ..kernels import build, proof
from . import timing
from .arms import build_arms
from .check import launches, reasons
from .progress import say
from .subject import left_behind

QUICK_POINTS = ((512, 256), (1024, 512), (2048, 512))
SLOW_MS = 400  # steps this long get half the rounds


def points(options, device) -> list:
    """(pixels, text tokens, batch): what was asked for, else the aims' sizes (--quick), else every size with every text length."""
    sizes, texts = options.sizes, options.text
    if device.type != "cuda":
        pairs = [(s, t) for s in sizes or (64,) for t in texts or (16,)]
    elif options.quick and not sizes and not texts:
        pairs = QUICK_POINTS
    else:
        pairs = [(s, t) for s in sizes or (512, 1024, 2048) for t in texts or (256, 512)]
    return [(s, t, b) for b in options.batch for s, t in pairs]


def same_bits(a, b) -> bool:
    """torch.equal, except that NaN equals the same NaN and +0.0 differs from -0.0."""
    return proof.same_bits(a, b) if a.element_size() == 2 else torch.equal(a, b)


def deviation(got, want) -> float:
    """‖got - want‖ / ‖want‖."""
    want = want.float()
    return ((got.float() - want).norm() / want.norm()).item()


def run(subject, options, gpu) -> dict:
    started, rng = time.perf_counter(), random.Random(options.seed)
    section = {"subject": subject.words, "size": subject.size, "fused": False, "points": []}
    if subject.device.type == "cuda":
        proof.forget()  # so that the first point shows what the first use costs
    with torch.inference_mode():
        for pixels, text, batch in points(options, subject.device):
            say(f"{pixels} x {pixels}, {text} text tokens, batch {batch}")
            try:
                section["points"].append(point(subject, options, gpu, rng, pixels, text, batch))
            except torch.cuda.OutOfMemoryError:
                section["points"].append({"pixels": pixels, "text": text, "batch": batch, "skipped": "not enough GPU memory", "arms": {}})
                torch.cuda.empty_cache()
    measured = [p for p in section["points"] if not p.get("skipped")]
    if measured:
        section["identical"] = all(arm["identical"] for p in measured for arm in p["arms"].values() if arm["claims"])
    section["fused"] = any(sum(p["launches"].values()) for p in measured)
    section["not_fused"] = build.unavailable(subject.device, subject.dtype)
    section["build_seconds"] = {f"{d} {str(t)[6:]}": s for (d, t), s in build.build_seconds.items()}
    section["left_behind"] = left_behind(subject.transformer)
    section["seconds"] = time.perf_counter() - started
    return section


def point(subject, options, gpu, rng, pixels, text, batch) -> dict:
    device, inputs = subject.device, subject.inputs(pixels, text, batch)
    found = {"pixels": pixels, "text": text, "batch": batch, "image_tokens": (pixels // 16) ** 2, "arms": {}, "clocks_before": gpu.clocks()}
    arms = build_arms(subject, inputs, options)
    eager, lossless = arms[0], arms[1]
    want = eager.step()
    timing.synchronise(device)
    first = time.perf_counter()
    first_result = lossless.step()  # builds and proves what this point needs
    timing.synchronise(device)
    found["first_call_ms"] = (time.perf_counter() - first) * 1e3
    counted = {name: launches(op) for name, op in proof.REGISTRY.items()}
    lossless.step()
    found["launches"] = {name: launches(op) - counted[name] for name, op in proof.REGISTRY.items()}
    plan = session.plan_for(subject.transformer)
    found["sites"], found["not_fused"] = plan.sites, {op.label: reasons(op) for op in proof.REGISTRY.values() if reasons(op)}
    found["token_major"] = [bool(v) for v in getattr(getattr(plan.shared, "layouts", None), "verdicts", {}).values()]
    for arm in arms:
        found["arms"][arm.name] = contract(arm, want, first_result if arm is lossless else None)
    del want, first_result
    running = [arm for arm in arms if not arm.skipped]
    for arm in running:
        with arm.around():
            found["arms"][arm.name].update(timing.peak_memory(device, arm.step))
    measure(device, running, options, rng, found["arms"])
    found["mount_ms"] = mount_ms(plan)
    found["clocks_after"] = gpu.clocks()
    for arm in found["arms"].values():
        arm["spread"], arm["host"] = timing.spread(arm["ms"]), timing.spread(arm["host_ms"])
    host, fused = found["arms"]["lossless"]["host"]["median"], sum(found["launches"].values())
    found["host_us_per_launch"] = host * 1e3 / fused if host and fused else None
    return found


def contract(arm, want, first) -> dict:
    """Whether the arm gives eager's bits, twice; asserted before it is timed."""
    result = {"claims": arm.claims, "skipped": arm.skipped, "note": arm.note, "identical": None, "deviation": None, "ms": [], "host_ms": [], **arm.facts}
    if arm.skipped or not arm.computes:
        return result
    with arm.around():
        outputs = [first if first is not None else arm.step(), arm.step()]
    result["identical"] = all(same_bits(out, want) for out in outputs)
    result["repeats_identical"] = same_bits(*outputs)
    result["deviation"] = deviation(outputs[1], want)
    if arm.claims and not result["identical"]:
        say(f"{arm.name}: OUTPUT DIFFERS from eager's")
    return result


def measure(device, arms, options, rng, found) -> None:
    """Rounds of all arms in a new order each; `found` gets every figure."""
    rounds, count = options.repeats or (4 if options.quick else 10) if device.type == "cuda" else options.repeats or 1, 2
    slow = False
    for arm in arms:  # warm-up, since measuring memory emptied the allocator's cache
        with arm.around():
            slow = timing.steps(device, arm.step, 1)[0][0] > SLOW_MS and device.type == "cuda" or slow
    if slow:
        rounds, count = rounds if options.repeats else max(2, rounds // 2), 1 if options.quick else count
    for i in range(rounds):
        say(f"round {i + 1} of {rounds}")
        for arm in rng.sample(arms, len(arms)):
            with arm.around():
                ms, host = timing.steps(device, arm.step, count)
            found[arm.name]["ms"] += ms
            found[arm.name]["host_ms"] += [host] if host is not None else []


def mount_ms(plan, repeats: int = 20) -> float:
    """ms that swapping the forwards in and out costs a step (it is part of the lossless arm's time)."""
    started = time.perf_counter()
    for _ in range(repeats):
        with session.mounted(plan):
            pass
    return (time.perf_counter() - started) * 1e3 / repeats
