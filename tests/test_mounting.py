"""Leaves are mounted for one model call and are as they were after it, however it ends; the bits are those of the same call without us."""

import comfy_harness as harness
import pytest
import torch
from comfy_harness import assert_bits_equal
from flux_fast_path.bench.reference_patcher import reference_patcher
from fusion_scene import DEVICE, assert_same, noise, ours, report_of, run

pytestmark = pytest.mark.usefixtures("one_thread")


# --- bits ---


SHAPES = [(1, 64, 64, 16), (2, 72, 104, 33), (3, 40, 56, 7)]


@pytest.mark.parametrize("core", [{}, {"out_of_place": True}, {"old_core": True}], ids=["in-place", "out-of-place", "0.3.64"])
@pytest.mark.parametrize("dtype, shape", [*((torch.bfloat16, s) for s in SHAPES), (torch.float16, SHAPES[2]), (torch.float32, SHAPES[2])], ids=str)
def test_latents_are_bit_identical(fused, shape, core, dtype):
    batch, height, width, text_tokens = shape
    model = reference_patcher("tiny", dtype, DEVICE, **core)
    assert_same(model, batch=batch, height=height, width=width, text_tokens=text_tokens)
    expected = {"residual_gate": 22, "layer_norm_modulate": 24, "gelu_concat": 6, **({} if "old_core" in core else {"head_concat": 4})}
    assert DEVICE == "cuda" and dtype == torch.float32 or {k: fused.count(k) for k in expected} == expected


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("what", ["mask", "modulation_dims", "control", "control-short", "no-guidance", "no-pooled"])
def test_what_conditioning_brings_is_bit_identical(fused, patcher, what, batch):
    mask = torch.zeros(1, 32, 32)
    mask[:, 16:, :9] = -1e4
    assert_same(patcher, batch=batch, **{
        "mask": {"attention_mask": mask.to(DEVICE, torch.bfloat16)}, "modulation_dims": {"modulation_dims": [(0, 9, 0), (9, 16, 1)]},
        "control": {"control": {"input": [noise(batch, 16, 256, seed=3), None], "output": [noise(batch, 16, 256, seed=3)] * 3}},
        "control-short": {"control": {"input": [noise(batch, 5, 256, seed=3)], "output": [None, noise(batch, 7, 256, seed=3)]}},
        "no-guidance": {"guidance": None}, "no-pooled": {"y": None},
    }[what])


def test_a_model_on_a_cpu_steps_aside_and_says_so(patcher):
    if DEVICE == "cuda":
        patcher = reference_patcher("tiny")
    told = assert_same(patcher)
    assert told["state"] == "stepped_aside" and "cpu" in told["reason"] and "Image unaffected" in told["text"] and told["steps"] == 2


# --- restoring ---

STAGES = ["img_in", "double_blocks.0.img_mod.lin", "double_blocks.0.img_attn.proj", "double_blocks.1.txt_mlp.0", "single_blocks.0.modulation.lin", "single_blocks.2.linear2", "final_layer.linear"]


class InterruptProcessingException(BaseException):
    """Named and derived as core's."""


@pytest.mark.parametrize("error, outcome", [(RuntimeError, "error"), (KeyboardInterrupt, "interrupted"), (InterruptProcessingException, "interrupted"), (torch.OutOfMemoryError, "error"), (GeneratorExit, "error")])
@pytest.mark.parametrize("stage", STAGES)
def test_forwards_are_restored_when_a_step_does_not_end(fused, patcher, stage, error, outcome):
    wanted, mine, before = run(patcher), ours(patcher), harness.snapshot(patcher)
    seen = []

    def fail(module, inputs):
        seen.append(module)
        if len(seen) == 2:  # in the second step
            raise error("in mid-step")

    with patcher.model.diffusion_model.get_submodule(stage).register_forward_pre_hook(fail), pytest.raises(error):
        run(mine)
    harness.assert_untouched(patcher, before)
    assert report_of(mine)["outcome"] == outcome and report_of(mine)["steps"] == 2
    for model in (patcher, mine):
        assert_bits_equal(run(model), wanted)
    assert report_of(mine)["outcome"] == "finished"


@pytest.mark.parametrize("leaf", ["double_blocks.1.img_attn.qkv", "single_blocks.1.linear1", "single_blocks.0.mlp_act"])
def test_forwards_are_restored_when_a_mounted_leaf_itself_fails(fused, patcher, leaf):
    module = patcher.model.diffusion_model.get_submodule(leaf)
    original = type(module)

    def forward(self, x):
        raise KeyboardInterrupt

    module.__class__ = type("Failing", (original,), {"forward": forward})
    with pytest.raises(KeyboardInterrupt):
        run(ours(patcher))
    module.__class__ = original
    harness.assert_untouched(patcher)


def test_an_interrupt_between_steps_leaves_nothing(fused, patcher):
    def interrupt(step, *_):
        raise InterruptProcessingException

    mine = ours(patcher)
    with pytest.raises(InterruptProcessingException):
        run(mine, callback=interrupt)
    harness.assert_untouched(patcher)
    assert report_of(mine)["outcome"] == "interrupted" and report_of(mine)["steps"] == 1 and "interrupted" in report_of(mine)["text"]


def test_nothing_is_mounted_between_two_steps(fused, patcher):
    run(ours(patcher), callback=lambda *_: harness.assert_untouched(patcher))
