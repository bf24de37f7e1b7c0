"""cat((attention, gelu_tanh(mlp)), 2) in one pass: the input of a single block's second Linear, bit-exact.

Replaces `torch.cat((attention, F.gelu(mlp, approximate="tanh")), 2)`, where `mlp` is a column slice of the first Linear's output: eager reads
the strided slice off its vectorised path and copies both parts again. GELU is PyTorch's
`0.5 · x · (1 + tanh(√(2/π) · (x + 0.044715 · x³)))` in float32, rounded once; all 65 536 inputs of the dtype are proven at first use.

    attention  [B, L, A]   bfloat16 or float16, rows uniform over B · L (batch stride = L · row stride)
    mlp        [B, L, M]   same; a tensor or a `ColumnSlice`. A and M divisible by 8, 16-byte aligned
    result     a new contiguous [B, L, A + M]
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F

from . import build
from .nvrtc import Launch
from .proof import FusedOp
from .slices import as_tensor, ceil_div, layout, pointer, why_not_plain, why_not_vectors

ROWS = 4  # rows a thread takes, as GELU_ROWS in cu/gelu_concat.cu
BLOCK = 128


def gelu_concat_reference(attention, mlp):
    return torch.cat((attention, F.gelu(as_tensor(mlp), approximate="tanh")), 2)


class GeluConcat(FusedOp):
    name, label = "gelu_concat", "GELU + concat"
    variants = (1, 0)  # the shorter tanh where it is proven, else the library's

    reference = staticmethod(gelu_concat_reference)

    def key(self, attention, mlp):
        return layout(attention), layout(mlp)

    def why_not(self, attention, mlp) -> str | None:
        tensor = as_tensor(mlp)
        reason = why_not_plain("attention", attention, 3) or why_not_plain("mlp", tensor, 3)
        if reason:
            return reason
        if tensor.dtype != attention.dtype or tensor.device != attention.device:
            return f"mlp is {tensor.dtype} on {tensor.device}, attention is {attention.dtype} on {attention.device}"
        if tensor.shape[:2] != attention.shape[:2]:
            return f"mlp is {tuple(tensor.shape)}, attention is {tuple(attention.shape)}"
        reason = why_not_vectors("attention", attention, attention.data_ptr()) or why_not_vectors("mlp", tensor, pointer(mlp))
        if reason:
            return reason
        if ceil_div(attention.shape[0] * attention.shape[1], ROWS) > 65535:
            return f"{attention.shape[0] * attention.shape[1]} rows are more than one launch takes"
        return None

    def proof_key(self, attention, mlp):
        return attention.shape[2], as_tensor(mlp).shape[2]

    def proof_cases(self, like, *args):
        every = torch.arange(65536, device=like.device, dtype=torch.int32).to(torch.int16).view(like.dtype).view(1, 64, 1024)
        yield every[:, :, :8], every

    def prepare(self, variant, attention, mlp):
        batch, tokens, attention_width = attention.shape
        tensor = as_tensor(mlp)
        mlp_width, rows, width = tensor.shape[2], batch * tokens, attention_width + tensor.shape[2]
        launch = Launch(
            build.module(attention.device.index, attention.dtype), f"gelu_concat_{variant}", (ceil_div(width, 8 * BLOCK), ceil_div(rows, ROWS), 1), BLOCK, 3,
            (*(ctypes.c_int64(v) for v in (attention.stride(1), tensor.stride(1), rows)), ctypes.c_int(attention_width), ctypes.c_int(mlp_width)),
        )

        def run(attention, mlp):
            out = attention.new_empty((batch, tokens, width))
            launch(out.data_ptr(), attention.data_ptr(), pointer(mlp))
            return out

        return run


gelu_concat = GeluConcat()
