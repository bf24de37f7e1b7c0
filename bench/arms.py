"""The ways to run one step that `model` compares. An arm that cannot run here says why."""

import contextlib

from ..fusion import session
from ..kernels import build
from .compiled import CompiledBlocks
from .progress import say
from .skeleton import skeleton

ORDER = ("eager", "lossless", "high", "compile", "skeleton")
WORDS = {
    "eager": "core as it is", "lossless": "FLUX Fast Path", "high": "FLUX Quality Tier: high (not bit-exact)",
    "compile": "torch.compile of each block", "skeleton": "only the matrix products and attention: the limit",
}


class Arm:
    """`step()` is timed, inside `around()`, which is not. `claims`: whether its output is promised to have eager's bits."""

    def __init__(self, name, step=None, around=contextlib.nullcontext, claims=False, computes=True, skipped=None, note=None):
        self.name, self.step, self.around, self.claims, self.computes = name, step, around, claims, computes
        self.skipped, self.note, self.facts = skipped, note, {}


def build_arms(subject, inputs: dict, options) -> list:
    """Arms in ORDER for one point; `options` are the command line's."""
    model, plan = subject.transformer, session.plan_for(subject.transformer)

    def lossless():
        with session.mounted(plan, token_major=True, share_silu=True):
            return model(**inputs)

    why_not = build.unavailable(subject.device, subject.dtype)
    return [
        Arm("eager", lambda: model(**inputs)),
        Arm("lossless", lossless, claims=True, note=why_not and f"nothing is fused: {why_not}"),
        high(subject, plan, inputs, why_not),
        compiled(subject, inputs, options),
        Arm("skeleton", skeleton(model, inputs), computes=False),
    ]


def high(subject, plan, inputs, why_not) -> Arm:
    if why_not:
        return Arm("high", skipped=why_not)
    mounted = _high_mount(subject, plan)
    if isinstance(mounted, str):
        return Arm("high", skipped=mounted)

    def step():
        with mounted():
            return subject.transformer(**inputs)

    return Arm("high", step)


def _high_mount(subject, plan):
    """A function that mounts tier "high" for one call, or why there is none."""
    kinds, _, found = session.with_high(session.KINDS, plan.sites, plan, subject.device, subject.dtype)
    if found["state"] != "mounted":
        return "; ".join(found["reasons"]) or "no site can mount"
    return lambda: session.mounted(plan, kinds, token_major=True, share_silu=True)


def compiled(subject, inputs, options) -> Arm:
    if options.no_compile:
        return Arm("compile", skipped="--quick or --no-compile")
    if subject.device.type != "cuda" and options.compile_backend == "inductor":
        return Arm("compile", skipped="it would compile for the CPU, which compares nothing")
    say(f"torch.compile of each block, {options.compile_backend}")
    call = lambda: subject.transformer(**inputs)  # noqa: E731
    blocks = None
    try:
        blocks = CompiledBlocks(subject.transformer, options.compile_backend)
        blocks.warm_up(call, subject.device)
    except Exception as error:  # no compiler here, or a graph it cannot take: a missing arm, not a failed benchmark
        first_line = (str(error).strip().splitlines() or [""])[0]
        return Arm("compile", skipped=f"torch.compile failed: {type(error).__name__}: {first_line}")
    arm = Arm("compile", call, blocks.mounted)
    arm.facts = {"compile_seconds": blocks.seconds, "graphs": blocks.graphs, "backend": options.compile_backend}
    return arm
