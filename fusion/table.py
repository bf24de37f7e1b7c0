"""Where core uses a pending value, and which fused operation runs there. What is not here materialises (`pending.py`)."""

from __future__ import annotations

import sys

import torch

from ..kernels.gelu_concat import gelu_concat
from ..kernels.head_concat import head_concat
from ..kernels.layer_norm_modulate import layer_norm_modulate
from ..kernels.residual_gate import residual_gate
from ..kernels.slices import ColumnSlice
from . import weights
from .high import MlpColumns, SplitProjection
from .pending import TABLE, real
from .rope import rope_pair, rope_single
from .values import Chunk, Columns, Gated, Gelu, Head, JoinedHeads, Norm, NormedHead, OnePlus


def plain(value) -> bool:
    return type(value) is torch.Tensor


def on_mul(a, b, **kwargs):
    if kwargs:
        return NotImplemented
    if type(b) is Chunk and plain(a):
        return Gated(a, b)
    if type(a) is Chunk and plain(b):
        return Gated(b, a)
    return NotImplemented


def on_add_in_place(x, update, **kwargs):
    if kwargs or type(update) is not Gated or not update.fresh or not plain(x):
        return NotImplemented
    return residual_gate(x, update.y, update.gate.slice, True)


def on_add(a, b, **kwargs):
    if kwargs:
        return NotImplemented
    if type(a) is Chunk and type(b) is int and b == 1:
        return OnePlus(a)
    if type(b) is Gated and b.fresh and plain(a):
        return residual_gate(a, b.y, b.gate.slice, False)
    return NotImplemented


def on_addcmul(shift, norm, scale, *, value=1, **kwargs):
    if kwargs or value != 1 or type(norm) is not Norm or not norm.fresh or not weights.plain_layer_norm(norm.module, norm.x):
        return NotImplemented
    plus_one = type(scale) is OnePlus and scale.fresh
    scale = scale.scale.slice if plus_one else real(scale)
    shift = shift.slice if type(shift) is Chunk else real(shift)
    return layer_norm_modulate(norm.x, scale, shift, norm.module.eps, plus_one)


def on_cat(tensors, dim=0, **kwargs):
    if kwargs or len(tensors) != 2:
        return NotImplemented
    first, second = tensors
    if type(second) is Gelu and second.fresh and plain(first) and dim in (2, -1) and first.ndim == 3:
        joined = gelu_concat(first, second.operand())
        second._real, second.x = joined[..., first.shape[-1] :], None  # core still holds its `mlp`; its operand, linear1's output, can go
        return joined
    if type(second) is MlpColumns and second.fresh and plain(first) and dim in (2, -1):
        return second.join(first)
    if dim not in (2, -2):
        return NotImplemented
    if type(first) is NormedHead and type(second) is NormedHead and first.fresh and second.fresh:
        return JoinedHeads((first, second))
    if type(first) is Head and type(second) is Head and first.fresh and second.fresh and (first.heads, first.head_dim) == (second.heads, second.head_dim):
        text, image = (ColumnSlice(h.base, h.start, h.heads * h.head_dim) for h in (first, second))
        return head_concat(text, image, first.heads)
    return NotImplemented


def on_split(tensor, sizes, dim=0, **kwargs):
    if kwargs or type(tensor) not in (Columns, SplitProjection) or not tensor.fresh or dim not in (2, -1) or not isinstance(sizes, (list, tuple)):
        return NotImplemented
    if type(tensor) is SplitProjection:
        return tensor.split_into(sizes)
    s = tensor.slice
    if sum(sizes) != s.width or s.base.ndim != 3:
        return NotImplemented
    starts = [s.start + sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(Columns(s.base, start, size, tensor.joined_v) for start, size in zip(starts, sizes))


TABLE.update(dict.fromkeys((torch.Tensor.mul, torch.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__), on_mul))
TABLE.update(dict.fromkeys((torch.Tensor.add_, torch.Tensor.__iadd__), on_add_in_place))
TABLE.update(dict.fromkeys((torch.Tensor.add, torch.add, torch.Tensor.__add__, torch.Tensor.__radd__), on_add))
TABLE.update(dict.fromkeys((torch.addcmul, torch.Tensor.addcmul), on_addcmul))
TABLE.update(dict.fromkeys((torch.cat, torch.concat, torch.concatenate), on_cat))
TABLE[torch.split] = on_split


class Rotation:
    """A rotation as one set of switches makes it: which backend runs it, and so how it rounds, is part of what is proven."""

    __slots__ = ("function", "switches")

    def __init__(self, function, switches):
        self.function, self.switches = function, switches

    def __call__(self, *args):
        return self.function(*args)

    def __repr__(self):
        return f"{self.function} {self.switches}"


_rotations: dict[tuple, Rotation] = {}


def _kitchen_switches() -> tuple:
    """What comfy-kitchen chooses a backend by at each call, besides the operands."""
    registry = getattr(sys.modules.get("comfy_kitchen.registry"), "registry", None)
    override = getattr(getattr(registry, "_thread_local", None), "backend_override", None)
    return tuple(getattr(registry, "_priority", ())), tuple(sorted(getattr(registry, "_disabled", ()))), override


def register_rope(function, pair: bool, switches=None) -> None:
    """Let `function(q, k, pe) -> (q, k)` (pair) or `function(x, pe) -> x` be the rotation that ends a q/k chain.

    `switches()` tells what else its rounding depends on.
    """
    handler = rope_pair if pair else rope_single

    def rotate(*args):
        if switches is None:
            return handler(function, *args)
        key = function, switches()
        rotation = _rotations.get(key)
        if rotation is None:
            rotation = _rotations.setdefault(key, Rotation(*key))
        return handler(rotation, *args)

    TABLE[function] = rotate


def register_comfy_kitchen() -> None:
    """comfy-kitchen's rotations, if core has loaded it. Called when a session starts: importing it is core's business."""
    namespace = getattr(torch.ops, "comfy_kitchen", None)
    for name, pair in (("apply_rope", True), ("apply_rope1", False)):
        packet = getattr(namespace, name, None)
        if packet is not None and packet not in TABLE:
            register_rope(packet, pair, _kitchen_switches)
            register_rope(packet.default, pair, _kitchen_switches)
