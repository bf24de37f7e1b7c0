"""Leaf modules of FLUX's blocks whose result can be deferred, and the forward each gets while its own block runs.

A leaf is mounted only from the entry of its block's forward, whose code is known, to its exit: whoever calls the leaf from elsewhere gets what
core gives. A block or leaf that another pack has touched (instance forward, hooks, another class) is left alone, with a note.
"""

from __future__ import annotations

import sys
from threading import get_ident

from .high import HighPlan, is_touched
from .leaves import gelu_forward, joined_projection_forward, modulation_forward, norm_forward, projection_forward, qk_norm_forward
from .recognise import is_known_leaf, is_own_forward
from .shared import Shared


class Plan:
    """The blocks of one diffusion model with their leaves. Holds its submodules, never the model itself."""

    def __init__(self, diffusion_model):
        doubles, singles = diffusion_model.double_blocks, diffusion_model.single_blocks
        self.blocks = {"double": len(doubles), "single": len(singles)}
        self.attention = _attention_of(doubles[0])
        self.shared = Shared(self.attention)
        self.high = HighPlan(doubles, singles)
        self.notes = []
        names = type(doubles[0]).forward.__globals__
        self._classes = {"modulation": names["Modulation"], "qk": names["QKNorm"]}
        self.units = []  # (block, the forward that mounts its leaves)
        self.places = []  # where the leaves hang: dictionaries of submodules
        self.classes = set()  # of all modules in the blocks
        self.modulations = []  # with their Linears
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
        active = [0]  # the thread that is in the block's own forward: outside it, a leaf forward that somebody kept is core's again
        made = [(kind, module, make(module, self.shared, active)) for kind, module, make in leaves]
        self.units.append((block, block_forward(block, made, self.shared, active)))
        modules = list(block.modules())
        self.places += [m._modules for m in modules]
        self.classes.update(map(type, modules))

    def _add(self, leaves, kind, module, make):
        stranger = type(module)
        if kind == "modulation":
            self.modulations += [module, module.lin]
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
    names = type(block).forward.__code__.co_varnames
    most = names.index("attn_mask") - 1 if "attn_mask" in names else len(names)  # positional arguments before what has to be seen by name

    def forward(*args, **kwargs):
        own = type(block).forward
        kinds = shared.enter_block(kwargs.get("transformer_options") or {}, kwargs.get("attn_mask"))
        if kinds is None or len(args) > most:
            return own(block, *args, **kwargs)
        owned, outer = [], active[0]
        try:
            active[0] = get_ident()
            for kind, module, leaf in leaves:
                if kind in kinds:
                    if is_touched(module):
                        shared.call.note(f"a {type(module).__name__} has a forward or hooks of another pack and stays as it is")
                    else:
                        attributes = module.__dict__
                        owned.append((attributes, leaf))
                        attributes["forward"] = leaf
            return own(block, *args, **kwargs)
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
