"""Leaf modules of FLUX's blocks whose result can be deferred, and the forward each gets for the time of one model call.

A leaf that another pack has already given an instance `forward`, or that has hooks, is left alone, with a note.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F

from .high import HighPlan, MlpColumns
from .pending import Chunk, Columns, Gelu, Head, Norm, NormedHead, real
from .rope import AttentionLayouts
from .weights import run_linear


class Shared:
    """What the leaves of one model share during a call. Apart from `Plan`, so that leaves and plan make no reference cycle."""

    def __init__(self, attention):
        self.layouts = AttentionLayouts(attention)
        self.begin(False, False)

    def begin(self, token_major: bool, share_silu: bool) -> None:
        self.token_major = token_major  # whether this call may ask attention for the other memory order
        self.share_silu = share_silu  # whether every Modulation of this call sees the same, unwritten vec
        self._silu = (None, None)

    def end(self) -> None:
        self._silu = (None, None)

    def silu(self, vec: torch.Tensor) -> torch.Tensor:
        """`silu(vec)` with the token axis core gives it; computed once a call where that is safe."""
        seen, value = self._silu
        if seen is not vec:
            value = F.silu(vec[:, None, :] if vec.ndim == 2 else vec)
            if self.share_silu:
                self._silu = vec, value
        return value


class Plan:
    """The leaves of one diffusion model. Holds its submodules, never the model itself."""

    def __init__(self, diffusion_model):
        doubles, singles = diffusion_model.double_blocks, diffusion_model.single_blocks
        self.blocks = {"double": len(doubles), "single": len(singles)}
        self.shared = Shared(_attention_of(doubles[0]))
        self.leaves = []  # (kind, module, forward)
        for block in doubles:
            for stream in ("img", "txt"):
                self._add("modulation", getattr(block, f"{stream}_mod"), modulation_forward)
                self._add("norm", getattr(block, f"{stream}_norm1"), norm_forward)
                self._add("norm", getattr(block, f"{stream}_norm2"), norm_forward)
                attention = getattr(block, f"{stream}_attn")
                self._add("qk", attention.qkv, joined_projection_forward)
                self._add("qk", attention.norm, qk_norm_forward)
        for block in singles:
            self._add("modulation", block.modulation, modulation_forward)
            self._add("norm", block.pre_norm, norm_forward)
            self._add("projection", block.linear1, projection_forward)
            self._add("qk", block.norm, qk_norm_forward)
            self._add("gemm", block.linear2, linear_forward)
            if type(block.mlp_act) is torch.nn.GELU and block.mlp_act.approximate == "tanh":
                self._add("gelu", block.mlp_act, gelu_forward)
        final = getattr(getattr(diffusion_model, "final_layer", None), "norm_final", None)
        if final is not None:
            self._add("norm", final, norm_forward)
        self.high = HighPlan(doubles, singles)
        self.leaves += self.high.leaves

    def _add(self, kind, module, make):
        self.leaves.append((kind, module, make(module, self.shared)))

    @property
    def sites(self) -> dict[str, int]:
        """Uses per model call, by operation."""
        double, single = self.blocks["double"], self.blocks["single"]
        return {
            "residual_gate": 4 * double + single,
            "layer_norm_modulate": 4 * double + single + 1,
            "qk_norm_rope": double + single,
            "head_concat": double,
            "gelu_concat": single,
            "linear": 2 * double + 2 * single,
            "linear_gelu": 0,
        }


def _attention_of(block):
    """Core's `attention(q, k, v, pe, mask, transformer_options)`, as the block's own module sees it when asked."""
    module = type(block).__module__
    return lambda q, k, v, pe: sys.modules[module].attention(q, k, v, pe=pe)


def hooked(module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def deferrable_rms_norm(module) -> bool:
    """torch's RMSNorm (core's derives from it), untouched by hooks or another pack. Older cores had a class of their own."""
    return isinstance(module, torch.nn.RMSNorm) and "forward" not in module.__dict__ and not hooked(module)


# --- forwards. Each falls back on the class's own forward for anything it does not expect. ---


def modulation_forward(module, shared):
    def forward(vec, *args, **kwargs):
        if args or kwargs or type(vec) is not torch.Tensor:
            return type(module).forward(module, vec, *args, **kwargs)
        modulation_out = type(module).forward.__globals__["ModulationOut"]
        out = module.lin(shared.silu(vec))
        width = out.shape[-1] // module.multiplier
        chunks = [Chunk(out, i * width, width) for i in range(module.multiplier)]
        return modulation_out(*chunks[:3]), modulation_out(*chunks[3:]) if module.is_double else None

    return forward


def norm_forward(module, shared):
    def forward(x, *args, **kwargs):
        if args or kwargs or type(x) is not torch.Tensor:
            return type(module).forward(module, real(x), *args, **kwargs)
        return Norm(x, module)

    return forward


def _projection_forward(module, joined_v):
    def forward(x, *args, **kwargs):
        x = real(x)
        out = type(module).forward(module, x, *args, **kwargs) if args or kwargs or type(x) is not torch.Tensor else run_linear(module, x)
        if type(out) is not torch.Tensor or out.ndim != 3:
            return out
        return Columns(out, 0, out.shape[-1], joined_v)

    return forward


def linear_forward(module, shared):
    def forward(x, *args, **kwargs):
        x = real(x)
        if args or kwargs or type(x) is not torch.Tensor:
            return type(module).forward(module, x, *args, **kwargs)
        return run_linear(module, x)

    return forward


def joined_projection_forward(module, shared):
    return _projection_forward(module, True)


def projection_forward(module, shared):
    return _projection_forward(module, False)


def qk_norm_forward(module, shared):
    def forward(q, k, v, *args, **kwargs):
        q_norm, k_norm = module.query_norm, module.key_norm
        known = type(q) is Head and type(k) is Head and q.fresh and k.fresh and deferrable_rms_norm(q_norm) and deferrable_rms_norm(k_norm)
        if args or kwargs or not known:
            return type(module).forward(module, real(q), real(k), real(v), *args, **kwargs)
        return NormedHead(q, q_norm, v, shared, (k, k_norm)), NormedHead(k, k_norm, v, shared, (q, q_norm))

    return forward


def gelu_forward(module, shared):
    def forward(x, *args, **kwargs):
        if args or kwargs:
            return type(module).forward(module, real(x), *args, **kwargs)
        if type(x) is MlpColumns and x.fresh:
            return x.activated()
        return Gelu(x, module)

    return forward
