"""Plans, kept for as long as what they rest on stays the same, and the swap of a model's forwards for the duration of a call."""

from __future__ import annotations

import threading
import weakref
from contextlib import contextmanager

from .shared import CUDA, Call
from .sites import Plan

KINDS = frozenset(("modulation", "norm", "projection", "single_projection", "qk", "gelu"))  # lossless: bit-identical, every one of them

_plans: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # diffusion model -> (what the plan was made from, Plan)
_plans_lock = threading.Lock()


def current_plan(diffusion_model) -> Plan | None:
    """The plan on record, unless a block or leaf is another object since, or a class has another forward than it had."""
    found = _plans.get(diffusion_model)
    return found[1] if found and found[0] == _made_from(diffusion_model, found[1]) else None


def plan_for(diffusion_model) -> Plan:
    """The model's leaves, found once for as long as they stay what they are. The model is one that `recognise` knows."""
    with _plans_lock:
        plan = current_plan(diffusion_model)
        if plan is None:
            plan = Plan(diffusion_model)
            _plans[diffusion_model] = _made_from(diffusion_model, plan), plan
    return plan


def _made_from(diffusion_model, plan: Plan) -> tuple:
    """Identities and classes of all that a plan rests on."""
    blocks = (*diffusion_model.double_blocks, *diffusion_model.single_blocks)
    modules = [m for place in plan.places for m in place.values()]
    return list(map(id, blocks)), list(map(id, modules)), list(map(type, modules)), [cls.forward for cls in plan.classes]


def forget(diffusion_model) -> None:
    """Let go of a model's plan, which holds its blocks and leaves, unless a call is using it."""
    with _plans_lock:
        found = _plans.get(diffusion_model)
        if found and not found[1].shared.busy:
            del _plans[diffusion_model]


@contextmanager
def mounted(plan: Plan, kinds=KINDS, token_major: bool = False, share_silu: bool = False, note=lambda text: None, device=CUDA):
    """Give the plan's blocks the forwards that mount their leaves, for the duration of the `with`; yields how many blocks it could.

    Only the instance attribute `forward` is used, and only where there is none: a block that another pack has patched stays as it is.
    Removal is in `finally`, since ComfyUI's interrupt is not an `Exception`. Yields None, with nothing mounted, where another thread is in a
    call of this model.
    """
    call, owned = Call(kinds, token_major, share_silu, note, device), []
    if not plan.shared.begin(call):
        yield None
        return
    try:
        for text in plan.notes:
            note(text)
        for block, forward in plan.units:
            attributes = block.__dict__
            if attributes.get("forward") is forward:
                continue  # an outer call has mounted it, and will restore it
            if "forward" in attributes:
                note(f"a {type(block).__name__} has a forward of another pack and stays as it is")
            else:
                owned.append((attributes, forward))
                attributes["forward"] = forward
        yield sum(block.__dict__.get("forward") is forward for block, forward in plan.units[: sum(plan.blocks.values())])
    finally:
        for attributes, forward in owned:
            if attributes.get("forward") is forward:
                del attributes["forward"]
        plan.shared.end(call)
