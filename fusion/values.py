"""The operations that can be pending in a FLUX block, one small class each: operands, and what core would have computed from them."""

from __future__ import annotations

import torch

from ..kernels.slices import ColumnSlice
from .pending import Pending, real


class Chunk(Pending):
    """One of the chunks of a Modulation's output: `out.chunk(n, -1)[i]`, [B, 1, D]."""

    __slots__ = ("slice",)

    def __init__(self, base, start, width):
        self._real, self.slice = None, ColumnSlice(base, start, width)

    def _eager(self):
        return self.slice.tensor()


class OnePlus(Pending):
    """`1 + scale` for a Chunk."""

    __slots__ = ("scale",)

    def __init__(self, scale):
        self._real, self.scale = None, scale

    def _eager(self):
        return 1 + self.scale.materialise()


class Gated(Pending):
    """`y * gate`: y a tensor, gate a Chunk."""

    __slots__ = _operands = ("y", "gate")

    def __init__(self, y, gate):
        self._real, self.y, self.gate = None, y, gate

    def _eager(self):
        return self.y * self.gate.materialise()


class Applied(Pending):
    """A module applied to x, a tensor or pending."""

    __slots__ = ("x", "module")
    _operands = ("x",)

    def __init__(self, x, module):
        self._real, self.x, self.module = None, x, module

    def _eager(self):
        return type(self.module).forward(self.module, real(self.x))


class Norm(Applied):
    """A LayerNorm module applied to x."""

    __slots__ = ()

    @property
    def shape(self):
        return (self.x if self._real is None else self._real).shape


class Gelu(Applied):
    """A GELU module applied to columns of a projection (or to a tensor)."""

    __slots__ = ()

    def operand(self):
        return self.x.slice if type(self.x) is Columns and self.x.fresh else real(self.x)


class Columns(Pending):
    """Columns of a projection's output, [B, L, width]: the whole of it, or a part that `torch.split` would give.

    `view(B, L, 3, heads, dim)` followed by `permute(2, 0, 3, 1, 4)` gives q, k and v without making a view; anything else materialises.
    """

    __slots__ = ("slice", "joined_v")

    def __init__(self, base, start, width, joined_v):
        self._real, self.slice, self.joined_v = None, ColumnSlice(base, start, width), joined_v

    @property
    def shape(self):
        shape = self.slice.base.shape
        return shape if shape[-1] == self.slice.width else torch.Size((*shape[:-1], self.slice.width))

    def _eager(self):
        base = self.slice.base
        return base if self.slice.width == base.shape[-1] else self.slice.tensor()

    def view(self, *shape):
        s = self.slice
        if self.fresh and len(shape) == 5 and shape[:2] == tuple(s.base.shape[:2]) and shape[2] == 3 and s.width % (3 * shape[3]) == 0:
            dim = s.width // (3 * shape[3])
            if shape[4] in (-1, dim):
                return Heads(self, shape[3], dim)
        return self.materialise().view(*shape)


class Heads(Pending):
    """`columns.view(B, L, 3, heads, dim)`, waiting for its permute."""

    __slots__ = ("columns", "heads", "head_dim", "permuted")

    def __init__(self, columns, heads, head_dim, permuted=False):
        self._real, self.columns, self.heads, self.head_dim, self.permuted = None, columns, heads, head_dim, permuted

    def _eager(self):
        tensor = self.columns.materialise()
        tensor = tensor.view(*tensor.shape[:2], 3, self.heads, self.head_dim)
        return tensor.permute(2, 0, 3, 1, 4) if self.permuted else tensor

    def permute(self, *dims):
        if dims == (2, 0, 3, 1, 4) and self.fresh and not self.permuted:
            return Heads(self.columns, self.heads, self.head_dim, True)
        return self.materialise().permute(*dims)

    def __iter__(self):
        if not self.permuted or not self.fresh:
            return iter(self.materialise())
        s, width = self.columns.slice, self.heads * self.head_dim
        q, k, v = (Head(s.base, s.start + i * width, self.heads, self.head_dim) for i in range(3))
        # v goes to attention as it is in single blocks, and attention backends want a tensor.
        return iter((q, k, v if self.columns.joined_v else v.materialise()))


class Head(Pending):
    """q, k or v of a projection: a [B, heads, L, dim] view, not made yet."""

    __slots__ = ("base", "start", "heads", "head_dim")

    def __init__(self, base, start, heads, head_dim):
        self._real, self.base, self.start, self.heads, self.head_dim = None, base, start, heads, head_dim

    @property
    def shape(self):
        return torch.Size((self.base.shape[0], self.heads, self.base.shape[1], self.head_dim))

    def _eager(self):
        base = self.base
        batch, tokens, _ = base.shape
        last = base.stride(2)
        strides = (base.stride(0), self.head_dim * last, base.stride(1), last)
        return base.as_strided((batch, self.heads, tokens, self.head_dim), strides, base.storage_offset() + self.start * last)


class NormedHead(Pending):
    """A head after its RMSNorm module. Knows the v it will meet in attention, and its twin (head, module): q's is k's, k's is q's."""

    __slots__ = ("head", "module", "v", "shared", "twin", "eps")

    def __init__(self, head, module, v, shared, twin):
        self._real, self.head, self.module, self.v, self.shared, self.twin, self.eps = None, head, module, v, shared, twin, module.eps

    @property
    def parts(self):
        return (self,)

    @property
    def shape(self):
        return self.head.shape

    def _eager(self):
        return self.module(self.head.materialise())


class JoinedHeads(Pending):
    """`torch.cat(parts, dim=2)` of normed heads: text, then image."""

    __slots__ = ("parts",)

    def __init__(self, parts):
        self._real, self.parts = None, parts

    @property
    def shape(self):
        batch, heads, _, dim = self.parts[0].shape
        return torch.Size((batch, heads, sum(p.shape[2] for p in self.parts), dim))

    def _eager(self):
        return torch.cat([p.materialise() for p in self.parts], dim=2)
