"""cat of the text and image heads of v over tokens, at copy speed; moves bits, so bit-exact by nature (and proven all the same).

Replaces `torch.cat((v_text, v_image), dim=2)` of two `[B, heads, L_i, D]` views into projections, which torch copies element by element.

    text, image  `ColumnSlice`s [B, L_i, heads · D] of the projections, bfloat16 or float16, 16-byte aligned, D divisible by 8
    result       a new contiguous [B, heads, L_text + L_image, D]
"""

from __future__ import annotations

import ctypes

import torch

from . import build
from .nvrtc import Launch
from .proof import FusedOp
from .slices import ColumnSlice, as_tensor, ceil_div, layout, pointer, why_not_plain

TOKENS = 8  # tokens a block copies, as in cu/head_concat.cu


def head_view(value, heads: int) -> torch.Tensor:
    """[B, heads, L, D]: the view that core makes of a projection's columns."""
    tensor = as_tensor(value)
    return tensor.view(*tensor.shape[:2], heads, tensor.shape[2] // heads).transpose(1, 2)


def head_concat_reference(text, image, heads):
    return torch.cat((head_view(text, heads), head_view(image, heads)), dim=2)


class HeadConcat(FusedOp):
    name, label = "head_concat", "concats of v"

    reference = staticmethod(head_concat_reference)

    def like(self, text, *_):
        return as_tensor(text)

    def key(self, text, image, heads):
        return layout(text), layout(image), heads

    def why_not(self, text, image, heads) -> str | None:
        texts, images = as_tensor(text), as_tensor(image)
        reason = why_not_plain("text", texts, 3) or why_not_plain("image", images, 3)
        if reason:
            return reason
        if texts.dtype != images.dtype or texts.device != images.device:
            return "text and image differ in dtype or device"
        if texts.shape[0] != images.shape[0] or texts.shape[2] != images.shape[2] or texts.shape[2] % (8 * heads):
            return f"text is {tuple(texts.shape)}, image is {tuple(images.shape)}, {heads} heads"
        if (pointer(text) | pointer(image)) % 16 or any(s % 8 for t in (texts, images) for s in t.stride()[:2]):
            return "text or image is not aligned to 16 bytes"
        if texts.shape[0] > 65535:
            return f"the batch is {texts.shape[0]}"
        return None

    def proof_key(self, text, image, heads):
        return heads, as_tensor(text).shape[2] // heads

    def prepare(self, variant, text, image, heads):
        texts, images = as_tensor(text), as_tensor(image)
        batch, text_tokens, width = texts.shape
        tokens, dim = text_tokens + images.shape[1], width // heads
        launch = Launch(
            build.module(texts.device.index, texts.dtype), "head_concat", (ceil_div(tokens, TOKENS), batch, 1), 256, 3,
            (*(ctypes.c_int64(s) for t in (texts, images) for s in t.stride()[:2]), *(ctypes.c_int(v) for v in (text_tokens, tokens, heads, dim))),
        )

        def run(text, image, heads):
            out = (text.base if type(text) is ColumnSlice else text).new_empty((batch, heads, tokens, dim))
            launch(out.data_ptr(), pointer(text), pointer(image))
            return out

        return run


head_concat = HeadConcat()
