"""A pending value is either used by a fused operation or is, to the last bit, the tensor that core would have made. No ComfyUI, any device."""
import copy
import gc
import operator
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from flux_fast_path.fusion import pending
from flux_fast_path.fusion.high import MlpColumns, SplitProjection, UpProjection
from flux_fast_path.fusion.pending import real
from flux_fast_path.fusion.sites import Shared
from flux_fast_path.fusion.values import Chunk, Columns, Gated, Gelu, Head, Heads, JoinedHeads, Norm, NormedHead, OnePlus
from fusion_scene import DEVICE, noise
from op_cases import bits_equal

pytestmark = pytest.mark.usefixtures("one_thread", "inference")

BATCH, TOKENS, HEADS, DIM = 2, 6, 2, 64
WIDTH = HEADS * DIM
NORM, GELU, RMS = torch.nn.LayerNorm(WIDTH, eps=1e-6, elementwise_affine=False), torch.nn.GELU(approximate="tanh"), torch.nn.RMSNorm(DIM)
RMS = RMS.to(DEVICE, torch.bfloat16).requires_grad_(False)
LINEAR = torch.nn.Linear(WIDTH, 3 * WIDTH + 32, device=DEVICE, dtype=torch.bfloat16).requires_grad_(False)


def wide(seed=0):
    """A Modulation's output, [B, 1, 6 D]."""
    return noise(BATCH, 1, 6 * WIDTH, seed=seed)


def projection(seed=1, tokens=TOKENS):
    return noise(BATCH, tokens, 3 * WIDTH + 32, seed=seed)


def view_of_head(base, start):
    return base[:, :, start:start + WIDTH].view(BATCH, -1, HEADS, DIM).transpose(1, 2)


def normed(base, start=0):
    head = Head(base, start, HEADS, DIM)
    return NormedHead(head, RMS, Head(base, 2 * WIDTH, HEADS, DIM), Shared(None), (Head(base, WIDTH, HEADS, DIM), RMS))


def split_projection():
    """Tier "high": a projection whose q, k, v and activated MLP part are computed apart. Anything but core's own use of it is the Linear."""
    return SplitProjection(noise(BATCH, TOKENS, WIDTH), LINEAR, noise(BATCH, TOKENS, 3 * WIDTH, seed=7), noise(BATCH, TOKENS, WIDTH + 32, seed=8), WIDTH, True)


# name -> (pending value, the tensor core has there); made anew for each test, since some tests write
SUBJECTS = {
    "chunk": lambda: (Chunk(wide(), WIDTH, WIDTH), wide().chunk(6, -1)[1]),
    "one-plus": lambda: (OnePlus(Chunk(wide(), WIDTH, WIDTH)), 1 + wide().chunk(6, -1)[1]),
    "gated": lambda: (Gated(noise(BATCH, TOKENS, WIDTH), Chunk(wide(), 0, WIDTH)), noise(BATCH, TOKENS, WIDTH) * wide().chunk(6, -1)[0]),
    "norm": lambda: (Norm(noise(BATCH, TOKENS, WIDTH), NORM), NORM(noise(BATCH, TOKENS, WIDTH))),
    "gelu": lambda: (Gelu(Columns(projection(), 3 * WIDTH, 32, False), GELU), F.gelu(projection()[..., 3 * WIDTH:], approximate="tanh")),
    "gelu-of-a-tensor": lambda: (Gelu(projection(), GELU), F.gelu(projection(), approximate="tanh")),
    "projection": lambda: (Columns(projection(), 0, 3 * WIDTH + 32, False), projection()),
    "columns": lambda: (Columns(projection(), 0, 3 * WIDTH, True), projection()[..., :3 * WIDTH]),
    "heads": lambda: (Heads(Columns(projection(), 0, 3 * WIDTH, True), HEADS, DIM), projection()[..., :3 * WIDTH].view(BATCH, TOKENS, 3, HEADS, DIM)),
    "head": lambda: (Head(projection(), WIDTH, HEADS, DIM), view_of_head(projection(), WIDTH)),
    "normed-head": lambda: (normed(projection()), RMS(view_of_head(projection(), 0))),
    "joined-heads": lambda: (JoinedHeads((normed(projection(2, 3)), normed(projection()))),
                             torch.cat((RMS(view_of_head(projection(2, 3), 0)), RMS(view_of_head(projection(), 0))), dim=2)),
}

SUBJECTS["up-projection"] = lambda: (UpProjection(noise(BATCH, TOKENS, WIDTH), LINEAR), LINEAR(noise(BATCH, TOKENS, WIDTH)))
SUBJECTS["split-projection"] = lambda: (split_projection(), LINEAR(noise(BATCH, TOKENS, WIDTH)))
SUBJECTS["mlp-columns"] = lambda: (MlpColumns(split_projection()), LINEAR(noise(BATCH, TOKENS, WIDTH))[..., 3 * WIDTH:])

# Uses that are in no table: the result must be the eager one, bit for bit.
USES = {
    "1 + t": lambda t: 1 + t, "t + 1": lambda t: t + 1, "1.0 + t": lambda t: 1.0 + t, "2 + t": lambda t: 2 + t, "True + t": lambda t: True + t,
    "add alpha": lambda t: torch.add(t, 1, alpha=2), "1 - t": lambda t: 1 - t, "t - 1": lambda t: t - 1, "3 * t": lambda t: 3 * t, "t * t": lambda t: t * t,
    "t / 2": lambda t: t / 2, "2 / t": lambda t: 2 / t, "t ** 2": lambda t: t ** 2, "2 ** t": lambda t: 2 ** t, "t % 3": lambda t: t % 3, "t // 3": lambda t: t // 3,
    "-t": operator.neg, "abs": abs, "t < 0": lambda t: t < 0, "0 >= t": lambda t: 0 >= t, "t == t": lambda t: t == t, "t != 1": lambda t: t != 1,
    "t @ t.mT": lambda t: t @ t.mT, "tensor @ t": lambda t: torch.ones(t.shape[-2], t.shape[-2], dtype=t.dtype, device=t.device) @ t,
    "tensor - t": lambda t: torch.ones(t.shape, dtype=t.dtype, device=t.device) - t, "xor": lambda t: (t > 0) ^ (t < 0),
    "t[:1]": lambda t: t[:1], "t[..., 3:5]": lambda t: t[..., 3:5], "t[None]": lambda t: t[None], "t[mask]": lambda t: t[t > 0], "len": len,
    "iterate": lambda t: [row for row in t][-1], "unpack": lambda t: (lambda *rows: rows[0])(*t), "float": lambda t: float(t[(0,) * t.ndim]),
    "bool": lambda t: bool(t.sum() > 0), "in": lambda t: 123.0 in t, "numpy": lambda t: t.float().cpu().numpy().sum().item(), "tolist": lambda t: t.tolist(),
    "view": lambda t: t.reshape(-1).view(-1), "permute": lambda t: t.permute(*reversed(range(t.ndim))), "transpose": lambda t: t.transpose(-1, -2),
    "split": lambda t: torch.split(t, 1, dim=0)[0], "split sizes": lambda t: torch.split(t, [1, 1], 0)[1],
    "torch.chunk": lambda t: torch.chunk(t, 2, dim=-1)[0], "unbind": lambda t: t.unbind(0)[1], "stack": lambda t: torch.stack([t, t]),
    "cat dim 0": lambda t: torch.cat((t, t), 0), "cat last": lambda t: torch.cat((t, t), -1), "cat three": lambda t: torch.cat((t, t, t), 2),
    "cat one": lambda t: torch.cat([t], dim=1), "cat mixed": lambda t: torch.cat((t, torch.zeros_like(t)), 2), "cat mixed, other side": lambda t: torch.cat((torch.zeros_like(t), t), 2),
    "concat": lambda t: torch.concat((t, t), dim=2), "addcmul": lambda t: torch.addcmul(t, t, t), "addcmul value": lambda t: torch.addcmul(t, t, t, value=2),
    "silu": F.silu, "nan_to_num": torch.nan_to_num, "einsum": lambda t: torch.einsum("...i->...", t), "where": lambda t: torch.where(t > 0, t, 0),
    "softmax": lambda t: t.softmax(-1), "to": lambda t: t.to(torch.float32), "type_as": lambda t: t.type_as(torch.ones((), dtype=torch.float64)),
    "clone": lambda t: t.clone(), "contiguous": lambda t: t.contiguous(), "ones_like": torch.ones_like, "new_zeros": lambda t: t.new_zeros(2), "out": lambda t: torch.neg(t.clone(), out=t.clone()),
    "shape": lambda t: tuple(t.shape), "dtype": lambda t: t.dtype, "device": lambda t: t.device, "ndim": lambda t: t.ndim, "stride": lambda t: t.stride(),
    "size": lambda t: t.size(-1), "numel": lambda t: t.numel(), "is_contiguous": lambda t: t.is_contiguous(), "missing attribute": lambda t: getattr(t, "no_such_thing", None),
    "deepcopy": copy.deepcopy, "in a list": lambda t: torch.stack([[t, t][0], t])[0], "keyword": lambda t: torch.sum(input=t, dim=0),
    "sum()": lambda t: sum([t, t]), "other.copy_": lambda t: torch.zeros(t.shape, dtype=t.dtype, device=t.device).copy_(t), "other.add_": lambda t: torch.ones_like(t).add_(t),
    "other[...] =": lambda t: operator.setitem(torch.ones_like(t), ..., t), "index with": lambda t: torch.arange(9, device=t.device)[t.long() % 5],
    "format": lambda t: f"{t.float().sum().item():.3f}",
}
if not torch.cuda.is_available():  # from a GPU, torch.as_tensor takes nothing but a tensor in bfloat16: numpy has no such type
    USES["as_tensor"] = torch.as_tensor
IN_PLACE = {
    "+=": operator.iadd, "-=": operator.isub, "*=": operator.imul, "/=": operator.itruediv, "t.mul_": lambda t, v: t.mul_(v), "t.add_ tensor": lambda t, v: t.add_(torch.full_like(t, v)),
    "t[0] =": lambda t, v: operator.setitem(t, 0, v), "t[..., 1:3] *=": lambda t, v: operator.setitem(t, (..., slice(1, 3)), t[..., 1:3] * v), "t.zero_": lambda t, v: t.zero_(),
}
# What only a real tensor could do at some time.
TENSOR_LIKE = {
    "+t": operator.pos, "3 % t": lambda t: 3 % t, "3 // t": lambda t: 3 // t, "reversed": reversed, "setattr": lambda t: (setattr(t, "tag", 1), t.tag)[1],
    "**=": lambda t: (operator.ipow(t, 2), t + 0)[1], "t.chunk": lambda t: t.chunk(2, -1)[1], "t.dim": lambda t: t.dim(), "t.split": lambda t: t.split(1, 0)[0],
    "copy": lambda t: copy.copy(t) + 0, "pickle": lambda t: pickle.loads(pickle.dumps(t)) + 0,
}


def same(got, want):
    if isinstance(want, torch.Tensor):
        got = real(got)
        assert type(got) is torch.Tensor
        assert got.dtype == want.dtype and got.shape == want.shape and got.stride() == want.stride()
        if want.dtype in (torch.bfloat16, torch.float16):
            return bits_equal(got, want)
        return bits_equal(got, want) if want.dtype == torch.bool else torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert got == want and type(got) is type(want)


@pytest.mark.parametrize("use", [pytest.param(use, id=name) for name, use in USES.items()])
@pytest.mark.parametrize("subject", SUBJECTS)
def test_any_other_use_gives_exactly_what_the_tensor_would(subject, use):
    value, eager = SUBJECTS[subject]()
    same(use(value), use(eager))


@pytest.mark.parametrize("use", TENSOR_LIKE)
def test_it_does_what_only_a_tensor_can(use):
    for make in SUBJECTS.values():
        value, eager = make()
        same(TENSOR_LIKE[use](value), TENSOR_LIKE[use](eager))


@pytest.mark.parametrize("use", IN_PLACE.values(), ids=list(IN_PLACE))
@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_write_is_seen_by_every_later_use(subject, use):
    value, eager = SUBJECTS[subject]()
    alias, eager_alias = value, eager
    same(use(value, 2), use(eager, 2))
    same(alias + 0, eager_alias + 0)
    assert not alias.fresh


@pytest.mark.parametrize("subject", SUBJECTS)
def test_it_materialises_once_however_often_it_is_used(subject, monkeypatch):
    value, eager = SUBJECTS[subject]()
    runs, compute = [], type(value)._eager
    monkeypatch.setattr(type(value), "_eager", lambda self: runs.append(self) or compute(self))
    for _ in range(3):
        same(value.clone(), eager.clone())
        same(torch.neg(value), torch.neg(eager))
    assert runs.count(value) == 1 and value.materialise() is value.materialise()


@pytest.mark.parametrize("subject", SUBJECTS)
def test_errors_are_those_of_the_tensor(subject):
    value, eager = SUBJECTS[subject]()
    for use in (lambda t: t.view(7, 11, 13), lambda t: t @ torch.ones(3, dtype=t.dtype, device=t.device), bool, lambda t: t.no_such_thing, lambda t: torch.cat((t, t[..., :1]), 0)):
        with pytest.raises((RuntimeError, AttributeError)) as wanted:
            use(eager)
        with pytest.raises(wanted.type):
            use(value)


def test_no_field_hides_an_attribute_of_a_tensor():
    deliberate = {"shape", "view", "permute"}  # each answers as the tensor would, see below
    hidden = [f"{c.__name__}.{name}" for c in (pending.Pending, *pending.Pending.__subclasses__()) for name in vars(c)
              if not name.startswith("_") and name not in deliberate and hasattr(torch.Tensor, name)]
    assert not hidden


@pytest.mark.parametrize("subject", SUBJECTS)
def test_repr_says_what_it_is_without_running_it(subject):
    value, _ = SUBJECTS[subject]()
    assert "not run yet" in repr(value) and value.fresh and isinstance(hash(value), int)
    value.materialise()
    assert "materialised" in repr(value)


@pytest.mark.parametrize("subject", ["norm", "gated", "gelu-of-a-tensor", "chunk", "columns"])
def test_a_materialised_value_keeps_no_more_memory_than_core_would(subject):
    value, _ = SUBJECTS[subject]()
    operand = {"norm": lambda v: v.x, "gated": lambda v: v.y, "gelu-of-a-tensor": lambda v: v.x}.get(subject)
    alive = weakref.ref(operand(value)) if operand else None
    value.materialise()
    assert alive is None or alive() is None


@pytest.mark.parametrize("subject", SUBJECTS)
def test_nothing_waits_for_the_garbage_collector(subject):
    value, _ = SUBJECTS[subject]()
    gc.collect()
    gc.disable()
    try:
        value.clone()
        alive = weakref.ref(value), weakref.ref(value.materialise())
        del value
        assert [a() for a in alive] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("use", [
    pytest.param(lambda c: c.view(BATCH, TOKENS, 3 * HEADS, DIM), id="four dimensions"), pytest.param(lambda c: c.view((BATCH, TOKENS, 3, HEADS, -1)), id="a tuple"),
    pytest.param(lambda c: c.view(BATCH, TOKENS, 3, -1, DIM), id="heads inferred"), pytest.param(lambda c: c.view(BATCH, TOKENS, HEADS, 3, -1), id="heads before three"),
    pytest.param(lambda c: c.view(-1, TOKENS, 3, HEADS, DIM), id="batch inferred"), pytest.param(lambda c: c.view(torch.int16), id="a dtype"),
    pytest.param(lambda c: c.view(BATCH, TOKENS, 3, HEADS, -1).permute(0, 2, 3, 1, 4), id="another permutation"),
    pytest.param(lambda c: c.view(BATCH, TOKENS, 3, HEADS, -1).permute((2, 0, 3, 1, 4)), id="permutation as a tuple"),
    pytest.param(lambda c: c.view(BATCH, TOKENS, 3, HEADS, -1).permute(2, 0, 3, 1, 4)[1], id="indexed instead of unpacked"),
    pytest.param(lambda c: c.view(BATCH, TOKENS, 3, HEADS, -1).unbind(2)[2], id="unbound"), pytest.param(lambda c: c.view(BATCH, TOKENS, 3, HEADS, -1)[:, :, 0], id="sliced"),
    pytest.param(lambda c: next(iter(c.view(BATCH, TOKENS, 3, HEADS, -1))), id="iterated before the permute"), pytest.param(lambda c: c.reshape(BATCH, TOKENS, 3, HEADS, -1), id="reshape"),
    pytest.param(lambda c: torch.split(c, [WIDTH, 2 * WIDTH], -1)[1] + 0, id="split in two"), pytest.param(lambda c: torch.split(c, WIDTH, -1)[1] + 0, id="split by size"),
    pytest.param(lambda c: torch.split(c, [1, TOKENS - 1], 1)[1] + 0, id="split over tokens"), pytest.param(lambda c: c.split([WIDTH, 2 * WIDTH], -1)[0] + 0, id="split as a method"),
    pytest.param(lambda c: torch.split(torch.split(c, [WIDTH, 2 * WIDTH], 2)[1], [8, 2 * WIDTH - 8], 2)[1] + 0, id="split twice"),
])
def test_views_that_are_not_cores_are_plain_views(use):
    same(torch.as_tensor(pending.real(use(Columns(projection(), 0, 3 * WIDTH, True)))), use(projection()[..., :3 * WIDTH]))


@pytest.mark.parametrize("use", [lambda c: torch.split(c, [8, 8], -1), lambda c: c.view(BATCH, TOKENS, 3, HEADS, 5), lambda c: c.view(BATCH, TOKENS, 3, 5, -1)], ids=["sizes", "dim", "heads"])
def test_a_view_or_split_that_does_not_fit_is_the_tensors_error(use):
    with pytest.raises(RuntimeError):
        use(Columns(projection(), 0, 3 * WIDTH, True))


@pytest.mark.parametrize("rows", [
    pytest.param(lambda: projection(), id="contiguous"), pytest.param(lambda: projection(tokens=2 * TOKENS)[:, ::2], id="every other token"),
    pytest.param(lambda: projection()[:1].expand(BATCH, -1, -1), id="expanded batch"), pytest.param(lambda: projection().transpose(0, 1).contiguous().transpose(0, 1), id="batch inside"),
    pytest.param(lambda: projection().mT.contiguous().mT, id="transposed"),
])
def test_heads_are_cores_views_of_any_layout(rows):
    base = rows()
    got = Columns(base, 0, base.shape[-1], True)
    got = torch.split(got, [3 * WIDTH, 32], -1)[0].view(BATCH, TOKENS, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    for head, want in zip(got, base[..., :3 * WIDTH].view(BATCH, TOKENS, 3, HEADS, -1).permute(2, 0, 3, 1, 4)):
        assert type(head) is Head and head.shape == want.shape
        same(head.materialise(), want)
