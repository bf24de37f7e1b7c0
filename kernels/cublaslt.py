"""D = epilogue(x · Wᵀ + bias) through cublasLt, called directly in the library that torch has loaded. The other file that uses ctypes.

torch can put GELU into a GEMM's epilogue, but not write the result into columns of a wider buffer; cublasLt can (`ldd`). The algorithm is
the first that the library's heuristic offers for the shape: it depends on library, architecture, dtype and shape only, never on a timing,
so one seed gives one image. Everything here raises `KernelError`.
"""

from __future__ import annotations

import ctypes
import threading
from ctypes import POINTER, byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p

import torch

from .libraries import candidates
from .nvrtc import KernelError, load_library

# Values of cublasLt.h and library_types.h, the same in CUDA 11.8 to 13.
CUDA_TYPE = {torch.float16: 2, torch.bfloat16: 14}
COMPUTE_32F, SCALE_32F = 68, 0
DESC_TRANSA, DESC_EPILOGUE, DESC_BIAS_POINTER = 3, 7, 8
PREF_MAX_WORKSPACE = 1
BIAS, GELU_BIAS = 4, 36
WORKSPACE = 32 << 20  # bytes; what torch gives cublasLt on Hopper


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [("algorithm", c_uint64 * 8), ("workspace", c_size_t), ("state", c_int), ("waves", c_float), ("reserved", c_int * 4)]


_SIGNATURES = {
    "cublasLtCreate": [POINTER(c_void_p)],
    "cublasLtMatmulDescCreate": [POINTER(c_void_p), c_int, c_int],
    "cublasLtMatmulDescSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatmulDescDestroy": [c_void_p],
    "cublasLtMatrixLayoutCreate": [POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64],
    "cublasLtMatrixLayoutDestroy": [c_void_p],
    "cublasLtMatmulPreferenceCreate": [POINTER(c_void_p)],
    "cublasLtMatmulPreferenceSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatmulPreferenceDestroy": [c_void_p],
    "cublasLtMatmulAlgoGetHeuristic": [c_void_p] * 7 + [c_int, c_void_p, POINTER(c_int)],
    "cublasLtMatmul": [c_void_p] * 14 + [c_size_t, c_void_p],
}
_handles: dict[int, c_void_p] = {}
_lock = threading.Lock()


def _check(status: int, what: str) -> None:
    if status:
        raise KernelError(f"cublasLt: {what} failed (status {status})")


def library() -> ctypes.CDLL:
    return load_library("cublasLt", candidates("cublasLt", "cublas"), _SIGNATURES, "torch's cublasLt library")


def _handle(device_index: int) -> c_void_p:
    with _lock:
        if device_index not in _handles:
            handle = c_void_p()
            with torch.cuda.device(device_index):
                torch.cuda.current_blas_handle()  # makes the device's context current in this thread
                _check(library().cublasLtCreate(byref(handle)), "creating a handle")
            _handles[device_index] = handle
        return _handles[device_index]


class Linear:
    """One prepared product: x [M, K] rows `ldx` apart, W [N, K], bias [N], D [M, N] rows `ldd` apart; bfloat16 or float16, float32 sums."""

    def __init__(self, device_index: int, dtype: torch.dtype, m: int, n: int, k: int, ldx: int, ldw: int, ldd: int, epilogue: int, choice: int = 0):
        self.device_index, self.lib, self.handle = device_index, library(), _handle(device_index)
        kind, self.parts = CUDA_TYPE[dtype], []
        # cublasLt is column-major: it sees D (N x M) = Wᵀᵀ (N x K) · x (K x M).
        self.w, self.x, self.d = self._layout(kind, k, n, ldw), self._layout(kind, k, m, ldx), self._layout(kind, n, m, ldd)
        self.desc = c_void_p()
        _check(self.lib.cublasLtMatmulDescCreate(byref(self.desc), COMPUTE_32F, SCALE_32F), "describing the product")
        self._set(DESC_TRANSA, c_int(1))
        self._set(DESC_EPILOGUE, c_int(epilogue))
        self.algorithms = self._heuristics(choice + 1)
        if len(self.algorithms) <= choice:
            raise KernelError(f"cublasLt offers {len(self.algorithms)} algorithm(s) for {m}x{n}x{k} with epilogue {epilogue}")
        self.algorithm = self.algorithms[choice]
        self.one, self.zero, self.bias, self.lock = c_float(1.0), c_float(0.0), c_void_p(), threading.Lock()
        # Addresses once: making a ctypes reference at each call is most of what a call costs the host.
        self.one_address, self.zero_address, self.bias_address, self.algorithm_address = map(
            ctypes.addressof, (self.one, self.zero, self.bias, self.algorithm)
        )

    def _layout(self, kind: int, rows: int, columns: int, stride: int) -> c_void_p:
        layout = c_void_p()
        _check(self.lib.cublasLtMatrixLayoutCreate(byref(layout), kind, rows, columns, stride), "describing a matrix")
        self.parts.append(layout)
        return layout

    def _set(self, attribute: int, value) -> None:
        _check(self.lib.cublasLtMatmulDescSetAttribute(self.desc, attribute, byref(value), ctypes.sizeof(value)), "setting an attribute")

    def _heuristics(self, count: int) -> list[Heuristic]:
        preference, found, results = c_void_p(), c_int(), (Heuristic * count)()
        _check(self.lib.cublasLtMatmulPreferenceCreate(byref(preference)), "creating a preference")
        try:
            limit = c_size_t(WORKSPACE)
            _check(self.lib.cublasLtMatmulPreferenceSetAttribute(preference, PREF_MAX_WORKSPACE, byref(limit), ctypes.sizeof(limit)), "setting the workspace")
            status = self.lib.cublasLtMatmulAlgoGetHeuristic(
                self.handle, self.desc, self.w, self.x, self.d, self.d, preference, count, results, byref(found)
            )
            _check(status, "asking for an algorithm")
        finally:
            self.lib.cublasLtMatmulPreferenceDestroy(preference)
        return [r for r in results[: found.value] if r.state == 0]

    def __call__(self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, d: torch.Tensor) -> None:
        """Run on torch's current stream of the device."""
        workspace = torch.empty(max(self.algorithm.workspace, 16), dtype=torch.uint8, device=x.device)
        if torch._C._cuda_getDevice() == self.device_index:
            self._run(x, w, bias, d, workspace)
        else:
            with torch.cuda.device(self.device_index):
                self._run(x, w, bias, d, workspace)

    def _run(self, x, w, bias, d, workspace) -> None:
        result = d.data_ptr()
        with self.lock:  # the bias pointer is an attribute of the shared description
            self.bias.value = bias.data_ptr()
            self.lib.cublasLtMatmulDescSetAttribute(self.desc, DESC_BIAS_POINTER, self.bias_address, 8)
            status = self.lib.cublasLtMatmul(
                self.handle, self.desc, self.one_address, w.data_ptr(), self.w, x.data_ptr(), self.x, self.zero_address, result, self.d, result, self.d,
                self.algorithm_address, workspace.data_ptr(), self.algorithm.workspace, torch._C._cuda_getCurrentRawStream(self.device_index),
            )
        _check(status, "the product")

    def __del__(self):
        try:
            for layout in self.parts:
                self.lib.cublasLtMatrixLayoutDestroy(layout)
            self.lib.cublasLtMatmulDescDestroy(self.desc)
        except Exception:  # the interpreter may be half gone
            return
