"""What lies outside the model and changes what eager torch would compute. Asked at each block, so it is kept cheap."""

from __future__ import annotations

from operator import attrgetter, itemgetter

import torch
import torch.nn.functional as F
import torch.nn.modules.module as _modules
import torch.overrides as _overrides
import torch.utils._python_dispatch as _dispatch

# Torch functions that the fused operations stand in for, and what stands between them and a module, as they were when the pack was imported; their
# references call whatever is there.
_OF_TORCH = tuple(name for name in ("addcmul", "cat", "split", "layer_norm", "rms_norm", "add", "mul") if name in torch.__dict__)
_OF_FUNCTIONAL = tuple(name for name in ("layer_norm", "rms_norm", "gelu", "silu", "linear") if name in F.__dict__)
_OF_MODULE = ("__call__", "_call_impl")
_OF_TENSOR = ("chunk", "split", "view", "permute", "__iter__", "__add__", "__radd__", "__iadd__", "__mul__", "__rmul__", "addcmul", "add_")  # that pending values answer for
_CLASSES = tuple(getattr(torch.nn, name) for name in ("LayerNorm", "RMSNorm", "GELU", "Linear", "Sequential") if hasattr(torch.nn, name))
_NAMES = (
    *(f"torch.{name}" for name in _OF_TORCH), *(f"functional.{name}" for name in _OF_FUNCTIONAL), *(f"Module.{name}" for name in _OF_MODULE),
    *(f"Tensor.{name}" for name in _OF_TENSOR), *(f"{cls.__name__}.forward" for cls in _CLASSES),
)


def _functions(torch=torch.__dict__, functional=F.__dict__, module=torch.nn.Module, tensor=torch.Tensor, of_torch=itemgetter(*_OF_TORCH),
               of_functional=itemgetter(*_OF_FUNCTIONAL), of_module=attrgetter(*_OF_MODULE), of_tensor=attrgetter(*_OF_TENSOR)) -> tuple:
    return (*of_torch(torch), *of_functional(functional), *of_module(module), *of_tensor(tensor), *[cls.forward for cls in _CLASSES])


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
    functions = _functions()
    if functions != _ORIGINALS:
        return f"another pack has replaced torch's {next(name for name, now, then in zip(_NAMES, functions, _ORIGINALS) if now is not then)}"
    return None
