"""Compile CUDA source with the NVRTC that torch ships, load it, launch it. One of the two files that use ctypes.

Nothing is written to disk, no host compiler or CUDA toolkit is needed. `torch.cuda._compile_kernel` is not used: it demands CUDA_HOME.
Everything here raises `KernelError`; choosing what to do about it is the dispatcher's work (`proof.FusedOp`).
"""

from __future__ import annotations

import ctypes
import os
import threading
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from threading import get_ident

import torch

from .libraries import candidates

MIN_ARCH = 75  # the oldest architecture the CUDA 13 compiler still knows


class KernelError(RuntimeError):
    """A kernel could not be built, loaded or launched. The message says what is missing or carries NVRTC's log."""


# --- finding and declaring the two libraries -------------------------------------------------------------------------


_NVRTC_SIGNATURES = {
    "nvrtcVersion": [POINTER(c_int), POINTER(c_int)],
    "nvrtcGetNumSupportedArchs": [POINTER(c_int)],
    "nvrtcGetSupportedArchs": [POINTER(c_int)],
    "nvrtcCreateProgram": [POINTER(c_void_p), c_char_p, c_char_p, c_int, c_void_p, c_void_p],
    "nvrtcCompileProgram": [c_void_p, c_int, POINTER(c_char_p)],
    "nvrtcDestroyProgram": [POINTER(c_void_p)],
    "nvrtcGetProgramLogSize": [c_void_p, POINTER(c_size_t)],
    "nvrtcGetProgramLog": [c_void_p, c_void_p],
    "nvrtcGetCUBINSize": [c_void_p, POINTER(c_size_t)],
    "nvrtcGetCUBIN": [c_void_p, c_void_p],
    "nvrtcGetPTXSize": [c_void_p, POINTER(c_size_t)],
    "nvrtcGetPTX": [c_void_p, c_void_p],
}
_DRIVER_SIGNATURES = {
    "cuGetErrorName": [c_int, POINTER(c_char_p)],
    "cuCtxGetCurrent": [POINTER(c_void_p)],
    "cuCtxSetCurrent": [c_void_p],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuModuleLoadData": [POINTER(c_void_p), c_void_p],
    "cuModuleGetFunction": [POINTER(c_void_p), c_void_p, c_char_p],
    "cuLaunchKernelEx": [c_void_p, c_void_p, c_void_p, c_void_p],  # CUDA 11.8; half the argument conversions of cuLaunchKernel
}
_lock = threading.Lock()
_libraries: dict[str, ctypes.CDLL] = {}


def declare(library: ctypes.CDLL, signatures: dict) -> str | None:
    """Gives every function its types; the name of the first that the library lacks, or None."""
    for name, argtypes in signatures.items():
        function = getattr(library, name, None)
        if function is None:
            return name
        function.argtypes, function.restype = argtypes, c_int
    return None


def load_library(kind: str, names: list[str], signatures: dict, what: str) -> ctypes.CDLL:
    """The first of `names` that loads and has every function of `signatures`; remembered under `kind`.

    Raises KernelError that begins with `what` and tells a library that is missing from one that is too old.
    """
    with _lock:
        if kind not in _libraries:
            tried, lacking = [], None
            for name in names:
                try:
                    library = ctypes.CDLL(name)
                except OSError as error:
                    tried.append(f"{name}: {error}")
                    continue
                lacks = declare(library, signatures)
                if lacks is None:
                    _libraries[kind] = library
                    break
                lacking = lacking or lacks
                tried.append(f"{name}: no {lacks}")
            else:
                state = f"is too old: it has no {lacking}" if lacking else "was not found or cannot be loaded"
                raise KernelError(f"{what} {state} ({'; '.join(tried) or 'nothing to try'})")
        return _libraries[kind]


def nvrtc() -> ctypes.CDLL:
    """NVRTC, loaded on first use. Raises KernelError naming every place that was tried."""
    return load_library("nvrtc", candidates("nvrtc", "cuda_nvrtc"), _NVRTC_SIGNATURES, "torch's run-time compiler (NVRTC)")


def driver() -> ctypes.CDLL:
    """The CUDA driver API. Raises KernelError when no NVIDIA driver is installed, or an old one."""
    names = ["nvcuda.dll"] if os.name == "nt" else ["libcuda.so.1", "libcuda.so"]
    return load_library("driver", names, _DRIVER_SIGNATURES, "the NVIDIA driver")


def _check(code: int, what: str) -> None:
    if code:
        name = c_char_p()
        driver().cuGetErrorName(code, byref(name))
        raise KernelError(f"{what} failed: {(name.value or b'CUDA error').decode()} ({code})")


# --- compiling -------------------------------------------------------------------------------------------------------


def compiler_version() -> str:
    major, minor = c_int(), c_int()
    nvrtc().nvrtcVersion(byref(major), byref(minor))
    return f"{major.value}.{minor.value}"


def supported_archs() -> list[int]:
    """Architectures this NVRTC can emit code for, as 10 * major + minor, ascending."""
    count = c_int()
    nvrtc().nvrtcGetNumSupportedArchs(byref(count))
    archs = (c_int * count.value)()
    nvrtc().nvrtcGetSupportedArchs(archs)
    return sorted(archs)


def target_for(arch: int) -> str:
    """`sm_90` where the compiler knows the GPU, else PTX of the newest architecture it knows, which the driver translates.

    Raises KernelError for a GPU older than both the compiler and this pack support.
    """
    known = supported_archs()
    if arch < MIN_ARCH or arch < known[0]:
        raise KernelError(f"GPU architecture sm_{arch} is not supported (sm_{max(MIN_ARCH, known[0])} or newer is)")
    return f"sm_{arch}" if arch in known else f"compute_{max(a for a in known if a < arch)}"


def compile_source(source: str, target: str, defines: tuple[str, ...] = ()) -> bytes:
    """Machine code (target `sm_XY`) or PTX (target `compute_XY`) of header-free CUDA C++ source.

    Raises KernelError that carries the compiler's log.
    """
    lib, program = nvrtc(), c_void_p()
    if lib.nvrtcCreateProgram(byref(program), source.encode(), b"flux_fast_path.cu", 0, None, None):
        raise KernelError("NVRTC could not create a program")
    try:
        options = [f"--gpu-architecture={target}", "--std=c++17", *(f"-D{define}" for define in defines)]
        encoded = (c_char_p * len(options))(*(option.encode() for option in options))
        code = lib.nvrtcCompileProgram(program, len(options), encoded)
        if code:
            raise KernelError(f"NVRTC {compiler_version()} could not compile for {target} (error {code}):\n{_log(lib, program)}")
        kind = "CUBIN" if target.startswith("sm_") else "PTX"
        return _output(lib, program, kind)
    finally:
        lib.nvrtcDestroyProgram(byref(program))


def _output(lib: ctypes.CDLL, program: c_void_p, kind: str) -> bytes:
    size = c_size_t()
    if getattr(lib, f"nvrtcGet{kind}Size")(program, byref(size)) or not size.value:
        raise KernelError(f"NVRTC produced no {kind}")
    buffer = ctypes.create_string_buffer(size.value)
    getattr(lib, f"nvrtcGet{kind}")(program, buffer)
    return buffer.raw


def _log(lib: ctypes.CDLL, program: c_void_p) -> str:
    size = c_size_t()
    lib.nvrtcGetProgramLogSize(program, byref(size))
    buffer = ctypes.create_string_buffer(max(size.value, 1))
    lib.nvrtcGetProgramLog(program, buffer)
    return buffer.value.decode(errors="replace").strip()


# --- loading and launching -------------------------------------------------------------------------------------------


def ensure_context(device_index: int) -> None:
    """Make the device's primary context current in this thread; a thread that only ever launched nothing has none."""
    current = c_void_p()
    _check(driver().cuCtxGetCurrent(byref(current)), "cuCtxGetCurrent")
    if not current.value:
        _check(driver().cuDevicePrimaryCtxRetain(byref(current), device_index), "cuDevicePrimaryCtxRetain")
        _check(driver().cuCtxSetCurrent(current), "cuCtxSetCurrent")


class Module:
    """Loaded code on one device. Kept for the life of the process, like torch's own kernels."""

    def __init__(self, code: bytes, device_index: int):
        self.device_index, self.handle = device_index, c_void_p()
        with torch.cuda.device(device_index):
            ensure_context(device_index)
            _check(driver().cuModuleLoadData(byref(self.handle), code), "loading the kernels")

    def function(self, name: str) -> c_void_p:
        handle = c_void_p()
        _check(driver().cuModuleGetFunction(byref(handle), self.handle, name.encode()), f"finding kernel {name}")
        return handle


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of the driver API."""

    _fields_ = [
        *((name, c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_bytes")),
        ("stream", c_void_p), ("attributes", c_void_p), ("attribute_count", c_uint),
    ]


class Launch:
    """One prepared launch: fixed grid, block and scalars; pointers are given at each call.

    `pointers` is their number (they come first in the kernel's parameters), `scalars` are ctypes values that follow. Argument blocks
    are prepared once a thread, since ctypes releases the GIL while the driver reads them.
    """

    __slots__ = ("_device", "_function", "_grid_block", "_pointers", "_scalars", "_threads", "_launch")

    def __init__(self, module: Module, name: str, grid: tuple[int, int, int], block: int, pointers: int, scalars: tuple):
        self._device, self._function = module.device_index, module.function(name)
        self._grid_block, self._pointers, self._scalars, self._threads = (*grid, block, 1, 1, 0), pointers, scalars, {}
        self._launch = driver().cuLaunchKernelEx

    def _prepare(self):
        if len(self._threads) > 64:
            self._threads.clear()  # threads come and go; their idents do not tell us when
        with torch.cuda.device(self._device):
            ensure_context(self._device)
        config, slots = LaunchConfig(*self._grid_block), (ctypes.c_uint64 * self._pointers)()
        base = ctypes.addressof(slots)
        addresses = [base + 8 * i for i in range(self._pointers)] + [ctypes.addressof(s) for s in self._scalars]
        arguments = (c_void_p * len(addresses))(*addresses)
        # Kept together: the addresses are raw, so nothing else keeps what they point to alive.
        prepared = self._threads[get_ident()] = slots, config, ctypes.addressof(config), ctypes.addressof(arguments), arguments
        return prepared

    def __call__(self, *pointers: int) -> None:
        """Launch on torch's current stream of the device. Raises KernelError."""
        slots, config, config_address, arguments, _ = self._threads.get(get_ident()) or self._prepare()
        slots[:] = pointers
        device = self._device
        config.stream = torch._C._cuda_getCurrentRawStream(device)
        if torch._C._cuda_getDevice() == device:
            code = self._launch(config_address, self._function, arguments, None)
        else:
            with torch.cuda.device(device):
                code = self._launch(config_address, self._function, arguments, None)
        if code:
            _check(code, "the kernel launch")
