"""What lies outside the model and changes what eager torch would compute. Asked at each block, so it is kept cheap."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import torch.nn.modules.module as _modules
import torch.overrides as _overrides
import torch.utils._python_dispatch as _dispatch

from .watch import Watch

# Torch functions that the fused operations stand in for, and what stands between them and a module, as they were when the pack was imported; their
# references call whatever is there.
_TORCH = Watch((
    (torch, ("addcmul", "cat", "split", "layer_norm", "rms_norm", "add", "mul")),
    (F, ("layer_norm", "rms_norm", "gelu", "silu", "linear")),
    (torch.nn.Module, ("__call__", "_call_impl")),
    # Methods that pending values answer for.
    (torch.Tensor, ("chunk", "split", "view", "permute", "__iter__", "__add__", "__radd__", "__iadd__", "__mul__", "__rmul__", "addcmul", "add_")),
    *((getattr(torch.nn, name, None), ("forward",)) for name in ("LayerNorm", "RMSNorm", "GELU", "Linear", "Sequential")),
))
# How many modes there are, without a list of them; a torch that does not say is asked for the list.
_function_modes = getattr(torch._C, "_len_torch_function_stack", lambda: len(_overrides._get_current_function_mode_stack()))
_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: len(_dispatch._get_current_dispatch_mode_stack()))


def _foreign_mode() -> str | None:
    """A Python mode that sees every torch call of this thread; torch's own default-device mode only chooses where new tensors go."""
    if not _function_modes() and not _dispatch_modes():
        return None
    modes = (*_overrides._get_current_function_mode_stack(), *_dispatch._get_current_dispatch_mode_stack())
    return next((type(mode).__name__ for mode in modes if type(mode).__name__ != "DeviceContext"), None)


def _autocast_by_kind():
    try:
        torch.is_autocast_enabled("cpu")
        return torch.is_autocast_enabled
    except TypeError:  # torch before 2.4 asks for CUDA alone
        return lambda kind: torch.is_autocast_enabled()


_autocast = _autocast_by_kind()


def why_not(kind: str) -> str | None:
    """Why nothing may stand in for eager operations on devices of this kind ("cuda") now, or None."""
    if _modules._global_forward_hooks or _modules._global_forward_pre_hooks:
        return "another pack watches every module through torch's global hooks"
    if torch.is_grad_enabled():
        return "gradients are being recorded (training)"
    if _autocast(kind):
        return "torch.autocast is on, which changes what each operation computes in"
    mode = _foreign_mode()
    if mode:
        return f"a {mode} of another pack watches torch's operations"
    if not _TORCH.unchanged():
        return f"another pack has replaced torch's {_TORCH.first_changed()}"
    return None
