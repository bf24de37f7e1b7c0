"""How time is taken: CUDA events around whole steps, kernel times from the profiler, replays of CUDA graphs; medians with their spread."""

from __future__ import annotations

import statistics
import time

import torch


def spread(values) -> dict:
    """Median, least, 10th and 90th percentile and number of the values; None of them when there are none."""
    values = sorted(values)
    if not values:
        return dict(median=None, min=None, p10=None, p90=None, n=0)

    def percentile(p):
        at = p * (len(values) - 1)
        low = int(at)
        return values[low] + (at - low) * (values[min(low + 1, len(values) - 1)] - values[low])

    return dict(median=statistics.median(values), min=values[0], p10=percentile(0.1), p90=percentile(0.9), n=len(values))


def synchronise(device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def steps(device, call, count: int) -> tuple:
    """(ms of `count` steps, host ms of the step before them).

    Steps follow each other without a wait, as in a sampler. The first one starts on an idle device: its host time, until the call returns,
    is what issuing a step costs the CPU; it is not among the timed ones.
    """
    synchronise(device)
    started = time.perf_counter()
    call()
    host = (time.perf_counter() - started) * 1e3
    if device.type != "cuda":
        times = []
        for _ in range(count):
            started = time.perf_counter()
            call()
            times.append((time.perf_counter() - started) * 1e3)
        return times, None
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    synchronise(device)
    return [a.elapsed_time(b) for a, b in zip(events, events[1:])], host


def peak_memory(device, call) -> dict:
    """Bytes at rest (weights, inputs) and at the peak of one step, as torch's allocator counts them."""
    if device.type != "cuda":
        return dict(resting=None, peak=None)
    synchronise(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    resting = torch.cuda.memory_allocated(device)
    call()
    synchronise(device)
    return dict(resting=resting, peak=torch.cuda.max_memory_allocated(device))


# --- single kernels: `calls` are functions without arguments, each with buffers of its own, so that no call finds its data in the L2 ---


def profiled_us(calls):
    """µs of GPU time a call, summed over the kernels it launched; None where the profiler sees no kernels."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        kept = [call() for call in calls]  # kept, so that every call writes to memory of its own
        torch.cuda.synchronize()
    del kept
    on_gpu = [e.time_range.elapsed_us() for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(on_gpu) / len(calls) if on_gpu else None


class Replays:
    """The calls captured in one CUDA graph."""

    def __init__(self, calls):
        self.count, self.graph = len(calls), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.kept = [call() for call in calls]

    def us(self, replays: int) -> float:
        """µs a call, gaps between kernels included."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.graph.replay()
        start.record()
        for _ in range(replays):
            self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / (replays * self.count)


def host_us(calls, repeats: int = 40) -> float:
    """µs of CPU time a call until it returns; few enough calls that the launch queue never fills."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for i in range(repeats):
        calls[i % len(calls)]()
    spent = (time.perf_counter() - started) * 1e6 / repeats
    torch.cuda.synchronize()
    return spent
