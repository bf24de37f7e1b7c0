"""gelu_tanh(x · Wᵀ + b) with the activation in the GEMM's epilogue: approximate, so only for tier "high".

Replaces `F.gelu(F.linear(x, W, b), approximate="tanh")`. Eager rounds the Linear's output to the storage dtype before the activation; the
epilogue applies it to the float32 sum. With u the dtype's unit roundoff (2^-8 bfloat16, 2^-11 float16), h the Linear's output, g the
result and |gelu'| <= 1.13, the two differ by at most

    ‖difference‖ <= u · (1.13 · ‖h‖ + 2 · ‖g‖)          (one rounding of h, one of each result)

which is checked on the first live call of every signature; beyond it the site stays as core runs it.

    x, W, b  as in `linear`
    out      None, or [B, L, N] columns of a wider contiguous buffer, 16-byte aligned, that is written and returned
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import cublaslt
from .linear import LtLinear

UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
GELU_SLOPE = 1.13  # the largest |derivative| of GELU, near x = 1.4
SLACK = 1.05  # for the order of float32 sums


def linear_gelu_reference(x, w, b, out):
    result = F.gelu(F.linear(x, w, b), approximate="tanh")
    return result if out is None else out.copy_(result)


class LinearGelu(LtLinear):
    name, label = "linear_gelu", "GELUs in the GEMM"
    epilogue = cublaslt.GELU_BIAS
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


linear_gelu = LinearGelu()
