"""Every kernel gives the bits of its eager reference on this GPU. The dispatcher must have run the kernel, not the reference."""

import pytest
import torch
from flux_fast_path.kernels import build, proof
from flux_fast_path.kernels.column_copy import column_copy
from flux_fast_path.kernels.gelu_concat import gelu_concat
from flux_fast_path.kernels.head_concat import head_concat
from flux_fast_path.kernels.layer_norm_modulate import layer_norm_modulate
from flux_fast_path.kernels.qk_norm_rope import qk_norm_rope
from flux_fast_path.kernels.residual_gate import residual_gate
from flux_fast_path.kernels.slices import ColumnSlice
from op_cases import bits_equal, eager_rope, eager_rope_pair, gate_case, norm_case, qk_case, values

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("inference")]
DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture
def generator():
    return torch.Generator("cuda").manual_seed(11)


def check(op, *args):
    """Run `op` and its reference on equal operands; the kernel must have been launched."""
    wanted = op.reference(*op.shadow(*args))
    before = sum(p.launches for p in op.plans.values())
    got = op(*op.shadow(*args))
    bits_equal(got, wanted)
    bits_equal(op(*op.shadow(*args)), wanted)  # the second call takes the plan's short path
    plans = {p.reason for p in op.plans.values() if not p.fused}
    assert sum(p.launches for p in op.plans.values()) == before + 2, f"the reference ran: {plans}, {[v.reason for v in op.verdicts.values()]}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inplace", [True, False], ids=["in-place", "out-of-place"])
@pytest.mark.parametrize("gate", ["chunk", "model", "batch", "row"])
@pytest.mark.parametrize("batch,rows,width", [(1, 4096, 3072), (1, 512, 3072), (1, 4608, 3072), (2, 17, 65), (3, 1, 8), (4, 333, 3072), (2, 9, 264)],
                         ids=lambda v: str(v))
def test_the_residual_gate_is_bit_exact(dtype, inplace, gate, batch, rows, width, generator):
    x, y, g = gate_case(batch, rows, width, gate, dtype, "cuda", generator)
    check(residual_gate, x, y, g, inplace)


@pytest.mark.parametrize("offset,padding", [(1, 0), (0, 8), (3, 5), (8, 16)])
def test_the_residual_gate_takes_misaligned_and_padded_rows(offset, padding, generator):
    x, y, g = gate_case(2, 100, 128, "batch", torch.bfloat16, "cuda", generator, offset, padding)
    wanted = x.clone() + y * g
    bits_equal(residual_gate(x, y, g, True), wanted)
    bits_equal(x, wanted)


def test_the_residual_gate_writes_into_the_tensor_it_was_given(generator):
    x, y, g = gate_case(1, 64, 3072, "chunk", torch.bfloat16, "cuda", generator)
    assert residual_gate(x, y, g, True) is x
    before = x.clone()
    assert residual_gate(x, y, g, False) is not x
    bits_equal(x, before)


def test_a_y_that_overlaps_x_gives_the_eager_result(generator):
    memory = values(1, 65, 128, dtype=torch.bfloat16, device="cuda", generator=generator)
    g = values(1, 1, 128, dtype=torch.bfloat16, device="cuda", generator=generator)
    wanted = memory[:, :64].clone() + memory[:, 1:] * g
    bits_equal(residual_gate(memory[:, :64], memory[:, 1:], g, True), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("modulation", ["chunk", "model", "batch", "row"])
@pytest.mark.parametrize("batch,rows,width", [(1, 4096, 3072), (1, 512, 3072), (1, 4608, 3072), (2, 77, 256), (3, 31, 2048), (1, 5, 4), (2, 40, 5120), (1, 9, 64)])
def test_the_modulated_layer_norm_is_bit_exact(dtype, modulation, batch, rows, width, generator):
    x, scale, shift = norm_case(batch, rows, width, dtype, "cuda", generator, modulation)
    for plus_one in (True, False):
        check(layer_norm_modulate, x, scale, shift, 1e-6, plus_one)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_modulated_layer_norm_carries_special_values_as_torch_does(dtype, generator):
    check(layer_norm_modulate, *norm_case(2, 64, 3072, dtype, "cuda", generator, special=True), 1e-6, True)


@pytest.mark.parametrize("width", [6, 516, 800, 260, 3600])
def test_the_modulated_layer_norm_leaves_widths_that_torch_reduces_unevenly_to_torch(width, generator):
    args = (*norm_case(2, 33, width, torch.bfloat16, "cuda", generator), 1e-6, True)
    assert "width" in layer_norm_modulate.why_not(*args)
    bits_equal(layer_norm_modulate(*args), layer_norm_modulate.reference(*args))


def test_the_modulated_layer_norm_takes_the_image_part_of_a_joined_stream(generator):
    x, scale, shift = norm_case(2, 600, 3072, torch.bfloat16, "cuda", generator)
    check(layer_norm_modulate, x[:, 100:], scale, shift, 1e-6, True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rope", [eager_rope, eager_rope_pair], ids=["one", "pair"])
@pytest.mark.parametrize("token_major", [True, False], ids=["token-major", "head-major"])
@pytest.mark.parametrize("batch,tokens,heads,dim", [(1, (512, 4096), 24, 128), (1, (4608,), 24, 128), (3, (13, 29), 24, 128), (2, (7,), 5, 64), (1, (1, 1), 2, 128)])
def test_q_and_k_norm_with_rope_is_bit_exact(dtype, rope, token_major, batch, tokens, heads, dim, generator):
    pair = rope is eager_rope_pair
    extra = 4 * heads * dim if len(tokens) == 1 else 0
    for pe_batch in {1, batch}:
        streams, pe = qk_case(batch, tokens, heads, dim, dtype, "cuda", generator, pe_batch, extra, pair)
        check(qk_norm_rope, streams, pe, None, rope, token_major)


@pytest.mark.parametrize("batch,text,image", [(1, 512, 4096), (2, 13, 29), (1, 1, 1), (3, 7, 8)])
def test_the_concat_of_v_moves_every_bit(batch, text, image, generator):
    heads, dim = 24, 128
    parts = [ColumnSlice(values(batch, n, 3 * heads * dim, dtype=torch.bfloat16, device="cuda", generator=generator), 2 * heads * dim, heads * dim) for n in (text, image)]
    check(head_concat, *parts, heads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch,tokens,attention,mlp", [(1, 4608, 3072, 12288), (2, 33, 256, 1024), (3, 5, 8, 8)])
def test_gelu_and_concat_are_bit_exact(dtype, batch, tokens, attention, mlp, generator):
    a = values(batch, tokens, attention, dtype=dtype, device="cuda", generator=generator)
    wide = values(batch, tokens, 3 * attention + mlp, dtype=dtype, device="cuda", generator=generator) * 2
    check(gelu_concat, a, ColumnSlice(wide, 3 * attention, mlp))
    check(gelu_concat, a, wide[:, :, 3 * attention:])


@pytest.mark.parametrize("batch,tokens,width,wide", [(1, 4608, 3072, 15360), (2, 33, 256, 1280), (3, 5, 8, 16)])
def test_copying_rows_into_columns_moves_every_bit(batch, tokens, width, wide, generator):
    rows = values(batch, tokens, width, dtype=torch.float16, device="cuda", generator=generator)
    buffer = values(batch, tokens, wide, dtype=torch.float16, device="cuda", generator=generator)
    rest = buffer[..., width:].clone()
    for _ in range(2):
        assert column_copy(buffer[..., :width], rows).data_ptr() == buffer.data_ptr()
        bits_equal(buffer[..., :width], rows)
        bits_equal(buffer[..., width:], rest)
    assert any(p.launches for p in column_copy.plans.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_agrees_on_all_65536_inputs(dtype):
    every = torch.arange(65536, device="cuda", dtype=torch.int32).to(torch.int16).view(dtype).view(1, 64, 1024)
    check(gelu_concat, every[:, :, :8], every)


def test_operations_run_on_the_current_stream(generator):
    x, y, g = gate_case(1, 4096, 3072, "chunk", torch.bfloat16, "cuda", generator)
    wanted = residual_gate.reference(x.clone(), y, g, True)
    residual_gate(x.clone(), y, g, True)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        mine = x.clone()  # on the default stream this read would be of memory that is not written yet
        residual_gate(mine, y, g, True)
    side.synchronize()
    bits_equal(mine, wanted)


def test_a_proven_operation_can_be_captured_in_a_graph(generator):
    x, y, g = gate_case(1, 256, 3072, "chunk", torch.bfloat16, "cuda", generator)
    residual_gate(x.clone(), y, g, True)
    work, graph = x.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        residual_gate(work, y, g, True)
    graph.replay()
    torch.cuda.synchronize()
    bits_equal(work, residual_gate.reference(x.clone(), y, g, True))


def test_a_kernel_with_wrong_bits_is_disabled_and_the_picture_is_right(generator, monkeypatch, caplog):
    x, y, g = gate_case(1, 128, 512, "chunk", torch.bfloat16, "cuda", generator)
    proof.forget()
    honest = type(residual_gate).prepare

    def lying(self, variant, *args):
        run = honest(self, variant, *args)
        return lambda *a: run(*a).add_(1)

    monkeypatch.setattr(type(residual_gate), "prepare", lying)
    wanted = residual_gate.reference(x.clone(), y, g, True)
    for _ in range(3):
        bits_equal(residual_gate(x.clone(), y, g, True), wanted)
    assert [r.levelname for r in caplog.records] == ["WARNING"], "one line, once"
    assert {v.state for v in residual_gate.verdicts.values()} == {"disabled"}
    proof.forget()


def test_a_failed_build_steps_aside_with_the_compilers_words(generator, monkeypatch):
    monkeypatch.setattr(build, "_modules", {})
    monkeypatch.setattr(build, "source", lambda: "this is not CUDA")
    reason = build.unavailable(torch.device("cuda", 0), torch.bfloat16)
    assert "could not compile" in reason
    proof.forget()
    x, y, g = gate_case(1, 16, 64, "chunk", torch.bfloat16, "cuda", generator)
    bits_equal(residual_gate(x.clone(), y, g, True), residual_gate.reference(x.clone(), y, g, True))
    proof.forget()
