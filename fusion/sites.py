"""Leaf modules of FLUX's blocks whose result can be deferred, and the forward each gets while its own block runs.

A leaf is mounted only from the entry of its block's forward, whose code is known, to its exit: whoever calls the leaf from elsewhere gets what
core gives. A block or leaf that another pack has touched (instance forward, hooks, another class) is left alone, with a note; so is a block that is
not, or is not given, what the plan was made for.
"""

from __future__ import annotations

import sys
from threading import get_ident

import torch

from .classes import is_cores_linear, is_known_leaf, is_own_class
from .high import HighPlan
from .leaves import Leaf, gelu_forward, joined_projection_forward, modulation_forward, norm_forward, projection_forward, qk_norm_forward
from .shared import Q_AND_K, Shared
from .standin import drop, is_touched, mount, restore, stand_in
from .watch import ON_CLASSES, Below, Watch, code_places

Tensor = torch.Tensor
PLAIN = frozenset((type(None), dict, list, tuple))
IN_ORDER = frozenset(("modulation", "norm"))  # of no use, and handed on unrun, where core modulates token ranges of their own


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
        self.modulations = []  # with their Linears
        final = getattr(diffusion_model, "final_layer", None)
        self._made_for = self._identities(diffusion_model)
        classes = {type(m) for part in (*doubles, *singles, final) if part is not None for m in part.modules()}
        self.code = Watch([*code_places(self.attention(), doubles[0]), *((cls, ON_CLASSES) for cls in classes)])
        for block in dict.fromkeys(doubles):  # a pack may run one block several times
            leaves = []
            for stream in ("img", "txt"):
                attention = getattr(block, f"{stream}_attn")
                self._add(leaves, "modulation", getattr(block, f"{stream}_mod"), modulation_forward)
                self._add(leaves, "norm", getattr(block, f"{stream}_norm1"), norm_forward)
                self._add(leaves, "norm", getattr(block, f"{stream}_norm2"), norm_forward)
                self._add_qk(leaves, attention.norm, "projection", attention.qkv, joined_projection_forward)
            self._unit(block, leaves + self.high.leaves[block])
        for block in dict.fromkeys(singles):
            leaves = []
            self._add(leaves, "modulation", block.modulation, modulation_forward)
            self._add(leaves, "norm", block.pre_norm, norm_forward)
            self._add(leaves, "gelu", block.mlp_act, gelu_forward)
            self._add_qk(leaves, block.norm, "single_projection", block.linear1, projection_forward, feeds=(block.mlp_act,))
            self._unit(block, leaves + self.high.leaves[block])
        self.distinct_blocks = len(self.units)
        leaves = []
        if getattr(final, "norm_final", None) is not None:
            self._add(leaves, "norm", final.norm_final, norm_forward)
            self._unit(final, leaves, counts=False)
        self.alone = all(map(is_cores_linear, self.modulations[1::2]))  # no Modulation writes to the silu(vec) that it is given

    @staticmethod
    def _identities(diffusion_model) -> list:
        parts = *diffusion_model.double_blocks, None, *diffusion_model.single_blocks, getattr(diffusion_model, "final_layer", None)
        return list(map(id, parts))

    def holds_for(self, diffusion_model) -> bool:
        """Whether the model still has the blocks and the code that this plan was made from, as far as its blocks have found."""
        return not self.shared.outdated and self._identities(diffusion_model) == self._made_for and self.code.unchanged()

    def _unit(self, block, leaves, counts=True):
        active = [0]  # the thread that is in the block's own forward: outside it, a leaf forward that somebody kept is core's again
        made = [(leaf, leaf.make(leaf.module, self.shared, active)) for leaf in leaves]
        self.units.append((block, block_forward(block, made, self.shared, active, self.code, counts)))

    def _add_qk(self, leaves, norm, kind, projection, make, feeds=()):
        """The norm of q and k, and the projection that it gets them from."""
        beside = norms = norm.query_norm, norm.key_norm
        if self._add(leaves, "qk", norm, qk_norm_forward, beside=norms):
            feeds, beside = (norm, *feeds), ()
        elif all(is_own_class(type(m)) and type(m).__module__.startswith(("comfy.", "torch.")) for m in (norm, *norms)):
            beside = norm, *norms  # core's own, though not checked: it uses torch's functions on what it gets
        else:
            return
        self._add(leaves, kind, projection, make, feeds, beside)

    def _add(self, leaves, kind, module, make, feeds=(), beside=()) -> bool:
        stranger = type(module)
        if kind == "modulation":
            self.modulations += [module, module.lin]
        if kind in self._classes:
            known = stranger is self._classes[kind] and is_own_class(stranger)
            unknown = [type(n) for n in beside if not is_known_leaf("RMSNorm", n)]
            if known and unknown:
                known, stranger = False, unknown[0]
        elif kind == "norm":
            known = is_known_leaf("LayerNorm", module)
        elif kind == "gelu":
            known = is_known_leaf("GELU", module) and module.approximate == "tanh"
        else:
            known = stranger.__call__ is torch.nn.Module.__call__  # a projection's own forward runs, whatever it is
        if known:
            leaves.append(Leaf(kind, module, make, feeds, beside))
        else:
            origin = "core's, but not one that was checked, and" if stranger.__module__.startswith("comfy.") else "of another pack and"
            note = f"a {stranger.__qualname__} is {origin} stays as it is"
            self.notes += [note] if note not in self.notes else []
        return known

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


def block_forward(block, leaves, shared, active, code, counts):
    """A forward for `block` that mounts its leaves, runs the block's own forward, and restores."""
    names = type(block).forward.__code__.co_varnames[1 : type(block).forward.__code__.co_argcount]
    most = names.index("attn_mask") if "attn_mask" in names else len(names)  # positional arguments before what has to be seen by name
    pe_at = names.index("pe") if "pe" in names else None
    ranges = tuple(name for name in names if name.startswith("modulation_dims"))
    below = Below(block)

    def mountable(self, args, kwargs):
        """Kinds of leaves that may be mounted for this call of the block."""
        if self is not block or len(args) > most:
            return None
        for value in (*args, *kwargs.values()):
            kind = type(value)
            if kind is not Tensor and kind not in PLAIN and isinstance(value, Tensor):
                return None  # a tensor of another pack's class, which may see every operation
        kinds = shared.enter_block(kwargs.get("transformer_options") or {}, kwargs.get("attn_mask"))
        if not kinds:
            return None
        if not code.unchanged() or not below.unchanged():
            shared.outdated = True
            shared.call.note("a block ran as core runs it: another pack has changed it, or the code it runs, during the call")
            return None
        if pe_at is not None and type(args[pe_at] if len(args) > pe_at else kwargs.get("pe")) is not Tensor:
            kinds = kinds - Q_AND_K  # no rotation: they would reach attention unrun
        if ranges and any(kwargs.get(name) is not None for name in ranges):
            kinds = kinds - IN_ORDER
        return kinds

    def forward(self, *args, **kwargs):
        kinds = mountable(self, args, kwargs)
        if kinds is None:
            if not shared.busy:
                drop(self)
            return type(self).forward(self, *args, **kwargs)
        owned, outer = [], active[0]
        try:
            active[0] = get_ident()
            put_on = set()
            for leaf, stand_in_forward in leaves:
                if leaf.kind not in kinds or (leaf.feeds and not put_on.issuperset(leaf.feeds)):
                    continue
                touched = next(filter(is_touched, (leaf.module, *leaf.beside)), None)
                if touched is not None:
                    shared.call.note(f"a {type(touched).__name__} has a forward or hooks of another pack and stays as it is")
                else:
                    mount(leaf.module, stand_in_forward, owned)
                    put_on.add(leaf.module)
            shared.mounted = put_on
            shared.call.entered += counts and bool(owned)
            return type(self).forward(self, *args, **kwargs)
        finally:
            active[0] = outer
            restore(owned)

    return stand_in(block, forward)


def _attention_of(block):
    """A function that gives core's `attention(q, k, v, pe, mask, transformer_options)` as the block's own module sees it when asked."""
    module = type(block).__module__
    return lambda: sys.modules[module].attention
