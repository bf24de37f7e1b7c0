"""Tier high's product: inside its stated bound of the eager pair, deterministic, and refused where the bound does not hold."""

import pytest
import torch
import torch.nn.functional as F
from flux_fast_path.kernels import proof
from flux_fast_path.kernels.linear_gelu import linear_gelu

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("inference")]


def operands(rows, k, n, dtype, wide=None):
    generator = torch.Generator("cuda").manual_seed(3)

    def make(*shape, scale=1.0):
        return (torch.randn(*shape, device="cuda", generator=generator) * scale).to(dtype)

    buffer = None if wide is None else make(1, rows, wide)
    return make(1, rows, k), make(n, k, scale=k**-0.5), make(n, scale=0.02), buffer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows,k,n,wide", [(4096, 3072, 12288, None), (512, 3072, 12288, None), (4608, 3072, 12288, 15360), (17, 256, 1024, 1280)])
def test_the_epilogue_stays_inside_its_bound_and_repeats_its_bits(dtype, rows, k, n, wide):
    x, w, b, buffer = operands(rows, k, n, dtype, wide)
    out = None if buffer is None else buffer[..., wide - n:]
    want = F.gelu(F.linear(x, w, b), approximate="tanh")
    untouched = None if out is None else buffer[..., : wide - n].clone()
    first = linear_gelu(x, w, b, out).clone()
    assert any(p.fused for p in linear_gelu.plans.values()), [p.reason for p in linear_gelu.plans.values()]
    h, g = F.linear(x, w, b).float().norm(), want.float().norm()
    u = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    assert (first.float() - want.float()).norm() <= 1.05 * u * (1.13 * h + 2 * g)
    for _ in range(3):
        assert torch.equal(linear_gelu(x, w, b, out), first)
    if out is not None:
        assert torch.equal(buffer[..., : wide - n], untouched), "it wrote outside its columns"


def test_a_result_beyond_the_bound_is_refused(monkeypatch):
    proof.forget()
    x, w, b, _ = operands(64, 256, 512, torch.bfloat16)
    honest = type(linear_gelu).prepare
    monkeypatch.setattr(type(linear_gelu), "prepare", lambda self, variant, *args: lambda *a: honest(self, variant, *args)(*a) * 1.1)
    want = F.gelu(F.linear(x, w, b), approximate="tanh")
    assert torch.equal(linear_gelu(x, w, b, None), want)
    assert {v.state for v in linear_gelu.verdicts.values()} == {"disabled"}
    proof.forget()
