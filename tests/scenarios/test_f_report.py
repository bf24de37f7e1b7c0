"""Kind F: what the report says of runs that are not the usual one: caches, refusals in mid-call, cancelled steps, calls without the sampler."""
import pytest
import torch
from comfy_harness import assert_bits_equal
from flux_fast_path.fusion import session
from flux_fast_path.kernels import proof

pytestmark = pytest.mark.comfyui


def test_steps_that_a_cache_answered_are_no_steps_of_another_pack(scene):
    """B05, B23: EasyCache-like packs answer most calls themselves."""
    model, kept = scene.load(), []

    def cached(executor, *args, **kwargs):
        if len(kept) % 4:
            kept.append(kept[-1])
        else:
            kept.append(executor(*args, **kwargs))
        return kept[-1]

    other, mine = scene.wrapped(model, cached), scene.wrapped(scene.ours(model), cached)
    wanted = scene.sample(other, steps=8)
    kept.clear()
    assert_bits_equal(scene.sample(mine, steps=8), wanted)
    told = scene.report(mine)
    assert told["state"] == "fused" and told["steps"] == 8 and told["blocks_mounted"] == 5
    assert any(note.startswith("6 of 8 model calls ran no block") for note in told["notes"]), told["notes"]


@pytest.mark.parametrize("node", ["EasyCacheNode", "LazyCacheNode"])
def test_cores_own_caches_answer_as_often_as_without_us(scene, node):
    """B05: in both orders; LazyCache answers before the model is called, so those steps are none of the model's."""
    caches = pytest.importorskip("comfy_extras.nodes_easycache", reason="this core has no EasyCache, or its nodes are not here")

    def cached(model):
        return getattr(caches, node).execute(model, 5.0, 0.0, 1.0, False).result[0]

    model = scene.load()
    plain, wanted = scene.sample(model, steps=8), scene.sample(cached(model), steps=8)
    assert not torch.equal(wanted, plain), "nothing was cached, so the test proves nothing"
    for mine in (scene.ours(cached(model)), cached(scene.ours(model))):
        assert_bits_equal(scene.sample(mine, steps=8), wanted)
        told = scene.report(mine)
        skipped = sum(int(note.split()[0]) for note in told["notes"] if "ran no block" in note)
        assert told["state"] == "fused" and told["blocks_mounted"] == 5
        assert scene.calls["residual_gate"] == 11 * (told["steps"] - skipped) < 11 * 8


def test_what_was_refused_in_mid_call_is_the_reason(scene):
    """B03: every block was asked, and every one ran as core runs it."""
    model = scene.load()

    def under_autocast(executor, *args, **kwargs):
        with torch.autocast("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16):
            return executor(*args, **kwargs)

    if scene.core.version < (0, 4):
        pytest.skip("this core does not run under autocast")
    other, mine = scene.wrapped(model, under_autocast), scene.wrapped(scene.ours(model), under_autocast)
    assert_bits_equal(scene.sample(mine), scene.sample(other))
    told = scene.report(mine)
    assert told["state"] == "stepped_aside" and "autocast" in told["reason"] and "cache" not in told["text"]
    assert not scene.calls["layer_norm_modulate"], "nor did the layer after the blocks"


@pytest.mark.parametrize("block, step", [("double_blocks.0", 1), ("single_blocks.2", 2), ("single_blocks.0", 3)])
def test_what_a_step_saves_does_not_depend_on_when_the_run_was_cancelled(scene, monkeypatch, block, step):
    """B11: the milliseconds are those of a whole step, however far the last one came."""
    model = scene.load()

    class Timed(proof.Plan):
        """A plan that says it saves 1 ms a launch, and counts each as one."""

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.fused, self.eager_us, self.fused_us = True, 1000.0, 0.0

    monkeypatch.setattr(proof, "Plan", Timed)
    [op.plans.clear() for op in proof.REGISTRY.values()]
    try:
        whole = scene.ours(model)
        scene.sample(whole, steps=4)
        mine, seen = scene.ours(model), []

        def cancel(module, args):
            seen.append(module)
            if len(seen) == step:
                raise scene.core.comfy.model_management.InterruptProcessingException

        with model.model.diffusion_model.get_submodule(block).register_forward_pre_hook(cancel), pytest.raises(scene.core.comfy.model_management.InterruptProcessingException):
            scene.sample(mine, steps=4)
        told, usual = scene.report(mine), scene.report(whole)["saved_ms_per_step"]
        assert told["outcome"] == "interrupted" and told["steps"] == step
        assert told["saved_ms_per_step"] is None or 0.6 * usual < told["saved_ms_per_step"] < 1.4 * usual, (told["saved_ms_per_step"], usual)
    finally:
        [op.plans.clear() for op in proof.REGISTRY.values()]


def test_an_interrupt_in_a_call_without_the_sampler_is_one(scene):
    """B11"""
    model = scene.load()
    mine = scene.ours(model)
    application = mine.wrappers[session.APPLY_MODEL][session.KEY][0].__self__

    def interrupted(*args, **kwargs):
        raise scene.core.comfy.model_management.InterruptProcessingException

    interrupted.class_obj = model.model
    with pytest.raises(scene.core.comfy.model_management.InterruptProcessingException), torch.inference_mode():
        application.apply_model(interrupted, torch.zeros(1, 16, 8, 8, device=model.load_device), torch.ones(1), transformer_options={})
    assert scene.report(mine)["outcome"] == "interrupted"
