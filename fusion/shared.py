"""What the leaves of one model share while a call of it runs, and what a call, or one block of it, allows them."""

from __future__ import annotations

import threading
from threading import get_ident

import torch
import torch.nn.functional as F

from . import surroundings
from .rope import AttentionLayouts

CUDA = torch.device("cuda")
Q_AND_K = frozenset(("qk", "projection", "single_projection"))  # kinds of leaves whose result goes on to attention, through core's rotation


def by_others(options: dict, mask) -> tuple[bool, bool, bool]:
    """(whether patches act on the blocks, whether attention is not the plain one, whether a patch reads q and k) under these options."""
    patches = options.get("patches") or {}
    patched = bool(patches or (options.get("patches_replace") or {}).get("dit"))
    own_attention = patched or mask is not None or "optimized_attention_override" in options
    return patched, own_attention, "attn1_patch" in patches or "post_input" in patches


def _ignore(text: str) -> None:
    pass


class Call:
    """One call of the model, in one thread."""

    __slots__ = ("kinds", "token_major", "share_silu", "note", "on", "thread", "mounted", "blocks", "entered", "refused")

    def __init__(self, kinds=frozenset(), token_major=False, share_silu=False, note=_ignore, device=CUDA):
        # token_major: whether attention may be asked for the other memory order
        # share_silu: whether every Modulation of this call sees the same, unwritten vec
        self.kinds, self.token_major, self.share_silu, self.note, self.on, self.thread = kinds, token_major, share_silu, note, device.type, get_ident()
        self.mounted = 0  # blocks that have our forward
        self.blocks, self.entered = set(), 0  # those that ran with leaves of ours, and how many the model has of them
        self.refused = None  # why a block ran as core runs it

    def refuse(self, reason: str) -> None:
        self.refused = reason
        self.note(f"a block ran as core runs it: {reason}")


IDLE = Call()


class Shared:
    """Apart from `Plan`, so that leaves and plan make no reference cycle. One thread at a time has calls; they may nest."""

    def __init__(self, attention):
        self.layouts = AttentionLayouts(attention)
        self._calls, self._lock = [], threading.Lock()
        self.outdated = False  # a block was not what the plan was made for
        self._apply()

    def begin(self, call: Call) -> bool:
        """Make `call` the one that leaves ask, until `end(call)`; False where another thread is in a call of this model."""
        with self._lock:
            if self._calls and self._calls[-1].thread != call.thread:
                return False
            self._calls.append(call)
            self._apply()
            return True

    def end(self, call: Call) -> None:
        with self._lock:
            self._calls = [c for c in self._calls if c is not call]
            self._apply()

    @property
    def busy(self) -> bool:
        return bool(self._calls)

    def _apply(self) -> None:
        self.call = self._calls[-1] if self._calls else IDLE
        self.token_major = self.call.token_major
        self.mounted = frozenset()  # leaves of the block that runs now
        self._silu = (None, None)

    def enter_block(self, options: dict, mask) -> frozenset | None:
        """Kinds that may be mounted in the block that now begins; None where core's block has to run as it is.

        The call was looked at when it began, but wrappers and patches of other packs inside it can change what a block is given.
        """
        call = self.call
        if call.thread != get_ident() or torch.compiler.is_compiling():
            return None
        reason = surroundings.why_not(call.on)
        if reason:
            call.refuse(reason)
            return None
        patched, own_attention, read = by_others(options, mask)
        if patched:  # for the rest of the call too: vec may be another from here on
            call.share_silu, self._silu = False, (None, None)
        self.token_major = call.token_major and not own_attention
        return call.kinds - Q_AND_K if read else call.kinds

    def silu(self, vec: torch.Tensor) -> torch.Tensor:
        """`silu(vec)` with the token axis core gives it; computed once a call where that is safe."""
        if not self.call.share_silu:
            return _silu(vec)
        seen, value = self._silu
        if seen is not vec:
            value = _silu(vec)
            self._silu = vec, value
        return value


def _silu(vec: torch.Tensor) -> torch.Tensor:
    return F.silu(vec[:, None, :] if vec.ndim == 2 else vec)
