"""RMSNorm of q and k heads, joined over text and image, rotated (RoPE): one launch, bit-exact.

Replaces, for a double block, `rope(cat((rms_norm(q_text), rms_norm(q_image)), 2), cat(... k ...), pe)` and the same without `cat` for a
single block. Roundings to the storage dtype: after the norm, after the rotation. RMSNorm follows PyTorch's CUDA kernel (sum of squares in
lanes of 4 elements, shuffle down, `rsqrt(sum / D + eps)`, `weight · (rstd · x)`); `eps` None means float32 epsilon, as in `F.rms_norm`.
`rope` is core's own function (`rope(q, pe) -> q` or `rope(q, k, pe) -> (q, k)`): hosts differ in which product of
`f0·x0 + f1·x1` is fused into the sum, so the kernel has a variant for each and the proof chooses.

    streams  one or two `Stream`s (text first), [B, L_i, heads · head_dim] each, bfloat16 or float16, head_dim 64 or 128
    pe       [1|B, 1, L, head_dim / 2, 2, 2] float32, L = sum of L_i
    result   (q, k) or (q,): [B, heads, L, head_dim]; memory order (B, L, heads, D) when `token_major`, else contiguous
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F

from . import build
from .nvrtc import Launch
from .proof import PROOF_ELEMENTS, FusedOp, random_like
from .slices import why_not_plain

FLOAT32_EPSILON = 1.1920928955078125e-07
ROPE_VARIANTS = (0, 1)  # comfy-kitchen's CUDA kernel, eager torch: see cu/qk_norm_rope.cu


class Stream:
    """q and k heads of one stream inside the output of its projection; `k_start` and `k_weight` None when only q is wanted."""

    __slots__ = ("base", "q_start", "k_start", "heads", "head_dim", "q_weight", "k_weight")

    def __init__(self, base, q_start, k_start, heads, head_dim, q_weight, k_weight):
        self.base, self.q_start, self.k_start, self.heads, self.head_dim = base, q_start, k_start, heads, head_dim
        self.q_weight, self.k_weight = q_weight, k_weight

    def layout(self):
        b, q, k = self.base, self.q_weight, self.k_weight
        weights = (q.shape, q.stride(), q.dtype, q.get_device(), q.data_ptr() & 7)
        if k is not None:
            weights += (k.shape, k.stride(), k.dtype, k.get_device(), k.data_ptr() & 7)
        return b.shape, b.stride(), b.dtype, b.get_device(), b.data_ptr() & 15, self.q_start, self.k_start, self.heads, self.head_dim, weights

    def head_view(self, start) -> torch.Tensor:
        """[B, heads, L, head_dim], the view that core makes of its projection."""
        b, width = self.base, self.heads * self.head_dim
        return b.narrow(-1, start, width).view(b.shape[0], b.shape[1], self.heads, self.head_dim).transpose(1, 2)


def qk_norm_rope_reference(streams, pe, eps, rope, token_major):
    def joined(start, weight):
        parts = [F.rms_norm(s.head_view(getattr(s, start)), (s.head_dim,), getattr(s, weight), eps) for s in streams]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    q = joined("q_start", "q_weight")
    if streams[0].k_start is None:
        return (rope(q, pe),)
    return tuple(rope(q, joined("k_start", "k_weight"), pe))


class Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "row", "head")]


class QkNormRope(FusedOp):
    name, label = "qk_norm_rope", "q/k norms + RoPE"
    variants = ROPE_VARIANTS

    reference = staticmethod(qk_norm_rope_reference)

    def like(self, streams, *_):
        return streams[0].base

    def key(self, streams, pe, eps, rope, token_major):
        return tuple([s.layout() for s in streams]), pe.shape, pe.stride(), pe.dtype, pe.get_device(), pe.data_ptr() & 15, eps, rope, token_major

    def why_not(self, streams, pe, eps, rope, token_major) -> str | None:
        first = streams[0]
        for s in streams:
            reason = why_not_plain("qkv", s.base, 3)
            for weight in (s.q_weight,) if s.k_weight is None else (s.q_weight, s.k_weight):
                reason = reason or why_not_plain("the norm's weight", weight, 1)
                if not reason and (weight.dtype != first.base.dtype or weight.device != first.base.device or weight.shape[0] != s.head_dim):
                    reason = f"the norm's weight is {weight.dtype} [{weight.shape[0]}] on {weight.device}"
                if not reason and weight.data_ptr() % 8:
                    reason = "the norm's weight is not aligned to 8 bytes"
            if reason:
                return reason
            if s.base.dtype != first.base.dtype or s.base.device != first.base.device:
                return "text and image differ in dtype or device"
            if (s.heads, s.head_dim, s.base.shape[0]) != (first.heads, first.head_dim, first.base.shape[0]):
                return "text and image differ in heads or batch"
            starts = (s.q_start,) if s.k_start is None else (s.q_start, s.k_start)
            if s.base.data_ptr() % 8 or any(v % 4 for v in (*s.base.stride()[:2], *starts)):
                return "q or k is not aligned to 8 bytes"
        if first.head_dim not in (64, 128):
            return f"heads are {first.head_dim} wide"
        tokens = sum(s.base.shape[1] for s in streams)
        if type(pe) is not torch.Tensor or pe.dtype != torch.float32 or pe.device != first.base.device:
            return f"the rotation is {getattr(pe, 'dtype', type(pe).__name__)} on {getattr(pe, 'device', '?')}"
        batch = first.base.shape[0]
        if pe.ndim != 6 or pe.shape[0] not in (1, batch) or tuple(pe.shape[1:]) != (1, tokens, first.head_dim // 2, 2, 2):
            return f"the rotation is {tuple(pe.shape)} for {tokens} tokens"
        if pe.stride()[2:] != (2 * first.head_dim, 4, 2, 1) or pe.data_ptr() % 16 or pe.stride(0) % 4:
            return f"the rotation is not contiguous (strides {pe.stride()})"
        if batch > 65535:
            return f"the batch is {batch}"
        return None

    def proof_key(self, streams, pe, eps, rope, token_major):
        first = streams[0]
        return (
            f"{len(streams)} stream(s)", "q only" if first.k_start is None else "q and k", f"head {first.head_dim}", eps, str(rope),
            "token-major" if token_major else "head-major", "pe per sample" if pe.shape[0] > 1 else "one pe",
        )

    def proof_cases(self, like, streams, pe, eps, rope, token_major):
        # The same heads and weights over many random rows: a few live tokens would not show a rare difference.
        first, batch = streams[0], 1
        tokens = max(64, PROOF_ELEMENTS // (3 * first.heads * first.head_dim))
        made = []
        for s in streams:
            base = random_like(like, batch, tokens, 3 * s.heads * s.head_dim)
            made.append(Stream(base, 0, None if s.k_start is None else s.heads * s.head_dim, s.heads, s.head_dim, s.q_weight, s.k_weight))
        angle = random_like(pe, 1, 1, tokens * len(streams), first.head_dim // 2)
        turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=-1).unflatten(-1, (2, 2)).contiguous()
        yield tuple(made), turn, eps, rope, token_major

    def prepare(self, variant, streams, pe, eps, rope, token_major):
        text, image = (streams[0], streams[-1])
        batch, heads, dim = text.base.shape[0], text.heads, text.head_dim
        text_tokens = text.base.shape[1] if len(streams) == 2 else 0
        tokens = sum(s.base.shape[1] for s in streams)
        pair = text.k_start is not None
        out = Strides(tokens * heads * dim, heads * dim, dim) if token_major else Strides(tokens * heads * dim, dim, tokens * dim)
        launch = Launch(
            build.module(text.base.device.index, text.base.dtype), f"qk_norm_rope_{variant}_{dim}", (tokens, batch, 1), 256, 11,
            (
                *(ctypes.c_int64(v) for s in (text, image) for v in s.base.stride()[:2]), out,
                ctypes.c_int64(pe.stride(0) if pe.shape[0] > 1 else 0), ctypes.c_int(text_tokens), ctypes.c_int(heads),
                ctypes.c_float(FLOAT32_EPSILON if eps is None else eps),
            ),
        )
        shape = (batch, tokens, heads, dim) if token_major else (batch, heads, tokens, dim)
        size = 2  # bytes of a half-width element

        def pointers(s):
            base = s.base.data_ptr()
            if pair:
                return base + s.q_start * size, base + s.k_start * size, s.q_weight.data_ptr(), s.k_weight.data_ptr()
            return base + s.q_start * size, 0, s.q_weight.data_ptr(), 0

        def run(streams, pe, eps, rope, token_major):
            like = streams[0].base
            q = like.new_empty(shape)
            k = like.new_empty(shape) if pair else None
            launch(q.data_ptr(), k.data_ptr() if pair else 0, pe.data_ptr(), *pointers(streams[0]), *pointers(streams[-1]))
            results = (q, k) if pair else (q,)
            return tuple(r.transpose(1, 2) for r in results) if token_major else results

        return run


qk_norm_rope = QkNormRope()
