"""The pack's device code: assembled, compiled once per device and dtype, kept in memory."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from pathlib import Path

import torch

from . import nvrtc

log = logging.getLogger("flux_fast_path")

FILES = ("common", "residual_gate", "layer_norm_modulate", "qk_norm_rope", "head_concat", "gelu_concat", "column_copy", "spin")
DEFINES = {torch.bfloat16: "FFP_BF16=1", torch.float16: "FFP_FP16=1"}
MIN_ARCH = {torch.bfloat16: 80, torch.float16: nvrtc.MIN_ARCH}  # bf16 arithmetic instructions begin with sm_80

SPIN_CYCLES = 600_000  # 0.3 to 0.6 ms on today's clocks: longer than any host needs to queue one eager chain

_modules: dict[tuple[int, torch.dtype], nvrtc.Module | str] = {}  # or why there are none; the error itself would keep its frames alive
_lock = threading.Lock()
build_seconds: dict[tuple[int, torch.dtype], float] = {}


def source() -> str:
    """All device code in one. Raises KernelError that names the file which cannot be read."""
    parts = []
    for name in FILES:
        path = Path(__file__).parent / "cu" / f"{name}.cu"
        try:
            parts.append(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeError) as error:  # unpacked by half, or taken away by a virus scanner
            why = getattr(error, "strerror", None) or error
            raise nvrtc.KernelError(f"{path} cannot be read ({why}); FLUX Fast Path has to be installed again") from error
    return "\n".join(parts)


def compile_for(arch: int, dtype: torch.dtype) -> bytes:
    """Code for architecture `arch` (10 * major + minor). No GPU is needed. Raises KernelError."""
    if arch < MIN_ARCH[dtype]:
        raise nvrtc.KernelError(f"{str(dtype)[6:]} needs sm_{MIN_ARCH[dtype]} or newer, this GPU is sm_{arch}")
    return nvrtc.compile_source(source(), nvrtc.target_for(arch), (DEFINES[dtype],))


def module(device_index: int, dtype: torch.dtype) -> nvrtc.Module:
    """The kernels for this device and dtype, built on first use. Raises KernelError, the same one each time, without building again.

    Whatever a build fails with becomes that error: nothing else may be blamed for it, and nothing builds in vain at every call.
    """
    key = (device_index, dtype)
    with _lock:
        if key not in _modules:
            started, gpu = time.perf_counter(), f"GPU {device_index}"
            try:
                gpu = torch.cuda.get_device_name(device_index)
                major, minor = torch.cuda.get_device_capability(device_index)
                _modules[key] = nvrtc.Module(compile_for(10 * major + minor, dtype), device_index)
            except Exception as error:
                _modules[key] = str(error) if isinstance(error, nvrtc.KernelError) else f"building the kernels failed ({type(error).__name__}: {error})"
                log.warning("FLUX Fast Path: kernels for %s are unavailable: %s. Images are unaffected.", gpu, _modules[key])
            build_seconds[key] = time.perf_counter() - started
        found = _modules[key]
    if isinstance(found, str):
        raise nvrtc.KernelError(found)
    return found


def spin(device_index: int, dtype: torch.dtype):
    """A callable that keeps the device's current stream busy for some hundred µs. Raises KernelError."""
    return nvrtc.Launch(module(device_index, dtype), "spin", (1, 1, 1), 1, 0, (ctypes.c_int64(SPIN_CYCLES),))


def is_settled(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether asking `unavailable` takes no time: nothing is left to build."""
    return device.type != "cuda" or bool(torch.version.hip) or dtype not in DEFINES or (device.index or 0, dtype) in _modules


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why no kernel can run for `dtype` on `device`, or None. Builds the kernels if that has not happened yet."""
    if device.type != "cuda":
        return f"the model runs on {device.type}, not on an NVIDIA GPU"
    if torch.version.hip:
        return "this is a ROCm build of torch"
    if dtype not in DEFINES:
        return f"the model computes in {str(dtype)[6:]}, not in bfloat16 or float16"
    try:
        module(device.index if device.index is not None else torch.cuda.current_device(), dtype)
    except nvrtc.KernelError as error:
        return str(error).splitlines()[0]
    return None
