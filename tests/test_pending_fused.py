"""Where core's own code uses a pending value, one fused operation runs, on the operands core meant. No ComfyUI, any device."""
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from flux_fast_path.fusion.pending import real
from flux_fast_path.fusion.values import Chunk, Columns, Gated, Gelu, Norm, OnePlus
from fusion_scene import DEVICE, noise
from op_cases import bits_equal

pytestmark = pytest.mark.usefixtures("inference")
BATCH, WIDTH = 2, 128
NORM, GELU = torch.nn.LayerNorm(WIDTH, eps=1e-6, elementwise_affine=False), torch.nn.GELU(approximate="tanh")


def modulation(parts=6, batch=BATCH):
    """(pending chunks, core's chunks) of one Modulation."""
    out = noise(batch, 1, parts * WIDTH, seed=9)
    return [Chunk(out, i * WIDTH, WIDTH) for i in range(parts)], out.chunk(parts, -1)


# --- x += y * gate ---


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("update", [lambda x, u: x.__iadd__(u), lambda x, u: x.add_(u)], ids=["x += u", "x.add_"])
@pytest.mark.parametrize("product", [lambda y, g: y * g, lambda y, g: g * y, torch.mul, lambda y, g: y.mul(g)], ids=["y * g", "g * y", "mul", "y.mul"])
def test_the_residual_is_added_into_cores_own_tensor(fused, product, update, batch):
    chunks, eager = modulation(batch=batch)
    x, y = noise(batch, 5, WIDTH, seed=1), noise(batch, 5, WIDTH, seed=2)
    wanted, before = x + y * eager[2], y.clone()
    assert update(x, product(y, chunks[2])) is x
    bits_equal(x, wanted)
    bits_equal(y, before)
    assert fused == ["residual_gate"]


@pytest.mark.parametrize("update", [lambda x, u: x + u, lambda x, u: torch.add(x, u), lambda x, u: x.add(u)], ids=["x + u", "torch.add", "x.add"])
def test_the_residual_is_a_new_tensor_where_core_makes_one(fused, update):
    chunks, eager = modulation()
    x, y = noise(BATCH, 5, WIDTH, seed=1), noise(BATCH, 5, WIDTH, seed=2)
    before = x.clone()
    result = update(x, y * chunks[2])
    bits_equal(result, before + y * eager[2])
    bits_equal(x, before)
    assert result is not x and fused == ["residual_gate"]


@pytest.mark.parametrize("use", [
    pytest.param(lambda x, u: x - u, id="minus"), pytest.param(lambda x, u: u + x, id="the other way round"), pytest.param(lambda x, u: torch.add(x, u, alpha=2), id="alpha"),
    pytest.param(lambda x, u: x.add_(u, alpha=2), id="alpha in place"), pytest.param(lambda x, u: x.__imul__(u), id="times"), pytest.param(lambda x, u: x[:, :2].__iadd__(u[:, :2]), id="of a slice"),
    pytest.param(lambda x, u: torch.nn.Parameter(x, requires_grad=False) + u, id="parameter"), pytest.param(lambda x, u: x + u + u, id="used twice"), pytest.param(lambda x, u: x + 1 * u, id="scaled"),
])
def test_every_other_use_of_the_product_is_eager(use):
    chunks, eager = modulation()
    x, y = noise(BATCH, 5, WIDTH, seed=1), noise(BATCH, 5, WIDTH, seed=2)
    bits_equal(real(use(x.clone(), y * chunks[2])), use(x.clone(), y * eager[2]))


@pytest.mark.parametrize("shape, dtype", [((BATCH, 1, WIDTH), torch.bfloat16), ((WIDTH,), torch.bfloat16), ((BATCH, 5, WIDTH), torch.float32), ((1, 5, WIDTH), torch.bfloat16), ((3, BATCH, 5, WIDTH), torch.bfloat16)], ids=str)
def test_operands_that_broadcast_or_differ_in_dtype_are_added_as_torch_adds_them(shape, dtype):
    chunks, eager = modulation()
    y = noise(*shape, seed=2, dtype=dtype)
    for x in (noise(BATCH, 5, WIDTH, seed=1), noise(BATCH, 5, WIDTH, seed=1, dtype=torch.float32)):
        wanted, got = x + y * eager[2], x + y * chunks[2]
        assert got.dtype == wanted.dtype and torch.equal(got, wanted)


def test_a_gate_that_was_written_to_is_used_as_written(fused):
    chunks, eager = modulation()
    x, y = noise(BATCH, 5, WIDTH, seed=1), noise(BATCH, 5, WIDTH, seed=2)
    chunks[2].mul_(3)  # a view of the Modulation's output, as core's chunk is
    bits_equal(x + y * chunks[2], x + y * eager[2])
    product = y * chunks[2]
    product[:, :2] = 0
    wanted = y * eager[2]
    wanted[:, :2] = 0
    bits_equal(x + product, x + wanted)


# --- addcmul(shift, norm(x), 1 + scale) ---


@pytest.mark.parametrize("call", [lambda a, n, s: torch.addcmul(a, n, s), lambda a, n, s: torch.addcmul(a, n, s, value=1), lambda a, n, s: real(a).addcmul(n, s)], ids=["addcmul", "value=1", "method"])
@pytest.mark.parametrize("plus", [lambda s: 1 + s, lambda s: s + 1, lambda s: 1.0 + s, lambda s: 2 + s, lambda s: torch.add(s, 1), lambda s: s], ids=["1 + s", "s + 1", "1.0 + s", "2 + s", "add(s, 1)", "s"])
def test_the_modulated_norm_is_one_operation(fused, plus, call):
    chunks, eager = modulation()
    x = noise(BATCH, 5, WIDTH, seed=1)
    got = call(chunks[0], Norm(x, NORM), plus(chunks[1]))
    bits_equal(got, torch.addcmul(eager[0], NORM(x), plus(eager[1])))
    assert type(got) is torch.Tensor and fused == ["layer_norm_modulate"]


@pytest.mark.parametrize("plus, kind", [(lambda s: 1 + s, OnePlus), (lambda s: s + 1, OnePlus), (lambda s: 1.0 + s, torch.Tensor), (lambda s: True + s, torch.Tensor), (lambda s: torch.add(s, 1, alpha=3), torch.Tensor)])
def test_only_an_integer_one_waits(plus, kind):
    assert type(plus(modulation()[0][1])) is kind


@pytest.mark.parametrize("use", [
    pytest.param(lambda a, n, s: torch.addcmul(a, n, s, value=2), id="value=2"), pytest.param(lambda a, n, s: torch.addcmul(a, s, n), id="swapped"), pytest.param(lambda a, n, s: n * s + a, id="written out"),
    pytest.param(lambda a, n, s: torch.addcmul(n, a, s), id="norm is added"), pytest.param(lambda a, n, s: torch.addcmul(a, n, n), id="norm squared"), pytest.param(lambda a, n, s: n, id="alone"),
    pytest.param(lambda a, n, s: torch.addcmul(a[:, 0], n, s), id="shift without its axis"), pytest.param(lambda a, n, s: torch.addcmul(a, n, s[..., :1]), id="one scale for all"),
])
def test_every_other_use_of_the_norm_is_eager(use):
    chunks, eager = modulation(batch=1)
    x = noise(1, 5, WIDTH, seed=1)
    bits_equal(real(use(chunks[0], Norm(x, NORM), 1 + chunks[1])), use(eager[0], NORM(x), 1 + eager[1]))


def test_a_norm_or_scale_that_was_written_to_is_used_as_written():
    chunks, eager = modulation()
    x = noise(BATCH, 5, WIDTH, seed=1)
    norm, wanted = Norm(x, NORM), NORM(x)
    norm[:, 1:3] *= 2
    wanted[:, 1:3] *= 2
    plus, wanted_plus = 1 + chunks[1], 1 + eager[1]
    plus[:1] = 0
    wanted_plus[:1] = 0
    bits_equal(torch.addcmul(chunks[0], norm, plus), torch.addcmul(eager[0], wanted, wanted_plus))


@pytest.mark.parametrize("module", [
    pytest.param(torch.nn.LayerNorm(WIDTH, eps=1e-5, elementwise_affine=False), id="another eps"), pytest.param(torch.nn.LayerNorm(WIDTH, dtype=torch.bfloat16, device=DEVICE), id="with weights"),
    pytest.param(torch.nn.LayerNorm((5, WIDTH), elementwise_affine=False), id="over tokens too"),
])
def test_another_norm_gives_its_own_result(module):
    chunks, eager = modulation()
    x = noise(BATCH, 5, WIDTH, seed=1)
    bits_equal(torch.addcmul(chunks[0], Norm(x, module), 1 + chunks[1]), torch.addcmul(eager[0], module(x), 1 + eager[1]))


# --- cat((attention, gelu(mlp)), 2) ---


@pytest.mark.parametrize("dim, count", [(2, 1), (-1, 1)])
def test_gelu_and_concat_are_one_operation(fused, dim, count):
    base, attention = noise(BATCH, 5, 3 * WIDTH + 64), noise(BATCH, 5, WIDTH, seed=3)
    mlp = base[..., 3 * WIDTH:]
    got = torch.cat((attention, Gelu(Columns(base, 3 * WIDTH, 64, False), GELU)), dim)
    bits_equal(got, torch.cat((attention, F.gelu(mlp, approximate="tanh")), 2))
    assert fused == ["gelu_concat"] * count and type(got) is torch.Tensor


@pytest.mark.parametrize("use", [lambda a, g: torch.cat((g, a), 2), lambda a, g: torch.cat((a, g), 1), lambda a, g: torch.cat((a, g, a), 2), lambda a, g: torch.cat((g, g), 2), lambda a, g: a + g, lambda a, g: torch.stack((a, g))],
                         ids=["gelu first", "over tokens", "three", "twice", "sum", "stack"])
def test_every_other_use_of_gelu_is_eager(use, fused):
    x, attention = noise(BATCH, 5, WIDTH), noise(BATCH, 5, WIDTH, seed=3)
    bits_equal(use(attention, Gelu(x, GELU)), use(attention, F.gelu(x, approximate="tanh")))
    assert fused == []


# --- memory ---


def test_a_fused_use_lets_go_of_its_operands_at_once():
    chunks, _ = modulation()
    x, y = noise(BATCH, 5, WIDTH, seed=1), noise(BATCH, 5, WIDTH, seed=2)
    gc.collect()
    gc.disable()
    try:
        alive = [weakref.ref(t) for t in (y, chunks[0].slice.base)]
        x += y * chunks[2]
        norm = Norm(x.clone(), NORM)
        alive.append(weakref.ref(norm.x))
        torch.addcmul(chunks[0], norm, 1 + chunks[1])
        del y, chunks, norm, _
        assert [a() for a in alive] == [None] * 3
    finally:
        gc.enable()


def test_a_gated_value_is_made_only_of_a_plain_tensor_and_a_chunk():
    chunks, _ = modulation()
    y = noise(BATCH, 5, WIDTH)
    assert type(y * chunks[0]) is Gated and type(chunks[0] * y) is Gated
    for other in (chunks[1] * chunks[0], 2 * chunks[0], torch.nn.Parameter(y, requires_grad=False) * chunks[0]):
        assert type(other) is not Gated
