"""Prove, then mount: a fused operation is trusted for a signature only after its bits equalled the eager ones on this GPU.

`FusedOp` is the dispatcher that every operation shares. A call finds its `Plan` (one per exact shapes, strides, dtype, device) and runs it:
the kernel when the plan's `Verdict` is "trusted", else the eager reference. A verdict covers all plans that take the same path through the
kernel (`proof_key`), so a new resolution or prompt length proves nothing again.
"""

from __future__ import annotations

import logging
import threading

import torch

from . import build, cost
from .nvrtc import KernelError

log = logging.getLogger("flux_fast_path")

MAX_PLANS = 2048  # per operation; a plan is about 2 kB of host memory


PROOF_ELEMENTS = 1 << 20
SPECIAL = (0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 65504.0, -65504.0, 1e-40, -1e-40, 6e-8, 3.39e38, -3.39e38)


def random_like(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Normal values of mixed magnitude in `like`'s dtype, on its device. Does not touch torch's global random state: seeds make images."""
    generator = torch.Generator(like.device).manual_seed(20261129)
    magnitude = torch.rand(*shape[:-1], 1, device=like.device, generator=generator) * 6 - 3
    return (torch.randn(*shape, device=like.device, generator=generator) * magnitude.exp() + magnitude).to(like.dtype)


def special_like(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Random values with NaN, infinities, signed zeros, subnormals and the largest numbers in every row."""
    values = random_like(like, *shape)
    row = torch.tensor(SPECIAL, device=like.device).to(like.dtype)[: shape[-1]]
    flat = values.view(-1, shape[-1])
    for i in range(min(flat.shape[0], 2 * len(SPECIAL))):  # one special value a row, then none: a NaN would hide the others
        flat[i, (7 * i) % shape[-1]] = row[i % len(row)]
    return values


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two half-width tensors agree bit for bit: NaN equals the same NaN, +0.0 differs from -0.0. Synchronises."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


class Verdict:
    """What is known of one operation on one code path of one GPU."""

    __slots__ = ("op", "signature", "state", "variant", "reason")

    def __init__(self, op: str, signature: str):
        self.op, self.signature = op, signature
        self.state, self.variant, self.reason = "new", None, None  # state: new | trusted | disabled


class Plan:
    """One exact signature: how to run it, how often it ran fused and how often it declined, what both sides cost (µs, CUDA events, None until timed)."""

    __slots__ = ("op", "device", "run", "fused", "reason", "verdict", "launches", "declined", "eager_us", "fused_us")

    def __init__(self, op: str, device: torch.device, run, fused: bool, reason: str | None = None, verdict: Verdict | None = None):
        self.op, self.device, self.run, self.fused, self.reason, self.verdict = op, device, run, fused, reason, verdict
        self.launches, self.declined, self.eager_us, self.fused_us = 0, 0, None, None


class FusedOp:
    """Base of the operations. A subclass states the contract and defines:

    name, label, variants     identity, words for the report, kernel variants in order of preference
    key(*args)                hashable; everything a launch depends on (called each time: keep it cheap)
    why_not(*args)            str | None; called once a key, on tensors on any device
    proof_key(*args)          hashable; what selects a path through the kernel (device and dtype are added here)
    reference(*args)          the eager expression, the only place it is written
    prepare(variant, *args)   a callable run(*args) that launches the kernel; raises KernelError
    shadow(*args)             args for a trial run: equal values, no tensor that the caller would see written
    like(*args)               the tensor that names the call's device and dtype
    """

    name = label = ""
    variants: tuple = (0,)
    exact = True  # whether the result has eager's bits; else `agrees` asks for something weaker
    needs_kernels = True  # whether `prepare` launches the pack's own kernels
    failure = "its bits differ from core's on this GPU"

    def __init__(self):
        self.plans: dict = {}
        self.verdicts: dict = {}
        self._lock = threading.RLock()
        REGISTRY[self.name] = self

    def __call__(self, *args):
        """The operation's result, from the kernel where that is proven, from the reference otherwise. Never raises on its own account."""
        plan = self.plans.get(self.key(*args))
        if plan is None:
            return self._first_sight(args)
        if plan.fused:
            try:
                result = plan.run(*args)
                plan.launches += 1
                return result
            except KernelError as error:  # a launch that is refused has written nothing
                self._disable(plan.verdict, str(error))
                plan.fused, plan.run, plan.reason = False, self.reference, str(error)
        plan.declined += 1
        return plan.run(*args)

    def why_not(self, *args) -> str | None:
        raise NotImplementedError

    def shadow(self, *args):
        return args

    def like(self, *args) -> torch.Tensor:
        return args[0]

    def proof_cases(self, like: torch.Tensor, *args):
        """Argument tuples proven before the live ones: many random values (a rare difference must not hide), special ones, all inputs."""
        return ()

    # --- first sight ---

    def _first_sight(self, args):
        like = self.like(*args)
        device, dtype = like.device, like.dtype
        if torch.compiler.is_compiling() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return self.reference(*args)
        reason = self.why_not(*args) or (build.unavailable(device, dtype) if self.needs_kernels else None)
        if reason:
            self._remember(args, Plan(self.name, device, self.reference, False, reason))
            return self.reference(*args)
        with self._lock:
            if self.key(*args) in self.plans:  # another thread came first
                return self(*args)
            proof_key = (device, dtype, self.proof_key(*args))
            verdict = self.verdicts.get(proof_key)
            if verdict is None:
                signature = f"{str(dtype)[6:]} {self.proof_key(*args)} on {torch.cuda.get_device_name(device)}"
                verdict = self.verdicts[proof_key] = Verdict(self.name, signature)
            try:
                return self._decide(args, verdict)
            except torch.cuda.OutOfMemoryError:
                # The trial needs room for a second result. Core's own call may still fit; the next call tries again.
                log.debug("%s: no memory for a proof now", self.name)
                return self.reference(*args)

    def _decide(self, args, verdict: Verdict):
        if verdict.state == "new":
            self._prove(args, verdict)
        device = self.like(*args).device
        if verdict.state == "disabled":
            self._remember(args, Plan(self.name, device, self.reference, False, verdict.reason, verdict))
            return self.reference(*args)
        try:
            run = self.prepare(verdict.variant, *args)
            plan = Plan(self.name, device, run, True, None, verdict)
            plan.eager_us, plan.fused_us = self._time(args, self.reference, run)
            result = run(*args)
        except KernelError as error:
            self._disable(verdict, str(error))
            return self.reference(*args)
        plan.launches += 1
        self._remember(args, plan)
        return result

    def _prove(self, args, verdict: Verdict) -> None:
        failure = None
        like = self.like(*args)
        cases = [*self.proof_cases(like, *args), args]
        wanted = [self.reference(*self.shadow(*case)) for case in cases]
        for variant in self.variants:
            try:
                if all(self.agrees(case, self.prepare(variant, *case)(*self.shadow(*case)), want) for case, want in zip(cases, wanted)):
                    verdict.state, verdict.variant = "trusted", variant
                    log.debug("%s: proven, variant %s, %s", self.name, variant, verdict.signature)
                    return
                failure = failure or self.failure
            except KernelError as error:
                failure = str(error)
        self._disable(verdict, failure)

    def agrees(self, args, got, want) -> bool:
        """Whether the kernel's result may stand for the reference's: the same bits."""
        if isinstance(want, torch.Tensor):
            return same_bits(got, want)
        return all(same_bits(g, w) for g, w in zip(got, want))

    def _disable(self, verdict: Verdict, reason: str) -> None:
        if verdict.state != "disabled":
            verdict.state, verdict.reason = "disabled", reason
            effect = "Core's own code runs instead, the image is unaffected" if self.exact else "Core's own code runs instead"
            log.warning("FLUX Fast Path: %s off for %s: %s. %s.", self.label, verdict.signature, reason, effect)

    def _remember(self, args, plan: Plan) -> None:
        plan.declined += not plan.fused  # the call that made it
        if len(self.plans) >= MAX_PLANS:
            self.plans.clear()
        self.plans[self.key(*args)] = plan

    def _time(self, args, *runs) -> list[float]:
        """µs of one call of each on the device."""
        own = self.shadow(*args)
        return cost.device_us(self.like(*args), [lambda run=run: run(*own) for run in runs])


REGISTRY: dict[str, FusedOp] = {}


def forget() -> None:
    """Drop every plan and verdict, so that the next call proves again. For tests and the benchmark."""
    for op in REGISTRY.values():
        op.plans.clear()
        op.verdicts.clear()
