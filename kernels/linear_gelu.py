"""gelu_tanh(x · Wᵀ + b) with the activation in the GEMM's epilogue: approximate, so only for tier "high".

Replaces `F.gelu(F.linear(x, W, b), approximate="tanh")`. Eager rounds the Linear's output to the storage dtype before the activation; the
epilogue applies it to the float32 sum. With u the dtype's unit roundoff (2^-8 bfloat16, 2^-11 float16), h the Linear's output, g the
result and |gelu'| <= 1.13, the two differ by at most

    ‖difference‖ <= u · (1.13 · ‖h‖ + 2 · ‖g‖)          (one rounding of h, one of each result)

which is checked on the first live call of every signature; beyond it the site stays as core runs it.

    x    [B, L, K]   contiguous bfloat16 or float16       W [N, K], b [N]
    out  None, or [B, L, N] columns of a wider contiguous buffer, 16-byte aligned, that is written and returned
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import cublaslt
from .proof import FusedOp
from .slices import why_not_plain

UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
GELU_SLOPE = 1.13  # the largest |derivative| of GELU, near x = 1.4
SLACK = 1.05  # for the order of float32 sums


def linear_gelu_reference(x, w, b, out):
    result = F.gelu(F.linear(x, w, b), approximate="tanh")
    return result if out is None else out.copy_(result)


class LinearGelu(FusedOp):
    name, label = "linear_gelu", "GELUs in the GEMM"
    needs_kernels = False  # cublasLt's, not ours
    exact = False
    failure = "its deviation from core's result is beyond the rounding bound"

    reference = staticmethod(linear_gelu_reference)

    def __init__(self):
        super().__init__()
        self.errors: dict = {}  # device -> the largest relative error seen at a first sight

    def agrees(self, args, got, want) -> bool:
        x, w, b, _ = args
        error = float((got.float() - want.float()).norm() / want.float().norm())
        h, g = float(F.linear(x, w, b).float().norm()), float(want.float().norm())
        if not error <= SLACK * UNIT_ROUNDOFF[x.dtype] * (GELU_SLOPE * h / g + 2):  # `not <=`: NaN is refused
            return False
        self.errors[x.device] = max(error, self.errors.get(x.device, 0.0))
        return True

    def key(self, x, w, b, out):
        place = None if out is None else (out.shape, out.stride(), out.dtype, out.get_device(), out.data_ptr() & 15)
        addresses = (x.data_ptr() | w.data_ptr() | b.data_ptr()) & 15
        return x.shape, x.stride(), x.dtype, x.get_device(), w.shape, w.stride(), w.dtype, w.get_device(), b.dtype, b.get_device(), addresses, place

    def why_not(self, x, w, b, out) -> str | None:
        reason = why_not_plain("x", x, 3) or why_not_plain("the weight", w, 2) or why_not_plain("the bias", b, 1)
        if reason:
            return reason
        if x.dtype not in cublaslt.CUDA_TYPE or w.dtype != x.dtype or b.dtype != x.dtype:
            return f"x is {x.dtype}, the weight {w.dtype}, the bias {b.dtype}"
        if x.device.type != "cuda" or torch.version.hip or w.device != x.device or b.device != x.device:
            return f"x is on {x.device}, the weight on {w.device}, the bias on {b.device}"
        if not x.is_contiguous() or not w.is_contiguous() or not b.is_contiguous() or w.shape != (b.shape[0], x.shape[2]):
            return "x, the weight or the bias is not contiguous, or their sizes do not match"
        if (x.data_ptr() | w.data_ptr() | b.data_ptr()) % 16 or x.shape[2] % 8 or w.shape[0] % 8:
            return "x, the weight or the bias is not made of aligned 16-byte vectors"
        if out is not None and (out.device, out.dtype, out.shape) != (x.device, x.dtype, (*x.shape[:2], w.shape[0])):
            return f"the place for the result is {tuple(out.shape)} {out.dtype} on {out.device}"
        if out is not None and (out.data_ptr() % 16 or out.stride(2) != 1 or out.stride(1) % 8 or out.stride(0) != out.shape[1] * out.stride(1)):
            return f"the place for the result is not evenly spaced (strides {out.stride()})"
        return None

    def proof_key(self, x, w, b, out):
        return (*w.shape, "into a wider buffer" if out is not None else "new")

    def shadow(self, x, w, b, out):
        return x, w, b, None if out is None else torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device)

    def prepare(self, variant, x, w, b, out):
        (batch, rows, k), n = x.shape, w.shape[0]
        product = cublaslt.Linear(x.device.index, x.dtype, batch * rows, n, k, k, k, n if out is None else out.stride(1), cublaslt.GELU_BIAS)

        def run(x, w, b, out):
            result = x.new_empty((batch, rows, n)) if out is None else out
            product(x, w, b, result)
            return result

        return run


linear_gelu = LinearGelu()
