"""The forwards that leaf modules get while their block runs: each gives a pending value where the block's code is known to use one.

Each falls back on the class's own forward for anything it does not expect, and for any thread but the one that is in the block.
"""

from __future__ import annotations

from threading import get_ident

import torch

from .high import MlpColumns, is_touched
from .pending import real
from .values import Chunk, Columns, Gelu, Head, Norm, NormedHead


def modulation_forward(module, shared, active):
    def forward(vec, *args, **kwargs):
        if active[0] != get_ident() or args or kwargs or type(vec) is not torch.Tensor:
            return type(module).forward(module, vec, *args, **kwargs)
        modulation_out = type(module).forward.__globals__["ModulationOut"]
        out = module.lin(shared.silu(vec))
        width = out.shape[-1] // module.multiplier
        chunks = [Chunk(out, i * width, width) for i in range(module.multiplier)]
        return modulation_out(*chunks[:3]), modulation_out(*chunks[3:]) if module.is_double else None

    return forward


def norm_forward(module, shared, active):
    def forward(x, *args, **kwargs):
        if active[0] != get_ident() or args or kwargs or type(x) is not torch.Tensor:
            return type(module).forward(module, real(x), *args, **kwargs)
        return Norm(x, module)

    return forward


def _projection_forward(module, active, joined_v):
    def forward(x, *args, **kwargs):
        out = type(module).forward(module, real(x), *args, **kwargs)
        if active[0] != get_ident() or type(out) is not torch.Tensor or out.ndim != 3:
            return out
        return Columns(out, 0, out.shape[-1], joined_v)

    return forward


def joined_projection_forward(module, shared, active):
    return _projection_forward(module, active, True)


def projection_forward(module, shared, active):
    return _projection_forward(module, active, False)


def qk_norm_forward(module, shared, active):
    def forward(q, k, v, *args, **kwargs):
        q_norm, k_norm = module.query_norm, module.key_norm
        known = type(q) is Head and type(k) is Head and q.fresh and k.fresh
        if active[0] != get_ident() or args or kwargs or not known or is_touched(q_norm) or is_touched(k_norm):
            return type(module).forward(module, real(q), real(k), real(v), *args, **kwargs)
        return NormedHead(q, q_norm, v, shared, (k, k_norm)), NormedHead(k, k_norm, v, shared, (q, q_norm))

    return forward


def gelu_forward(module, shared, active):
    def forward(x, *args, **kwargs):
        if active[0] != get_ident() or args or kwargs or module.approximate != "tanh":
            return type(module).forward(module, real(x), *args, **kwargs)
        if type(x) is MlpColumns and x.fresh:
            return x.activated()
        return Gelu(x, module)

    return forward
