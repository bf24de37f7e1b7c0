"""What lies outside the model and changes what eager torch would compute. Asked at each model call, so it is kept cheap."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import torch.nn.modules.module as _modules
import torch.overrides as _overrides
import torch.utils._python_dispatch as _dispatch

# Torch functions that the fused operations stand in for, as they were when the pack was imported; their references call whatever is there.
_STANDS_IN_FOR = {
    (owner, name): getattr(owner, name, None)
    for owner, names in ((torch, ("addcmul", "cat", "split", "layer_norm", "rms_norm", "add", "mul")), (F, ("layer_norm", "rms_norm", "gelu", "silu", "linear")))
    for name in names
}


def _modes() -> list:
    """Python modes that see every torch call of this thread; torch's own default-device mode only chooses where new tensors go."""
    function = getattr(_overrides, "_get_current_function_mode_stack", list)()
    dispatch = getattr(_dispatch, "_get_current_dispatch_mode_stack", list)()
    return [mode for mode in (*function, *dispatch) if type(mode).__name__ != "DeviceContext"]


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
    modes = _modes()
    if modes:
        return f"a {type(modes[0]).__name__} of another pack watches torch's operations"
    for (owner, name), original in _STANDS_IN_FOR.items():
        if getattr(owner, name, None) is not original:
            return f"another pack has replaced torch's {name}"
    return None
