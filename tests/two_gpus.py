"""What the tests with two GPUs share. Both GPUs get a context, and the one that was current has to be current again afterwards."""

import gc
from collections import Counter

import pytest
import torch
from flux_fast_path.kernels import proof

FIRST, SECOND, BF16 = torch.device("cuda", 0), torch.device("cuda", 1), torch.bfloat16
NEEDED = [pytest.mark.cuda, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has fewer than two CUDA devices")]


@pytest.fixture(autouse=True)
def the_first_is_current():
    """cuda:0 is current before every test, and must be afterwards."""
    gc.collect()
    torch.cuda.set_device(FIRST)
    for device in (FIRST, SECOND):
        torch.zeros(1, device=device)  # a context each, so that memory can be asked for
    with torch.inference_mode():
        yield
    left = torch.cuda.current_device()
    torch.cuda.set_device(FIRST)
    assert left == 0, f"cuda:{left} was left current"


def launches(device):
    """Operation -> how often its kernel was launched on the device since the plans were forgotten."""
    return Counter({name: sum(p.launches for p in list(op.plans.values()) if p.device == device) for name, op in proof.REGISTRY.items()})


def refusals():
    """What a failure should show: why anything stepped aside."""
    return sorted({f"{name} on {p.device}: {p.reason}" for name, op in proof.REGISTRY.items() for p in op.plans.values() if p.reason})


def same(got, wanted, what):
    assert got.device == wanted.device and proof.same_bits(got, wanted), f"{what}: bits differ, or the result is on {got.device}"
