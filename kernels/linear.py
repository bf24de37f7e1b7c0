"""x · Wᵀ + b with cublasLt's first algorithm instead of torch's choice of one: bit-exact where proven, used where faster.

Replaces `F.linear(x, W, b)`. torch's choice is not always the fastest algorithm, and for FLUX's products most algorithms give the same bits
(they differ in tiling, not in the order of each sum); where one does not, as those that split K, the proof refuses it. The bits being the
same, the two may race at first sight: which of them wins cannot show in the image.

    x [B, L, K] contiguous bfloat16 or float16, W [N, K], b [N], all contiguous; out as in `linear_gelu` or None
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import cublaslt
from .proof import FusedOp
from .slices import why_not_plain


class LtLinear(FusedOp):
    """What both products share: operands, their checks, and the launch. A subclass names the epilogue."""

    epilogue = cublaslt.BIAS
    needs_kernels = False  # cublasLt's, not ours

    def key(self, x, w, b, out):
        place = None if out is None else (out.shape, out.stride(), out.data_ptr() & 15)
        addresses = (x.data_ptr() | w.data_ptr() | b.data_ptr()) & 15
        return x.shape, x.stride(), x.dtype, x.get_device(), w.shape, w.stride(), w.dtype, w.get_device(), b.dtype, b.get_device(), addresses, place

    def why_not(self, x, w, b, out) -> str | None:
        reason = why_not_plain("x", x, 3) or why_not_plain("the weight", w, 2) or why_not_plain("the bias", b, 1)
        if reason:
            return reason
        if x.dtype not in cublaslt.CUDA_TYPE or w.dtype != x.dtype or b.dtype != x.dtype:
            return f"x is {x.dtype}, the weight {w.dtype}, the bias {b.dtype}"
        if x.device.type != "cuda" or torch.version.hip or w.device != x.device or b.device != x.device:
            return f"x is on {x.device}, the weight on {w.device}"
        if not x.is_contiguous() or not w.is_contiguous() or not b.is_contiguous() or w.shape != (b.shape[0], x.shape[2]):
            return "x, the weight or the bias is not contiguous, or their sizes do not match"
        if (x.data_ptr() | w.data_ptr() | b.data_ptr()) % 16 or x.shape[2] % 8 or w.shape[0] % 8:
            return "x, the weight or the bias is not made of aligned 16-byte vectors"
        if out is not None and (out.data_ptr() % 16 or out.stride(2) != 1 or out.stride(1) % 8 or out.stride(0) != out.shape[1] * out.stride(1)):
            return f"the place for the result is not evenly spaced (strides {out.stride()})"
        return None

    def proof_key(self, x, w, b, out):
        return (*w.shape, "into a wider buffer" if out is not None else "new")

    def shadow(self, x, w, b, out):
        return x, w, b, None if out is None else torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device)

    def prepare(self, variant, x, w, b, out):
        (batch, rows, k), n = x.shape, w.shape[0]
        product = cublaslt.Linear(x.device.index, x.dtype, batch * rows, n, k, k, k, n if out is None else out.stride(1), self.epilogue)

        def run(x, w, b, out):
            result = x.new_empty((batch, rows, n)) if out is None else out
            product(x, w, b, result)
            return result

        return run


def linear_reference(x, w, b, out):
    result = F.linear(x, w, b)
    return result if out is None else out.copy_(result)


class Linear(LtLinear):
    name, label = "linear", "faster GEMMs"
    must_win = True

    reference = staticmethod(linear_reference)

    def proof_key(self, x, w, b, out):
        # The heuristic chooses by the number of rows too, so another algorithm may run for another resolution.
        return x.shape[0] * x.shape[1], *super().proof_key(x, w, b, out)


linear = Linear()
