"""The end of a q/k chain: norm, join and rotation run as one kernel, and the memory order that attention likes is proven through attention."""

from __future__ import annotations

import logging
import sys

import torch
import torch.nn.functional as F

from ..kernels.proof import same_bits
from ..kernels.qk_norm_rope import Stream, qk_norm_rope
from .pending import real
from .values import JoinedHeads, NormedHead
from .weights import kept_weight

log = logging.getLogger("flux_fast_path")

MAX_VERDICTS = 512


def rope_pair(function, q, k, pe):
    """`function(q, k, pe) -> (q, k)`."""
    qs, ks = _parts(q), _parts(k)
    if qs is None or ks is None or len(qs) != len(ks) or any(a.head.base is not b.head.base or a.head.heads != b.head.heads for a, b in zip(qs, ks)):
        return NotImplemented
    return _rotate(function, qs, ks, real(pe))


def rope_single(function, x, pe):
    """`function(x, pe) -> x`: cores that rotate q and k in two calls."""
    parts = _parts(x)
    if parts is None:
        return NotImplemented
    result = _rotate(function, parts, None, real(pe))
    return result if result is NotImplemented else result[0]


def _parts(value):
    if type(value) in (NormedHead, JoinedHeads) and value.fresh and all(p.fresh and p.head.fresh for p in value.parts):
        return value.parts
    return None


def _stream(part, partner) -> Stream:
    head = part.head
    start, weight = (None, None) if partner is None else (partner.head.start, kept_weight(partner.module, head.base))
    return Stream(head.base, head.start, start, head.heads, head.head_dim, kept_weight(part.module, head.base), weight)


def _rotate(function, qs, ks, pe):
    eps = qs[0].eps
    for part in (*qs, *(ks or ())):
        if part.eps != eps or part.module.normalized_shape != (part.head.head_dim,) or part.module._parameters.get("weight") is None:
            return NotImplemented
    shared = qs[0].shared
    streams = tuple([_stream(q, k) for q, k in zip(qs, ks or [None] * len(qs))])
    if not shared.token_major or not all(p.twin[0].fresh for p in qs):
        return qk_norm_rope(streams, pe, eps, function, False)

    def both(token_major):
        if ks is not None:
            return qk_norm_rope(streams, pe, eps, function, token_major)
        twins = tuple([_stream(NormedHead(*p.twin, p.v, shared, None), None) for p in qs])
        return [qk_norm_rope(s, pe, eps, function, token_major)[0] for s in (streams, twins)]

    return qk_norm_rope(streams, pe, eps, function, shared.layouts.proven(both, streams, [q.v for q in qs]))


_sdpa = F.scaled_dot_product_attention  # torch's own, or what stood there when the pack was imported
_verdicts: dict[tuple, bool] = {}  # for all models: shapes, not weights, are what they are about


def _takes_any_order(attention) -> bool:
    """Whether `attention` ends in torch's attention and nothing else: others may reduce over tokens in an order that follows memory."""
    below = attention.__globals__.get("optimized_attention")
    if F.scaled_dot_product_attention is not _sdpa:
        return False
    if below is None:
        return True  # it calls torch's itself; its source is one that `recognise` knows
    home = sys.modules.get("comfy.ldm.modules.attention")
    return below is getattr(home, "attention_pytorch", None) and below.__code__.co_filename == home.__file__


def _backends() -> tuple:
    """Which of torch's attention backends may be chosen now."""
    cuda = torch.backends.cuda
    return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), getattr(cuda, "cudnn_sdp_enabled", bool)()


class AttentionLayouts:
    """Whether attention gives the same bits for q and k in (B, L, heads, D) memory order as in core's (B, heads, L, D).

    torch's attention chooses a backend by stride too, so this is proven through core's own function, once per shape, before it is relied on.
    Token-major order makes the reshape after attention free. Any other attention gets core's order.
    """

    def __init__(self, attention):
        self.attention, self.verdicts = attention, _verdicts  # attention(): what core would call now

    def proven(self, both, streams, values) -> bool:
        """`both(token_major) -> (q, k)`; `streams` say the shapes; `values` are the parts of v, joined as core joins them."""
        first, attention = streams[0], self.attention()
        if not _takes_any_order(attention):
            return False
        key = (tuple(s.base.shape for s in streams), first.base.stride(), first.heads, first.base.dtype, first.base.get_device(), _backends(), attention.__code__)
        verdict = self.verdicts.get(key)
        if verdict is None:
            if first.base.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return False
            try:
                v = real(values[0]) if len(values) == 1 else torch.cat([real(v) for v in values], dim=2)
                verdict = same_bits(*(attention(*both(token_major), v, pe=None) for token_major in (False, True)))
            except torch.cuda.OutOfMemoryError:
                return False  # no room for a second attention now; core's order is always right
            except Exception as error:  # an attention that takes no other order; core's call of it is still to come, and its own affair
                log.debug("attention does not take token-major q and k: %s", error)
                verdict = False
            if len(self.verdicts) >= MAX_VERDICTS:
                self.verdicts.clear()
            self.verdicts[key] = verdict
        return verdict
