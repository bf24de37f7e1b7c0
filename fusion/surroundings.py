"""What lies outside the model and changes what eager torch would compute. Asked at each block, so it is kept cheap."""

from __future__ import annotations

from operator import itemgetter

import torch
import torch.nn.functional as F
import torch.nn.modules.module as _modules
import torch.overrides as _overrides
import torch.utils._python_dispatch as _dispatch

# Torch functions that the fused operations stand in for, as they were when the pack was imported; their references call whatever is there.
_WATCHED = tuple(
    (owner, tuple(name for name in names if name in owner.__dict__))
    for owner, names in ((torch, ("addcmul", "cat", "split", "layer_norm", "rms_norm", "add", "mul")), (F, ("layer_norm", "rms_norm", "gelu", "silu", "linear")))
)
_NAMES = tuple(name for _, names in _WATCHED for name in names)
(_torch, _torch_names), (_functional, _functional_names) = ((owner.__dict__, itemgetter(*names)) for owner, names in _WATCHED)


def _functions() -> tuple:
    return _torch_names(_torch) + _functional_names(_functional)


_ORIGINALS = _functions()
# How many modes there are, without a list of them; a torch that does not say is asked for the list.
_function_modes = getattr(torch._C, "_len_torch_function_stack", lambda: len(_overrides._get_current_function_mode_stack()))
_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: len(_dispatch._get_current_dispatch_mode_stack()))


def _foreign_mode() -> str | None:
    """A Python mode that sees every torch call of this thread; torch's own default-device mode only chooses where new tensors go."""
    if not _function_modes() and not _dispatch_modes():
        return None
    modes = (*_overrides._get_current_function_mode_stack(), *_dispatch._get_current_dispatch_mode_stack())
    return next((type(mode).__name__ for mode in modes if type(mode).__name__ != "DeviceContext"), None)


def _autocast(device: torch.device) -> bool:
    try:
        return torch.is_autocast_enabled(device.type)
    except TypeError:  # torch before 2.4 asks for CUDA alone
        return torch.is_autocast_enabled()


def why_not(device: torch.device) -> str | None:
    """Why nothing may stand in for eager operations on `device` now, or None."""
    if _modules._global_forward_hooks or _modules._global_forward_pre_hooks:
        return "another pack watches every module through torch's global hooks"
    if torch.is_grad_enabled():
        return "gradients are being recorded (training)"
    if _autocast(device):
        return "torch.autocast is on, which changes what each operation computes in"
    mode = _foreign_mode()
    if mode:
        return f"a {mode} of another pack watches torch's operations"
    functions = _functions()
    if functions != _ORIGINALS:
        return f"another pack has replaced torch's {next(name for name, now, then in zip(_NAMES, functions, _ORIGINALS) if now is not then)}"
    return None
