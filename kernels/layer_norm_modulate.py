"""shift + layer_norm(x) · (1 + scale): FLUX's modulated LayerNorm without affine weights, bit-exact.

Replaces `torch.addcmul(shift, F.layer_norm(x, (D,), None, None, eps), 1 + scale)`. Roundings to the storage dtype, in order: the normalised
value, `1 + scale`, the result (the product of the two is exact in float32). The reduction follows PyTorch's vectorised CUDA LayerNorm step
by step (aten/src/ATen/native/cuda/layer_norm_kernel.cu: Welford, then Chan's combination); cu/layer_norm_modulate.cu states the order.

    x             [B, L, D]      bfloat16 or float16, elements adjacent, any row and batch stride, 8-byte aligned;
                  D a multiple of 512, or 4 · 2^k below that, so that torch's threads hold equal shares
    scale, shift  [1|B, 1|L, D]  same dtype; tensors or `ColumnSlice`s
    plus_one      whether `scale` still lacks its `1 +`
    result        a new contiguous [B, L, D]
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F

from . import build
from .nvrtc import Launch
from .proof import PROOF_ELEMENTS, FusedOp, random_like, special_like
from .slices import ColumnSlice, as_tensor, layout, pointer, row_strides, why_not_plain, why_not_rows

THREADS = 128  # PyTorch's: the order of the reduction depends on it


class Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("x_batch", "x_row", "scale_batch", "scale_row", "shift_batch", "shift_row")]


def layer_norm_modulate_reference(x, scale, shift, eps, plus_one):
    scale = as_tensor(scale)
    return torch.addcmul(as_tensor(shift), F.layer_norm(x, x.shape[-1:], None, None, eps), 1 + scale if plus_one else scale)


class LayerNormModulate(FusedOp):
    name, label = "layer_norm_modulate", "modulated LayerNorms"

    reference = staticmethod(layer_norm_modulate_reference)

    def key(self, x, scale, shift, eps, plus_one):
        if type(scale) is ColumnSlice and type(shift) is ColumnSlice and scale.base is shift.base:
            return x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & 15, layout(scale), shift.start, shift.width, eps, plus_one
        return x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & 15, layout(scale), layout(shift), eps, plus_one

    def why_not(self, x, scale, shift, eps, plus_one) -> str | None:
        scale_tensor, shift_tensor = as_tensor(scale), as_tensor(shift)
        reason = why_not_plain("x", x, 3) or why_not_plain("scale", scale_tensor, 3) or why_not_plain("shift", shift_tensor, 3)
        if reason:
            return reason
        vectors, rest = divmod(x.shape[2], 4)
        if rest:
            return f"the width {x.shape[2]} is not divisible by 4: torch reduces such rows in another order"
        if vectors % THREADS and (vectors > THREADS or vectors & (vectors - 1)):
            return f"the width {x.shape[2]} gives torch's {THREADS} threads unequal shares, whose rounding is not known"
        reason = why_not_rows("scale", scale, x) or why_not_rows("shift", shift, x)
        if reason:
            return reason
        if (x.data_ptr() | pointer(scale) | pointer(shift)) % 8 or any(s % 4 for v in (x, scale, shift) for s in row_strides(v, *x.shape[:2])):
            return "x, scale or shift is not aligned to 8 bytes"
        return None

    def proof_key(self, x, scale, shift, eps, plus_one):
        kinds = [f"{name} per {'row' if r else 'batch' if b else 'model'}" for name, v in (("scale", scale), ("shift", shift)) for b, r in [row_strides(v, *x.shape[:2])]]
        return x.shape[2], eps, "1 + scale" if plus_one else "scale", *kinds

    def proof_cases(self, like, x, scale, shift, eps, plus_one):
        rows = max(64, PROOF_ELEMENTS // x.shape[2])
        yield random_like(like, 1, rows, x.shape[2]), random_like(like, 1, 1, x.shape[2]), random_like(like, 1, 1, x.shape[2]), eps, plus_one
        yield special_like(like, 1, 64, x.shape[2]), random_like(like, 1, 1, x.shape[2]), random_like(like, 1, 1, x.shape[2]), eps, plus_one

    def prepare(self, variant, x, scale, shift, eps, plus_one):
        batch, rows, width = x.shape
        vectors = width // 4
        kept = 1 if vectors <= THREADS else 6 if vectors == 6 * THREADS else 0
        strides = Strides(*row_strides(x, batch, rows), *row_strides(scale, batch, rows), *row_strides(shift, batch, rows))
        launch = Launch(
            build.module(x.device.index, x.dtype), f"layer_norm_modulate_{kept}", (batch * rows, 1, 1), THREADS, 4,
            (strides, ctypes.c_int64(rows), ctypes.c_int(vectors), ctypes.c_float(eps), ctypes.c_int(plus_one)),
        )

        def run(x, scale, shift, eps, plus_one):
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
            launch(out.data_ptr(), x.data_ptr(), pointer(scale), pointer(shift))
            return out

        return run


layer_norm_modulate = LayerNormModulate()
