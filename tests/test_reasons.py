"""One test per reason for which an operation leaves its operands to core. No GPU is needed to say why."""

import pytest
import torch
from flux_fast_path.kernels.column_copy import column_copy
from flux_fast_path.kernels.gelu_concat import gelu_concat
from flux_fast_path.kernels.head_concat import head_concat
from flux_fast_path.kernels.layer_norm_modulate import layer_norm_modulate
from flux_fast_path.kernels.linear_gelu import linear_gelu
from flux_fast_path.kernels.qk_norm_rope import qk_norm_rope
from flux_fast_path.kernels.residual_gate import residual_gate
from flux_fast_path.kernels.slices import ColumnSlice
from op_cases import eager_rope, qk_case

BF16 = torch.bfloat16


def t(*shape, dtype=BF16):
    return torch.zeros(*shape, dtype=dtype)


def odd(*shape):
    """A tensor whose address is not a multiple of 16 bytes."""
    return torch.zeros(torch.Size(shape).numel() + 1, dtype=BF16)[1:].view(shape)


def qk(**changes):
    streams, pe = qk_case(1, (3, 5), 2, 128, BF16, "cpu", torch.Generator())
    for name, value in changes.items():
        setattr(streams[0], name, value)
    return streams, pe


X, GATE = t(2, 8, 64), t(1, 1, 64)
REASONS = {
    "dimensions": (residual_gate, (t(8, 64), X, GATE, True), "x has 2 dimensions"),
    "shapes differ": (residual_gate, (X, t(2, 7, 64), GATE, True), "y is (2, 7, 64)"),
    "dtypes differ": (residual_gate, (X, X.half(), GATE, True), "y is float16"),
    "gate per head": (residual_gate, (X, X, t(2, 1, 32), True), "gate is (2, 1, 32)"),
    "gate of three samples": (residual_gate, (X, X, t(3, 1, 64), True), "gate is (3, 1, 64)"),
    "strided elements": (residual_gate, (X, t(2, 64, 8).mT, GATE, True), "not adjacent"),
    "overlapping rows": (residual_gate, (t(1, 1, 64).expand(1, 8, 64), t(1, 8, 64), GATE, True), "rows of x overlap"),
    "layout of the result": (residual_gate, (t(2, 16, 64)[:, ::2], X, GATE, False), "x is not contiguous"),
    "empty": (residual_gate, (t(2, 0, 64), t(2, 0, 64), GATE, True), "x is empty"),
    "a tensor of another kind": (residual_gate, (X.as_subclass(type("Foreign", (torch.Tensor,), {})), X, GATE, True), "x is a Foreign"),
    "uneven width": (layer_norm_modulate, (t(1, 4, 516), t(1, 1, 516), t(1, 1, 516), 1e-6, True), "unequal shares"),
    "width not of fours": (layer_norm_modulate, (t(1, 4, 6), t(1, 1, 6), t(1, 1, 6), 1e-6, True), "not divisible by 4"),
    "misaligned norm": (layer_norm_modulate, (odd(1, 4, 64), GATE, GATE, 1e-6, True), "not aligned to 8 bytes"),
    "head width": (qk_norm_rope, (*qk_case(1, (3,), 2, 96, BF16, "cpu", torch.Generator()), None, eager_rope, False), "heads are 96 wide"),
    "weight of another dtype": (qk_norm_rope, (*qk(q_weight=t(128, dtype=torch.float32)), None, eager_rope, False), "the norm's weight is torch.float32"),
    "streams differ": (qk_norm_rope, (*qk(heads=1), None, eager_rope, False), "text and image differ"),
    "rotation of other tokens": (qk_norm_rope, (qk()[0], t(1, 1, 9, 64, 2, 2, dtype=torch.float32), None, eager_rope, False), "for 8 tokens"),
    "half rotation": (qk_norm_rope, (qk()[0], qk()[1].half(), None, eager_rope, False), "torch.float16"),
    "v of another batch": (head_concat, (t(1, 3, 64), t(2, 5, 64), 1), "text is (1, 3, 64)"),
    "v misaligned": (head_concat, (odd(1, 3, 64), t(1, 5, 64), 1), "not aligned to 16 bytes"),
    "gelu width": (gelu_concat, (t(1, 4, 12), t(1, 4, 64)), "attention is not made of aligned"),
    "gelu misaligned slice": (gelu_concat, (t(1, 4, 64), ColumnSlice(t(1, 4, 128), 4, 64)), "mlp is not made of aligned"),
    "gelu uneven batch": (gelu_concat, (t(2, 8, 64)[:, :4], t(2, 4, 64)), "rows of attention are not evenly spaced"),
    "copy into other shapes": (column_copy, (t(1, 4, 64), t(1, 3, 64)), "rows are (1, 3, 64)"),
    "epilogue in float32": (linear_gelu, (t(1, 4, 64, dtype=torch.float32), t(8, 64), t(8), None), "x is torch.float32"),
    "epilogue on a CPU": (linear_gelu, (t(1, 4, 64), t(8, 64), t(8), None), "x is on cpu"),
}


@pytest.mark.parametrize("name", REASONS)
def test_it_says_why(name):
    op, args, reason = REASONS[name]
    assert reason in (op.why_not(*args) or "None")


def test_what_the_contracts_allow_has_no_reason():
    assert residual_gate.why_not(X, X, GATE, True) is None and residual_gate.why_not(X, X, ColumnSlice(t(2, 1, 384), 64, 64), False) is None
    assert layer_norm_modulate.why_not(t(2, 4, 3072), t(2, 1, 3072), t(2, 4, 3072), 1e-6, False) is None
    assert qk_norm_rope.why_not(*qk(), None, eager_rope, True) is None
    assert head_concat.why_not(ColumnSlice(t(1, 3, 384), 256, 128), ColumnSlice(t(1, 5, 384), 256, 128), 1) is None
    assert gelu_concat.why_not(t(1, 4, 64), t(1, 4, 256)[..., 64:]) is None and column_copy.why_not(t(1, 4, 256)[..., :64], t(1, 4, 64)) is None


@pytest.mark.parametrize("name", [n for n, (op, _, _) in REASONS.items() if op in (residual_gate, layer_norm_modulate, head_concat, gelu_concat) and n not in (
    "dimensions", "shapes differ", "gate per head", "gate of three samples", "dtypes differ", "v of another batch", "gelu width")])
def test_what_has_a_reason_runs_as_torch_runs_it(name):
    op, args, _ = REASONS[name]
    got, want = op(*op.shadow(*args)), op.reference(*op.shadow(*args))
    assert torch.equal(torch.as_tensor(got), torch.as_tensor(want))
