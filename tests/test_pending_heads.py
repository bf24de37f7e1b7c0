"""Joins and rotations of attention heads: one fused operation each where core's code is recognised. No ComfyUI, any device."""
import pytest
import torch
from flux_fast_path.fusion import table
from flux_fast_path.fusion.pending import TABLE
from flux_fast_path.fusion.sites import Shared
from flux_fast_path.fusion.values import Head, JoinedHeads, NormedHead
from fusion_scene import DEVICE, noise
from op_cases import bits_equal, eager_rope, eager_rope_pair
from torch.overrides import handle_torch_function, has_torch_function

pytestmark = pytest.mark.usefixtures("inference")
BATCH, HEADS, DIM = 2, 2, 64
WIDTH = HEADS * DIM
RMS = [torch.nn.RMSNorm(DIM, device=DEVICE, dtype=torch.bfloat16).requires_grad_(False) for _ in range(2)]


def heads(base, start):
    return base[:, :, start:start + WIDTH].view(BATCH, -1, HEADS, DIM).transpose(1, 2)


@pytest.mark.parametrize("dim", [2, -2])
def test_heads_of_text_and_image_are_joined_by_one_operation(fused, dim):
    text, image = noise(BATCH, 3, 3 * WIDTH), noise(BATCH, 5, 3 * WIDTH, seed=1)
    got = torch.cat((Head(text, 2 * WIDTH, HEADS, DIM), Head(image, 2 * WIDTH, HEADS, DIM)), dim=dim)
    bits_equal(got, torch.cat((heads(text, 2 * WIDTH), heads(image, 2 * WIDTH)), dim=2))
    assert fused == ["head_concat"]


@pytest.mark.parametrize("use", [lambda a, b: torch.cat((a, b, a), 2), lambda a, b: torch.cat((a, heads(noise(BATCH, 5, 3 * WIDTH, seed=1), 0)), 2), lambda a, b: torch.cat((a[:, :, :2], b[:, :, :2]), 1)], ids=["three", "mixed", "over heads"])
def test_every_other_join_of_heads_is_eager(use, fused):
    text, image = noise(BATCH, 3, 3 * WIDTH), noise(BATCH, 5, 3 * WIDTH, seed=1)
    bits_equal(use(Head(text, 0, HEADS, DIM), Head(image, 0, HEADS, DIM)), use(heads(text, 0), heads(image, 0)))
    assert fused == []


# --- rope(cat(norm(q_text), norm(q_image)), ...) ---


def rope_pair(q, k, pe):
    return handle_torch_function(rope_pair, (q, k, pe), q, k, pe) if has_torch_function((q, k, pe)) else eager_rope_pair(q, k, pe)


def rope_one(x, pe):
    return handle_torch_function(rope_one, (x, pe), x, pe) if has_torch_function((x, pe)) else eager_rope(x, pe)


@pytest.fixture
def known_rope(monkeypatch):
    monkeypatch.setitem(TABLE, rope_pair, None)
    monkeypatch.setitem(TABLE, rope_one, None)
    table.register_rope(rope_pair, True)
    table.register_rope(rope_one, False)


def normed(base, module_of_k=None):
    shared, q, k, v = Shared(None), *(Head(base, i * WIDTH, HEADS, DIM) for i in range(3))
    k_norm = module_of_k or RMS[1]
    return NormedHead(q, RMS[0], v, shared, (k, k_norm)), NormedHead(k, k_norm, v, shared, (q, RMS[0]))


def rotation(tokens):
    return noise(1, 1, tokens, DIM // 2, 2, 2, seed=5, dtype=torch.float32)


@pytest.mark.parametrize("lengths", [(3, 5), (7,)], ids=["joined", "single"])
@pytest.mark.parametrize("rotate, calls", [(rope_pair, 1), (lambda q, k, pe: (rope_one(q, pe), rope_one(k, pe)), 2)], ids=["pair", "one by one"])
def test_a_q_and_k_chain_is_one_operation(known_rope, fused, rotate, calls, lengths):
    bases = [noise(BATCH, n, 3 * WIDTH, seed=n) for n in lengths]
    join = (lambda parts: torch.cat(parts, dim=2)) if len(bases) == 2 else (lambda parts: parts[0])
    q, k = (join(parts) for parts in zip(*map(normed, bases)))
    assert type(q) in (JoinedHeads, NormedHead) and q.shape == (BATCH, HEADS, sum(lengths), DIM)
    wanted = rotate(join([RMS[0](heads(b, 0)) for b in bases]), join([RMS[1](heads(b, WIDTH)) for b in bases]), rotation(sum(lengths)))
    for got, want in zip(rotate(q, k, rotation(sum(lengths))), wanted):
        bits_equal(got, want)
    assert fused == ["qk_norm_rope"] * calls


def test_q_and_k_that_are_not_a_pair_are_rotated_as_tensors(known_rope, fused):
    (q, _), (_, k) = (normed(noise(BATCH, 5, 3 * WIDTH, seed=s)) for s in (1, 2))
    wanted = eager_rope_pair(q.clone(), k.clone(), rotation(5))
    (q, _), (_, k) = (normed(noise(BATCH, 5, 3 * WIDTH, seed=s)) for s in (1, 2))
    for got, want in zip(rope_pair(q, k, rotation(5)), wanted):
        bits_equal(got, want)
    assert fused == []


def test_a_q_that_was_written_to_is_rotated_as_written(known_rope, fused):
    q, k = normed(noise(BATCH, 5, 3 * WIDTH))
    wanted = eager_rope_pair(q.clone() * 2, k.clone(), rotation(5))
    q, k = normed(noise(BATCH, 5, 3 * WIDTH))
    q *= 2
    for got, want in zip(rope_pair(q, k, rotation(5)), wanted):
        bits_equal(got, want)
    assert fused == []
