"""Plans, kept for as long as what they rest on stays the same, and the swap of a model's forwards for the duration of a call."""

from __future__ import annotations

import threading
import weakref
from contextlib import contextmanager

from .shared import CUDA, Call
from .sites import Plan
from .standin import has_forward_of_others, mount, restore

KINDS = frozenset(("modulation", "norm", "projection", "single_projection", "qk", "gelu"))  # lossless: bit-identical, every one of them

_plans: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # diffusion model -> Plan
_plans_lock = threading.Lock()


def current_plan(diffusion_model) -> Plan | None:
    """The plan on record, unless a block is another object since, or code is other code."""
    found = _plans.get(diffusion_model)
    return found if found and found.holds_for(diffusion_model) else None


def plan_for(diffusion_model) -> Plan:
    """The model's leaves, found once for as long as they stay what they are. The model is one that `recognise` knows."""
    with _plans_lock:
        plan = current_plan(diffusion_model)
        if plan is None:
            plan = _plans[diffusion_model] = Plan(diffusion_model)
    return plan


def forget(diffusion_model) -> None:
    """Let go of a model's plan, which holds its blocks and leaves, unless a call is using it."""
    with _plans_lock:
        found = _plans.get(diffusion_model)
        if found and not found.shared.busy:
            del _plans[diffusion_model]


@contextmanager
def mounted(plan: Plan, kinds=KINDS, token_major: bool = False, share_silu: bool = False, note=lambda text: None, device=CUDA):
    """Give the plan's blocks the forwards that mount their leaves, for the duration of the `with`; yields the Call, which counts.

    Only the instance attribute `forward` is used, and only where no other pack has put one. Removal is in `finally`, since ComfyUI's interrupt is not
    an `Exception`. Yields None, with nothing mounted, where another thread is in a call of this model.
    """
    call, owned = Call(kinds, token_major, share_silu, note, device), []
    if not plan.shared.begin(call):
        yield None
        return
    try:
        for text in plan.notes:
            note(text)
        for unit in plan.units:
            if has_forward_of_others(unit.block):
                note(f"a {type(unit.block).__name__} has a forward of another pack and stays as it is")
            else:
                mount(unit.block, unit.forward, owned)
                call.mounted += unit.weight
        yield call
    finally:
        restore(owned)
        plan.shared.end(call)
