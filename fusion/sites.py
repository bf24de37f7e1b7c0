"""Leaf modules of FLUX's blocks whose result can be deferred, and the forward each gets while its own block runs.

A leaf is mounted only from the entry of its block's forward, whose code is known, to its exit: whoever calls the leaf from elsewhere gets what
core gives. A block or leaf that another pack has touched (instance forward, hooks, another class) is left alone, with a note.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F

from .high import HighPlan, MlpColumns, is_touched
from .pending import real
from .recognise import is_known_leaf, is_own_forward
from .rope import AttentionLayouts
from .values import Chunk, Columns, Gelu, Head, Norm, NormedHead

IDLE = (frozenset(), False, False, lambda text: None)


class Shared:
    """What the leaves of one model share during a call. Apart from `Plan`, so that leaves and plan make no reference cycle."""

    def __init__(self, attention):
        self.layouts = AttentionLayouts(attention)
        self._calls = []
        self._apply()

    def begin(self, kinds=frozenset(), token_major: bool = False, share_silu: bool = False, note=lambda text: None) -> list:
        """Set what the leaves of a call may do, until `end` is given what this returns. Calls may nest, and overlap in threads."""
        # token_major: whether attention may be asked for the other memory order
        # share_silu: whether every Modulation of this call sees the same, unwritten vec
        call = [kinds, token_major, share_silu, note]
        self._calls.append(call)
        self._apply()
        return call

    def end(self, call: list) -> None:
        self._calls = [c for c in self._calls if c is not call]
        self._apply()

    def _apply(self) -> None:
        self.kinds, self.token_major, self.share_silu, self.note = self._calls[-1] if self._calls else IDLE
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
    """The blocks of one diffusion model with their leaves. Holds its submodules, never the model itself."""

    def __init__(self, diffusion_model):
        doubles, singles = diffusion_model.double_blocks, diffusion_model.single_blocks
        self.blocks = {"double": len(doubles), "single": len(singles)}
        self.shared = Shared(_attention_of(doubles[0]))
        self.high = HighPlan(doubles, singles)
        self.notes = []
        names = type(doubles[0]).forward.__globals__
        self._classes = {"modulation": names["Modulation"], "qk": names["QKNorm"]}
        self.units = []  # (block, the forward that mounts its leaves)
        self.places = []  # where the leaves hang: dictionaries of submodules
        for block in doubles:
            leaves = []
            for stream in ("img", "txt"):
                self._add(leaves, "modulation", getattr(block, f"{stream}_mod"), modulation_forward)
                self._add(leaves, "norm", getattr(block, f"{stream}_norm1"), norm_forward)
                self._add(leaves, "norm", getattr(block, f"{stream}_norm2"), norm_forward)
                attention = getattr(block, f"{stream}_attn")
                self._add(leaves, "projection", attention.qkv, joined_projection_forward)
                self._add(leaves, "qk", attention.norm, qk_norm_forward)
            self._unit(block, leaves + self.high.leaves[block])
        for block in singles:
            leaves = []
            self._add(leaves, "modulation", block.modulation, modulation_forward)
            self._add(leaves, "norm", block.pre_norm, norm_forward)
            self._add(leaves, "single_projection", block.linear1, projection_forward)
            self._add(leaves, "qk", block.norm, qk_norm_forward)
            self._add(leaves, "gelu", block.mlp_act, gelu_forward)
            self._unit(block, leaves + self.high.leaves[block])
        final, leaves = getattr(diffusion_model, "final_layer", None), []
        if getattr(final, "norm_final", None) is not None:
            self._add(leaves, "norm", final.norm_final, norm_forward)
            self._unit(final, leaves)

    def _unit(self, block, leaves):
        active = [False]  # whether the block's own forward is running: outside it, a leaf forward that somebody kept is core's again
        made = [(kind, module, make(module, self.shared, active)) for kind, module, make in leaves]
        self.units.append((block, block_forward(block, made, self.shared, active)))
        self.places += [block._modules, *(m._modules for m in block._modules.values() if m is not None)]

    def _add(self, leaves, kind, module, make):
        stranger = type(module)
        if kind in self._classes:
            known = stranger is self._classes[kind] and is_own_forward(stranger)
            if known and kind == "qk":
                unknown = [type(n) for n in (module.query_norm, module.key_norm) if not is_known_leaf("RMSNorm", n)]
                if unknown:
                    known, stranger = False, unknown[0]
        elif kind == "norm":
            known = is_known_leaf("LayerNorm", module)
        elif kind == "gelu":
            known = is_known_leaf("GELU", module) and module.approximate == "tanh"
        else:
            known = True  # a projection's own forward runs, whatever it is
        if known:
            leaves.append((kind, module, make))
        else:
            origin = "core's, but not one that was checked, and" if stranger.__module__.startswith("comfy.") else "of another pack and"
            note = f"a {stranger.__qualname__} is {origin} stays as it is"
            self.notes += [note] if note not in self.notes else []

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
            "linear_gelu": 0,
        }


def block_forward(block, leaves, shared, active):
    """A forward for `block` that mounts its leaves, runs the block's own forward, and restores."""

    def forward(*args, **kwargs):
        owned, kinds, outer = [], shared.kinds, active[0]
        try:
            active[0] = True
            for kind, module, leaf in leaves:
                if kind in kinds:
                    if is_touched(module):
                        shared.note(f"a {type(module).__name__} has a forward or hooks of another pack and stays as it is")
                    else:
                        attributes = module.__dict__
                        owned.append((attributes, leaf))
                        attributes["forward"] = leaf
            return type(block).forward(block, *args, **kwargs)
        finally:
            active[0] = outer
            for attributes, leaf in owned:
                if attributes.get("forward") is leaf:
                    del attributes["forward"]

    return forward


def _attention_of(block):
    """A function that gives core's `attention(q, k, v, pe, mask, transformer_options)` as the block's own module sees it when asked."""
    module = type(block).__module__
    return lambda: sys.modules[module].attention


# --- forwards. Each falls back on the class's own forward for anything it does not expect. ---


def modulation_forward(module, shared, active):
    def forward(vec, *args, **kwargs):
        if not active[0] or args or kwargs or type(vec) is not torch.Tensor:
            return type(module).forward(module, vec, *args, **kwargs)
        modulation_out = type(module).forward.__globals__["ModulationOut"]
        out = module.lin(shared.silu(vec))
        width = out.shape[-1] // module.multiplier
        chunks = [Chunk(out, i * width, width) for i in range(module.multiplier)]
        return modulation_out(*chunks[:3]), modulation_out(*chunks[3:]) if module.is_double else None

    return forward


def norm_forward(module, shared, active):
    def forward(x, *args, **kwargs):
        if not active[0] or args or kwargs or type(x) is not torch.Tensor:
            return type(module).forward(module, real(x), *args, **kwargs)
        return Norm(x, module)

    return forward


def _projection_forward(module, active, joined_v):
    def forward(x, *args, **kwargs):
        out = type(module).forward(module, real(x), *args, **kwargs)
        if not active[0] or type(out) is not torch.Tensor or out.ndim != 3:
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
        if not active[0] or args or kwargs or not known or is_touched(q_norm) or is_touched(k_norm):
            return type(module).forward(module, real(q), real(k), real(v), *args, **kwargs)
        return NormedHead(q, q_norm, v, shared, (k, k_norm)), NormedHead(k, k_norm, v, shared, (q, q_norm))

    return forward


def gelu_forward(module, shared, active):
    def forward(x, *args, **kwargs):
        if not active[0] or args or kwargs:
            return type(module).forward(module, real(x), *args, **kwargs)
        if type(x) is MlpColumns and x.fresh:
            return x.activated()
        return Gelu(x, module)

    return forward
