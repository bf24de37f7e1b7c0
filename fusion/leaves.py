"""The forwards that leaf modules get while their block runs: each gives a pending value where the block's code is known to use one.

Each falls back on the class's own forward for anything it does not expect, for any thread but the one that is in the block, and for any other module
that it may find itself on.
"""

from __future__ import annotations

import weakref
from threading import get_ident
from typing import Callable, NamedTuple

import torch

from .pending import real
from .standin import drop, is_touched, stand_in
from .values import Chunk, Columns, Gelu, Head, Norm, NormedHead

Tensor = torch.Tensor


class Leaf(NamedTuple):
    """A module whose forward can be stood in for, and `make(module, shared, active)` for that forward.

    Code of another pack is never handed a pending value: a leaf is only mounted where the leaves that it `feeds` are, and where the modules `beside`
    it, which those run or which run in their place, are untouched.
    """

    kind: str
    module: torch.nn.Module
    make: Callable
    feeds: tuple = ()
    beside: tuple = ()


def leaf(arity: int):
    """A maker of forwards from `lazy(module, shared, *args)`, which gives a pending value for `arity` arguments, or NotImplemented."""

    def maker(lazy):
        def make(module, shared, active):
            home = weakref.ref(module)  # a copy of the module made meanwhile has this forward too, and must not keep the module

            def forward(self, *args, **kwargs):
                if active[0] == get_ident() and self is home():
                    # Hooks are asked for here too: code of others that runs inside the block may have set one since it began.
                    if len(args) == arity and not kwargs and not self._forward_hooks and not self._forward_pre_hooks:
                        result = lazy(self, shared, *args)
                        if result is not NotImplemented:
                            return result
                elif not shared.busy or self is not home():
                    drop(self)
                return type(self).forward(self, *map(real, args), **{name: real(value) for name, value in kwargs.items()})

            return stand_in(module, forward)

        return make

    return maker


@leaf(1)
def modulation_forward(module, shared, vec):
    if type(vec) is not Tensor:
        return NotImplemented
    modulation_out = type(module).forward.__globals__["ModulationOut"]
    out = module.lin(shared.silu(vec))
    width = out.shape[-1] // module.multiplier
    chunks = [Chunk(out, i * width, width) for i in range(module.multiplier)]
    return modulation_out(*chunks[:3]), modulation_out(*chunks[3:]) if module.is_double else None


@leaf(1)
def norm_forward(module, shared, x):
    return Norm(x, module) if type(x) is Tensor else NotImplemented


def _projection(module, x, joined_v):
    out = type(module).forward(module, real(x))
    if type(out) is not Tensor or out.ndim != 3:
        return out
    return Columns(out, 0, out.shape[-1], joined_v)


@leaf(1)
def joined_projection_forward(module, shared, x):
    return _projection(module, x, True)


@leaf(1)
def projection_forward(module, shared, x):
    return _projection(module, x, False)


@leaf(3)
def qk_norm_forward(module, shared, q, k, v):
    q_norm, k_norm = module.query_norm, module.key_norm
    if type(q) is not Head or type(k) is not Head or not q.fresh or not k.fresh or is_touched(q_norm) or is_touched(k_norm):
        return NotImplemented
    return NormedHead(q, q_norm, v, shared, (k, k_norm)), NormedHead(k, k_norm, v, shared, (q, q_norm))


@leaf(1)
def gelu_forward(module, shared, x):
    if module.approximate != "tanh":
        return NotImplemented
    activated = getattr(type(x), "activated", None)  # tier "high" has activated it in the product already
    return activated(x) if activated is not None and x.fresh else Gelu(x, module)
