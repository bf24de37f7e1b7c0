"""Leaf modules of FLUX's blocks whose result can be deferred, and the forward each gets while its own block runs.

A leaf is mounted only from the entry of its block's forward, whose code is known, to its exit: whoever calls the leaf from elsewhere gets what
core gives. A block or leaf that another pack has touched (instance forward, hooks, another class) is left alone, with a note; so is a block that is
not, or is not given, what the plan was made for.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from threading import get_ident

import torch

from .classes import is_cores_linear, is_known_leaf, is_own_class
from .high import HighPlan
from .leaves import Leaf, gelu_forward, joined_projection_forward, modulation_forward, norm_forward, projection_forward, qk_norm_forward
from .shared import Q_AND_K, Shared
from .standin import called_module, drop, is_touched, mount, restore, stand_in
from .watch import ON_CLASSES, Below, Watch, code_places

Tensor = torch.Tensor
GIVEN = frozenset((Tensor, type(None), dict, list, tuple))  # types of what core gives to a block
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
        self.units = []
        self.modulations = []  # with their Linears
        final = getattr(diffusion_model, "final_layer", None)
        self._made_for = self._identities(diffusion_model)
        classes = {type(m) for part in (*doubles, *singles, final) if part is not None for m in part.modules()}
        self.code = Watch([*code_places(self.attention(), doubles[0]), *((cls, ON_CLASSES) for cls in classes)])
        for block, times in Counter(doubles).items():  # a pack may run one block several times
            leaves = []
            for stream in ("img", "txt"):
                attention = getattr(block, f"{stream}_attn")
                self._add(leaves, "modulation", getattr(block, f"{stream}_mod"), modulation_forward)
                self._add(leaves, "norm", getattr(block, f"{stream}_norm1"), norm_forward)
                self._add(leaves, "norm", getattr(block, f"{stream}_norm2"), norm_forward)
                self._add_qk(leaves, attention.norm, "projection", attention.qkv, joined_projection_forward)
            self._unit(block, leaves + self.high.leaves[block], times)
        for block, times in Counter(singles).items():
            leaves = []
            self._add(leaves, "modulation", block.modulation, modulation_forward)
            self._add(leaves, "norm", block.pre_norm, norm_forward)
            self._add(leaves, "gelu", block.mlp_act, gelu_forward)
            self._add_qk(leaves, block.norm, "single_projection", block.linear1, projection_forward, feeds=(block.mlp_act,))
            self._unit(block, leaves + self.high.leaves[block], times)
        leaves = []
        if getattr(final, "norm_final", None) is not None:
            self._add(leaves, "norm", final.norm_final, norm_forward)
            self._unit(final, leaves, 0)
        self.alone = all(map(is_cores_linear, self.modulations[1::2]))  # no Modulation writes to the silu(vec) that it is given

    @staticmethod
    def _identities(diffusion_model) -> list:
        parts = *diffusion_model.double_blocks, None, *diffusion_model.single_blocks, getattr(diffusion_model, "final_layer", None)
        return list(map(id, parts))

    def holds_for(self, diffusion_model) -> bool:
        """Whether the model still has the blocks and the code that this plan was made from, as far as its blocks have found."""
        if self._identities(diffusion_model) != self._made_for or not self.code.unchanged():
            return False
        if self.shared.outdated:  # but another pack may have taken back by now what it changed
            self.shared.outdated = not all(unit.below.unchanged() for unit in self.units)
        return not self.shared.outdated

    def _unit(self, block, leaves, weight):
        self.units.append(Unit(block, leaves, self.shared, self.code, weight))

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


class Unit:
    """A block (or the layer after the blocks) with its leaves, and the forward that mounts them. `weight`: how often the model has the block."""

    __slots__ = ("block", "forward", "weight", "leaves", "below", "code", "shared", "active", "most", "pe_at", "ranges", "__weakref__")

    def __init__(self, block, leaves, shared, code, weight):
        own = type(block).forward.__code__
        names = own.co_varnames[1 : own.co_argcount]
        self.block, self.weight, self.shared, self.code, self.below = block, weight, shared, code, Below(block)
        self.most = names.index("attn_mask") if "attn_mask" in names else len(names)  # positional arguments before what has to be seen by name
        self.pe_at = names.index("pe") if "pe" in names else None
        self.ranges = tuple(name for name in names if name.startswith("modulation_dims"))
        self.active = [0]  # the thread that is in the block's own forward: outside it, a leaf forward that somebody kept is core's again
        self.leaves = [(leaf.kind, leaf.module, leaf.make(leaf.module, shared, self.active), leaf.feeds, leaf.beside) for leaf in leaves]
        self.forward = block_forward(self)

    def mountable(self, args, kwargs) -> frozenset | None:
        """Kinds of leaves that may be mounted for this call of the block, or None."""
        call = self.shared.call
        given = *args, *kwargs.values()
        unusual = not GIVEN.issuperset(map(type, given)) and any(isinstance(v, Tensor) and type(v) is not Tensor for v in given)
        if unusual or len(args) > self.most:
            call.refuse("a block is given a tensor of another pack's class, or arguments in another pack's way")
            return None
        kinds = self.shared.enter_block(kwargs.get("transformer_options") or {}, kwargs.get("attn_mask"))
        if not kinds or not (self.weight or call.entered):  # the layer after the blocks alone is not worth a word
            return None
        if not self.code.unchanged() or not self.below.unchanged():
            self.shared.outdated = True
            call.refuse("another pack has changed a block, or the code it runs, in the middle of the call")
            return None
        if self.pe_at is not None and type(args[self.pe_at] if len(args) > self.pe_at else kwargs.get("pe")) is not Tensor:
            kinds = kinds - Q_AND_K  # no rotation: they would reach attention unrun
        if self.ranges and any(kwargs.get(name) is not None for name in self.ranges):
            kinds = kinds - IN_ORDER
        return kinds

    def mount(self, kinds, owned: list) -> None:
        put_on, call = set(), self.shared.call
        for kind, module, forward, feeds, beside in self.leaves:
            if kind not in kinds or (feeds and not put_on.issuperset(feeds)):
                continue
            touched = module if is_touched(module) else next(filter(is_touched, beside), None) if beside else None
            if touched is not None:
                call.note(f"a {type(touched).__name__} has a forward or hooks of another pack and stays as it is")
            else:
                mount(module, forward, owned)
                put_on.add(module)
        self.shared.mounted = put_on
        if put_on and self.block not in call.blocks:
            call.blocks.add(self.block)
            call.entered += self.weight


def block_forward(unit: Unit):
    """A forward for the unit's block that mounts its leaves, runs the block's own forward, and restores.

    It holds the unit weakly: a copy of the block made during our call has this forward too, and must not keep the block.
    """
    find = weakref.ref(unit)

    def forward(self, *args, **kwargs):
        unit, self = find(), called_module(self)
        if unit is None or self is not unit.block or not unit.shared.busy:
            drop(self)
            return type(self).forward(self, *args, **kwargs)
        kinds = unit.mountable(args, kwargs)
        if kinds is None:
            return type(self).forward(self, *args, **kwargs)
        owned, active, outer = [], unit.active, unit.active[0]
        try:
            active[0] = get_ident()
            unit.mount(kinds, owned)
            return type(self).forward(self, *args, **kwargs)
        finally:
            active[0] = outer
            restore(owned)

    return stand_in(unit.block, forward)


def _attention_of(block):
    """A function that gives core's `attention(q, k, v, pe, mask, transformer_options)` as the block's own module sees it when asked."""
    module = type(block).__module__
    return lambda: sys.modules[module].attention
