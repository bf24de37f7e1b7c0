"""x ← r(x + r(y · gate)): FLUX's residual update, bit-exact.

Replaces `x += y * gate` (ComfyUI 0.20.1 to 0.33: written in place) and `x = x + y * gate` (0.3.64, double blocks). The product of two
half-width values is exact in float32 and is rounded once to the storage dtype; the sum is rounded once more.

    x, y   [B, L, D]        bfloat16 or float16, elements adjacent, any row and batch stride
    gate   [1|B, 1|L, D]    same dtype; a tensor or a `ColumnSlice` of a wider Modulation output
    result x itself when `inplace`, else a new contiguous [B, L, D]
"""

from __future__ import annotations

import ctypes

import torch

from . import build
from .nvrtc import Launch
from .proof import PROOF_ELEMENTS, FusedOp, random_like, special_like
from .slices import as_tensor, ceil_div, layout, pointer, row_strides, why_not_plain, why_not_rows

ROWS = 8  # rows a thread walks, as GATE_ROWS in cu/residual_gate.cu


class Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("x_batch", "x_row", "y_batch", "y_row", "g_batch", "g_row", "o_batch", "o_row")]


def residual_gate_add_reference(x, y, gate, inplace):
    product = y * as_tensor(gate)
    if inplace:
        x += product
        return x
    return x + product


class ResidualGate(FusedOp):
    name, label = "residual_gate", "residual gates"

    reference = staticmethod(residual_gate_add_reference)

    def key(self, x, y, gate, inplace):
        return x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & 15, layout(y), layout(gate), inplace

    def why_not(self, x, y, gate, inplace) -> str | None:
        reason = why_not_plain("x", x, 3) or why_not_plain("y", y, 3) or why_not_plain("gate", as_tensor(gate), 3)
        if reason:
            return reason
        if y.shape != x.shape:
            return f"y is {tuple(y.shape)}, x is {tuple(x.shape)}"
        reason = why_not_rows("y", y, x) or why_not_rows("gate", gate, x)
        if reason:
            return reason
        if inplace and x.stride(0) < x.shape[1] * x.stride(1) and x.shape[0] > 1 or x.stride(1) < x.shape[2] and x.shape[1] > 1:
            return f"rows of x overlap (strides {x.stride()})"
        if not inplace and not x.is_contiguous():
            return "x is not contiguous, so torch would choose the layout of the result"
        if x.shape[0] > 65535:
            return f"the batch is {x.shape[0]}"
        return None

    @staticmethod
    def _vectorised(x, y, gate) -> bool:
        strides = (*x.stride()[:2], *y.stride()[:2], *row_strides(gate, *x.shape[:2]))
        return x.shape[2] % 8 == 0 and (x.data_ptr() | y.data_ptr() | pointer(gate)) % 16 == 0 and all(s % 8 == 0 for s in strides)

    def proof_key(self, x, y, gate, inplace):
        g_batch, g_row = row_strides(gate, *x.shape[:2])
        path = "16-byte vectors" if self._vectorised(x, y, gate) else "single elements"
        return path, f"gate per {'row' if g_row else 'batch' if g_batch else 'model'}"

    def proof_cases(self, like, x, y, gate, inplace):
        if not self._vectorised(x, y, gate) or row_strides(gate, *x.shape[:2])[1]:
            return  # the live operands alone, whose path a made-up shape might not take
        width = x.shape[2]
        yield random_like(like, 1, max(64, PROOF_ELEMENTS // width), width), random_like(like, 1, max(64, PROOF_ELEMENTS // width), width).flip(1), random_like(like, 1, 1, width), inplace
        yield special_like(like, 1, 64, width), special_like(like, 1, 64, width).flip(1), special_like(like, 1, 1, width), inplace

    def shadow(self, x, y, gate, inplace):
        return (x.clone() if inplace else x), y, gate, inplace

    def prepare(self, variant, x, y, gate, inplace):
        batch, rows, width = x.shape
        vectorised = self._vectorised(x, y, gate)
        lanes = ceil_div(width, 8) if vectorised else width
        block = min(256, ceil_div(lanes, 32) * 32)
        if lanes > block:  # even column blocks: 384 vectors of a 3072-wide row make 3 x 128, not 256 + 128
            block = ceil_div(ceil_div(lanes, ceil_div(lanes, 128)), 32) * 32
        out_strides = x.stride()[:2] if inplace else (rows * width, width)
        strides = Strides(*x.stride()[:2], *y.stride()[:2], *row_strides(gate, batch, rows), *out_strides)
        grid = (ceil_div(lanes, block), ceil_div(rows, ROWS), batch)
        if grid[1] > 65535:
            return lambda x, y, gate, inplace: residual_gate_add_reference(x, y, gate, inplace)
        launch = Launch(
            build.module(x.device.index, x.dtype), "residual_gate_vec" if vectorised else "residual_gate_scalar", grid, block, 4,
            (strides, ctypes.c_int64(rows), ctypes.c_int(width)),
        )
        span = ((batch - 1) * x.stride(0) + (rows - 1) * x.stride(1) + width) * x.element_size()

        def run(x, y, gate, inplace):
            px, py = x.data_ptr(), y.data_ptr()
            if -span < px - py < span:  # x and y share memory: the order of reads and writes would show
                return residual_gate_add_reference(x, y, gate, inplace)
            out = x if inplace else torch.empty_like(x)
            launch(px if inplace else out.data_ptr(), px, py, pointer(gate))
            return out

        return run


residual_gate = ResidualGate()


def residual_gate_add_(x: torch.Tensor, y: torch.Tensor, gate) -> torch.Tensor:
    """`x += y * gate`; returns x. See the module for shapes."""
    return residual_gate(x, y, gate, True)


def residual_gate_add(x: torch.Tensor, y: torch.Tensor, gate) -> torch.Tensor:
    """`x + y * gate` as a new tensor. See the module for shapes."""
    return residual_gate(x, y, gate, False)
