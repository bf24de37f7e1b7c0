"""Kind A: a run that is cancelled, fails, or loses its memory in the middle leaves the model as it was."""
import comfy_harness as harness
import pytest
import torch
from comfy_harness import assert_bits_equal

pytestmark = pytest.mark.comfyui


def stopper(scene, stage, error):
    """(patched model, undo): a model whose second call fails at `stage`."""
    count = [0]

    def fail_in_second(*args, **kwargs):
        count[0] += 1
        if count[0] == 2:
            raise error

    def patch(model):
        model = model.clone()
        if stage == "block patch":
            def replace(args, extra):
                out = extra["original_block"](args)
                fail_in_second()
                return out
            model.set_model_patch_replace(replace, "dit", "single_block", 1)
        elif stage in ("diffusion_model", "apply_model", "outer_sample"):
            def wrapper(executor, *args, **kwargs):
                if stage == "outer_sample":
                    raise error
                out = executor(*args, **kwargs)
                fail_in_second()
                return out
            model.add_wrapper_with_key(stage, "stopper", wrapper)
        return model

    hooks = []
    if "." in stage:
        def hook(model):
            hooks.append(model.model.diffusion_model.get_submodule(stage).register_forward_pre_hook(fail_in_second))
        return patch, hook, hooks
    return patch, lambda model: None, hooks


STAGES = ["block patch", "diffusion_model", "apply_model", "outer_sample", "double_blocks.1.img_attn.proj", "single_blocks.0.modulation.lin", "final_layer.linear"]


@pytest.mark.parametrize("stage, kind", [*((stage, "interrupt") for stage in STAGES), ("block patch", "error"), ("final_layer.linear", "error"), ("single_blocks.0.modulation.lin", "out of memory"), ("diffusion_model", "out of memory"),
                                         ("double_blocks.1.img_attn.proj", "keyboard")])
def test_a_run_that_does_not_end_leaves_the_next_ones_alone(scene, stage, kind):
    """B11, S8"""
    mm = scene.core.comfy.model_management
    error = {"interrupt": mm.InterruptProcessingException(), "error": ValueError("a node failed"), "out of memory": torch.OutOfMemoryError("no room"), "keyboard": KeyboardInterrupt()}[kind]
    model = scene.load()
    wanted, before = scene.sample(model), harness.snapshot(model)
    patch, hook, hooks = stopper(scene, stage, error)
    mine = patch(scene.ours(model))
    hook(model)
    with pytest.raises(type(error)):
        scene.sample(mine, steps=3)
    for handle in hooks:
        handle.remove()
    if kind == "out of memory":
        mm.unload_all_models()  # as core's execution does
    harness.assert_untouched(model, before)
    if stage != "outer_sample":
        assert scene.report(mine)["outcome"] == ("interrupted" if kind in ("interrupt", "keyboard") else "error")
    for again in (model, scene.ours(model), model):
        assert_bits_equal(scene.sample(again), wanted)


def test_cancelling_between_steps_says_interrupted(scene, monkeypatch):
    """B11: from the sampler's callback, where core looks for the button."""
    import latent_preview
    mm = scene.core.comfy.model_management
    model = scene.load()
    wanted, mine = scene.sample(model), scene.ours(model)

    def callback(step, x0, x, total):
        harness.assert_untouched(model)
        raise mm.InterruptProcessingException

    with monkeypatch.context() as patch:
        patch.setattr(latent_preview, "prepare_callback", lambda *args, **kwargs: callback)
        with pytest.raises(mm.InterruptProcessingException):
            scene.sample(mine)
    told = scene.report(mine)
    assert (told["outcome"], told["steps"], told["state"]) == ("interrupted", 1, "fused") and "interrupted" in told["text"]
    for again in (model, mine, model):
        assert_bits_equal(scene.sample(again), wanted)


def test_cancelling_with_cores_own_flag(scene):
    """B11: the button sets a flag; core raises at the next operation that looks at it."""
    mm = scene.core.comfy.model_management
    model = scene.load()
    wanted = scene.sample(model)
    mine = scene.ours(model)

    def replace(args, extra):
        mm.interrupt_current_processing(True)
        mm.throw_exception_if_processing_interrupted()

    stopped = mine.clone()
    stopped.set_model_patch_replace(replace, "dit", "double_block", 1)
    with pytest.raises(mm.InterruptProcessingException):
        scene.sample(stopped)
    mm.interrupt_current_processing(False)
    assert scene.report(stopped)["outcome"] == "interrupted"
    for again in (model, mine):
        assert_bits_equal(scene.sample(again), wanted)


def test_unloading_while_mounted_is_what_it_is_without_us(scene):
    """A custom node may free memory from inside a block patch."""
    mm = scene.core.comfy.model_management

    def unloading(model):
        model = model.clone()

        def replace(args, extra):
            out = extra["original_block"](args)
            mm.unload_all_models()
            mm.soft_empty_cache()
            return out

        model.set_model_patch_replace(replace, "dit", "double_block", 0)
        return model

    if torch.cuda.is_available():
        pytest.skip("core itself cannot go on after its weights left the device")
    model = scene.load()
    scene.same(unloading(model))
