"""A thousand random signatures: dtype, batch, tokens, widths, strides, offsets, special values. Zero differing bits."""

import random

import pytest
import torch
from flux_fast_path.kernels.column_copy import column_copy
from flux_fast_path.kernels.gelu_concat import gelu_concat
from flux_fast_path.kernels.head_concat import head_concat
from flux_fast_path.kernels.layer_norm_modulate import layer_norm_modulate
from flux_fast_path.kernels.qk_norm_rope import qk_norm_rope
from flux_fast_path.kernels.residual_gate import residual_gate
from flux_fast_path.kernels.slices import ColumnSlice
from op_cases import bits_equal, eager_rope, eager_rope_pair, gate_case, norm_case, qk_case, values

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
ROUNDS = 1200


def random_case(r, generator):
    """(op, args) with operands on the GPU."""
    dtype, batch, tokens = r.choice([torch.bfloat16, torch.float16]), r.choice([1, 1, 2, 3, 4]), r.choice([1, 7, 8, 31, 64, 200, 513])
    like = dict(dtype=dtype, device="cuda", generator=generator)
    kind = r.choice(["gate", "gate", "norm", "norm", "qk", "qk", "v", "gelu", "copy"])
    if kind == "gate":
        width = r.choice([1, 3, 8, 65, 256, 264, 1000, 3072])
        x, y, g = gate_case(batch, tokens, width, r.choice(["chunk", "model", "batch", "row"]), dtype, "cuda", generator, r.choice([0, 0, 1, 4, 8]), r.choice([0, 0, 3, 8]))
        return residual_gate, (x, y, g, r.random() < 0.5)
    if kind == "norm":
        width = 4 * r.choice([1, 2, 16, 64, 129, 200, 512, 768, 900])
        x, scale, shift = norm_case(batch, tokens, width, dtype, "cuda", generator, r.choice(["chunk", "model", "batch", "row"]), r.random() < 0.3)
        if r.random() < 0.3 and tokens > 8:
            x, rest = x[:, 4:], tokens - 4
            scale, shift = (v if type(v) is ColumnSlice or v.shape[1] == 1 else v[:, :rest] for v in (scale, shift))
        return layer_norm_modulate, (x, scale, shift, r.choice([1e-6, 1e-5]), r.random() < 0.7)
    heads, dim = r.choice([1, 2, 5, 24]), r.choice([64, 128])
    if kind == "qk":
        pair, lengths = r.random() < 0.7, (tokens,) if r.random() < 0.5 else (r.choice([1, 5, 77]), tokens)
        streams, pe = qk_case(batch, lengths, heads, dim, dtype, "cuda", generator, r.choice([1, batch]), r.choice([0, 64]), pair)
        return qk_norm_rope, (streams, pe, r.choice([None, 1e-6]), eager_rope_pair if pair else eager_rope, r.random() < 0.5)
    if kind == "v":
        parts = [ColumnSlice(values(batch, n, 3 * heads * dim, **like), r.choice([0, 2]) * heads * dim, heads * dim) for n in (r.choice([1, 9, 77]), tokens)]
        return head_concat, (*parts, heads)
    width, mlp = 8 * r.choice([1, 3, 32, 384]), 8 * r.choice([1, 5, 128, 300])
    if kind == "gelu":
        wide = values(batch, tokens, 3 * width + mlp, **like) * 3
        return gelu_concat, (values(batch, tokens, width, **like), ColumnSlice(wide, 3 * width, mlp) if r.random() < 0.5 else wide[..., 3 * width:])
    return column_copy, (values(batch, tokens, width + mlp, **like)[..., :width], values(batch, tokens, width, **like))


def test_a_thousand_random_signatures_differ_in_no_bit():
    r, generator, fused, names = random.Random(20261129), torch.Generator("cuda").manual_seed(5), 0, {}
    with torch.inference_mode():
        for _ in range(ROUNDS):
            op, args = random_case(r, generator)
            wanted = op.reference(*op.shadow(*args))
            for _ in range(2):
                try:
                    bits_equal(op(*op.shadow(*args)), wanted)
                except AssertionError as error:
                    raise AssertionError(f"{op.name}, {op.key(*args)}: {error}") from error
            plan = op.plans[op.key(*args)] if op.key(*args) in op.plans else None
            fused += bool(plan and plan.fused)
            names[op.name] = names.get(op.name, 0) + 1
            disabled = [v for v in op.verdicts.values() if v.state == "disabled"]
            assert not disabled, [(v.signature, v.reason) for v in disabled]
    assert fused > 0.6 * ROUNDS, f"only {fused} of {ROUNDS} ran fused"
    assert len(names) == 6, names
