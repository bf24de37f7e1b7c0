"""A forward that stands on one module for the duration of a call, and what can be told of one that stands there already.

It is a method of that module under the name and signature of its class's own forward: whoever looks at it sees what core would show, a copy of the
module made meanwhile gets core's, and one that somebody kept and put back after the call is known for ours.
"""

from __future__ import annotations

import functools
import sys
import weakref
from types import MethodType

import torch

_made: weakref.WeakSet = weakref.WeakSet()  # every function of a stand-in
_NOTHING = object()
_CALL = torch.nn.Module._call_impl.__code__


def stand_in(module, function) -> MethodType:
    """`function(self, *args, **kwargs)` as the forward of `module`. It has to ask whether `self` is the module it was made for."""
    functools.update_wrapper(function, type(module).forward)
    _made.add(function)
    return MethodType(function, module)


def _is_ours(forward) -> bool:
    return type(forward) is MethodType and forward.__func__ in _made


def _is_the_classes(module, forward) -> bool:
    return type(forward) is MethodType and forward.__self__ is module and forward.__func__ is type(module).forward


def has_forward_of_others(module) -> bool:
    """Whether another pack has given the module a forward of its own. Core itself leaves the class's own method behind on some."""
    forward = module.__dict__.get("forward")
    return forward is not None and not _is_the_classes(module, forward) and not (_is_ours(forward) and forward.__self__ is module)


def is_touched(module) -> bool:
    """Whether another pack has given the module a forward, hooks or a compiled call."""
    own = module.__dict__
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or own.get("_backward_hooks") or own.get("_backward_pre_hooks"):
        return True
    return "_compiled_call_impl" in own and own["_compiled_call_impl"] is not None or "forward" in own and has_forward_of_others(module)


def mount(module, forward, owned: list) -> None:
    """Put `forward` on the module and on record in `owned`, unless an outer call has done both."""
    attributes = module.__dict__
    before = attributes.get("forward", _NOTHING)
    if before is forward:
        return
    owned.append((attributes, forward, before if before is _NOTHING or _is_the_classes(module, before) else _NOTHING))
    attributes["forward"] = forward


def restore(owned: list) -> None:
    """Undo every `mount` on record, except where somebody has put something else there since."""
    for attributes, forward, before in owned:
        if attributes.get("forward") is forward:
            if before is _NOTHING:
                del attributes["forward"]
            else:
                attributes["forward"] = before


def drop(module) -> None:
    """Take off a stand-in of ours that has nothing to do there: put back by somebody after our call, or come along with a copy."""
    if _is_ours(module.__dict__.get("forward")):
        del module.__dict__["forward"]


def called_module(bound):
    """The module that is being called, where a stand-in finds itself bound to `bound`. To be asked by the stand-in itself.

    A shallow copy (`copy.copy`, DataParallel's replicas) shares the method that is bound to the original. Only the frame of torch's `_call_impl`,
    which is the caller, knows which of the two was called.
    """
    caller = sys._getframe(2)
    return caller.f_locals.get("self", bound) if caller.f_code is _CALL else bound
