"""What a call costs the device, in µs of CUDA events: for the report's "saved", never for a decision."""

from __future__ import annotations

import time

import torch

from . import build
from .nvrtc import KernelError

REPEATS = 3
MAX_SPINS = 32  # about 10 ms: a host that needs longer to queue one chain is not waited for


def _nothing() -> None:
    pass


def device_us(like: torch.Tensor, calls) -> list[float]:
    """µs of each of `calls` on `like`'s device: the median of a few, the first not counted.

    A spinning kernel goes first, as often as it takes for the host's part of the call to be over before the device begins with it:
    otherwise a slow host would be counted as a slow operation.
    """
    with torch.cuda.device_of(like):  # events go to the current device's stream
        try:
            spin = build.spin(like.device.index, like.dtype)
        except KernelError:  # an operation of cublasLt's does not need our kernels
            spin = _nothing
        one_spin = _sample(spin, spin, 1)[0]
        return [_median_us(call, spin, one_spin) for call in calls]


def _median_us(call, spin, one_spin: float) -> float:
    spins, times = 1, []
    while len(times) <= REPEATS:
        elapsed, host = _sample(call, spin, spins)
        if host > 0.8 * spins * one_spin and spins < MAX_SPINS:
            spins *= 2
        else:
            times.append(elapsed)
    return sorted(times[1:])[REPEATS // 2]


def _sample(call, spin, spins: int) -> tuple[float, float]:
    """(µs on the device, µs of the host until all is queued) of one call behind `spins` spinning kernels."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began = time.perf_counter()
    for _ in range(spins):
        spin()
    start.record()
    call()
    end.record()
    host = (time.perf_counter() - began) * 1e6
    end.synchronize()
    return start.elapsed_time(end) * 1e3, host
