"""Kind A: the forwards that stand in during our call, as code of others sees, copies, keeps and puts them back; and what core itself leaves there."""
import copy
import gc
import inspect
import io
import types
import weakref

import comfy_harness as harness
import pytest
import torch
from comfy_harness import assert_bits_equal
from flux_fast_path.fusion import mounting

pytestmark = pytest.mark.comfyui

BLOCK, LEAVES = "double_blocks.0", ("double_blocks.0.img_norm1", "single_blocks.0.mlp_act", "double_blocks.1.txt_attn.qkv")


def of_others(told):
    """Notes about other packs; 0.3.64's RMSNorm is core's own and gets one too."""
    return [note for note in told["notes"] if "another pack" in note]


def inside(scene, act, *models):
    """The models with a wrapper of another pack that runs `act(transformer, run)` inside our call."""

    def wrapper(executor, *args, **kwargs):
        return act(executor.class_obj, lambda: executor(*args, **kwargs))

    return [scene.wrapped(model, wrapper) for model in models]


def test_a_stand_in_shows_the_signature_of_cores_forward(scene):
    """B03: packs pass a keyword only where a block takes it."""
    model, seen = scene.load(), []

    def look(transformer, run):
        forward = transformer.get_submodule(BLOCK).forward
        seen.append((inspect.signature(forward), forward.__name__, forward.__self__ is transformer.get_submodule(BLOCK)))
        return run()

    for patched in inside(scene, look, model, scene.ours(model)):
        scene.sample(patched)
    assert seen[0] == seen[-1] and seen[0][2]


def test_a_block_copied_during_our_call_runs_its_own_weights(scene):
    """B01, S7: packs keep a copy to run later, or run it at once."""
    model, kept = scene.load(), []

    def act(transformer, run):
        block = copy.deepcopy(transformer.get_submodule("single_blocks.0"))
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.mul_(0.5)
        kept.append(block)
        return run()

    if scene.core.dynamic_vram and torch.cuda.is_available():
        pytest.skip("core itself cannot have a loaded module copied: its weight pages would be freed twice")
    for patched in inside(scene, act, model, scene.ours(model)):
        scene.sample(patched)
    call = dict(x=torch.randn(1, 6, 256, generator=torch.Generator().manual_seed(1)), vec=torch.ones(1, 256), pe=None)
    with torch.inference_mode():
        without, with_us = (block.to("cpu")(**{k: v if v is None else v.clone().to(block.linear1.weight.dtype) for k, v in call.items()}) for block in (kept[0], kept[-1]))
    assert_bits_equal(with_us, without)


@pytest.mark.parametrize("copied", [copy.copy, lambda block: block._replicate_for_data_parallel()], ids=["copy.copy", "DataParallel"])
def test_a_shallow_copy_made_during_our_call_runs_what_hangs_on_it(scene, copied):
    """B01, S7: it shares the original's forward, but not what was given to it since."""
    model = scene.load()
    plain = scene.sample(model)

    def act(transformer, run):
        blocks, own = transformer.single_blocks, transformer.single_blocks[0]
        other = copied(own)
        other._modules = dict(own._modules)
        other._modules["pre_norm"] = torch.nn.LayerNorm(256, eps=0.5, elementwise_affine=False)
        blocks[0] = other
        try:
            return run()
        finally:
            blocks[0] = own

    other, mine = inside(scene, act, model, scene.ours(model))
    wanted = scene.sample(other)
    assert not torch.equal(wanted, plain)
    assert_bits_equal(scene.sample(mine), wanted)
    assert_bits_equal(scene.sample(scene.ours(model)), plain)


def test_a_copy_that_somebody_keeps_does_not_keep_the_model(scene):
    """B31"""
    if scene.core.dynamic_vram and torch.cuda.is_available():
        pytest.skip("core itself cannot have a loaded module copied: its weight pages would be freed twice")
    model, kept = scene.load_unwatched(), []

    def act(transformer, run):
        kept.append(copy.deepcopy(transformer.get_submodule(BLOCK)))
        return run()

    (mine,) = inside(scene, act, scene.ours(model))
    scene.sample(mine)
    alive = weakref.ref(model.model.diffusion_model.get_submodule(BLOCK).img_norm1)
    model = mine = None
    scene.core.comfy.model_management.unload_all_models()
    gc.collect()
    assert kept and alive() is None


def test_a_block_saved_during_our_call_can_be_read_again(scene):
    """B09: no wrapper object in a file."""
    model, sizes = scene.load(), []

    def save(transformer, run):
        file = io.BytesIO()
        torch.save(transformer.get_submodule(BLOCK).state_dict(), file)
        sizes.append((file.tell(), sorted(transformer.get_submodule(BLOCK).state_dict())))
        return run()

    for patched in inside(scene, save, model, scene.ours(model)):
        scene.sample(patched)
    assert sizes[0] == sizes[-1]


@pytest.mark.parametrize("path", [BLOCK, *LEAVES])
def test_a_forward_that_was_kept_and_put_back_later_goes_at_the_next_call(scene, path):
    """B01, B09: a pack wraps what it finds in our call, and restores it after the run."""
    model = scene.load()
    plain, kept = scene.sample(model), []
    outer = {"double_blocks.0": "img_in", "double_blocks.0.img_norm1": "double_blocks.0.img_mod.lin", "single_blocks.0.mlp_act": "single_blocks.0.linear1",
             "double_blocks.1.txt_attn.qkv": "double_blocks.1.txt_mod.lin"}[path]
    module = model.model.diffusion_model.get_submodule(path)

    def wrap(*_):
        if not kept:
            kept.append(module.forward)
            module.forward = lambda *args, **kwargs: kept[0](*args, **kwargs)

    with model.model.diffusion_model.get_submodule(outer).register_forward_pre_hook(wrap):
        assert_bits_equal(scene.sample(scene.ours(model)), plain)
    module.forward = kept.pop()
    assert_bits_equal(scene.sample(model), plain)
    assert "forward" not in module.__dict__, "called without us, it took itself off"
    mine = scene.ours(model)
    assert_bits_equal(scene.sample(mine), plain)
    assert scene.report(mine)["blocks_mounted"] == 5 and not of_others(scene.report(mine))


@pytest.mark.parametrize("path", [BLOCK, *LEAVES])
def test_the_classes_own_method_on_a_module_is_nothing_of_another_pack(scene, path):
    """B09: core's bypass LoRA, its trainer and its object patches leave it behind."""
    model = scene.load()
    module = model.model.diffusion_model.get_submodule(path)
    scene.same(model)
    full = dict(scene.calls)
    module.forward = types.MethodType(type(module).forward, module)
    left = module.__dict__["forward"]
    mine, wanted = scene.ours(model), scene.sample(model)
    scene.sample(mine)
    assert_bits_equal(scene.sample(mine), wanted)
    told = scene.report(mine)
    assert told["blocks_mounted"] == 5 and not of_others(told) and scene.calls["residual_gate"] == 22 and scene.calls["qk_norm_rope"] >= full.get("qk_norm_rope", 0)
    assert module.__dict__["forward"] is left, "it is there as before"
    del module.forward


def test_a_call_without_the_sampler_is_a_run_of_its_own_and_keeps_nothing(scene):
    """B21, B31: other packs call the model themselves, before and after a run."""
    model = scene.load()
    mine = scene.ours(model)
    scene.sample(mine)
    first = scene.report(mine)
    core = scene.core.comfy
    core.model_management.load_models_gpu([mine])
    device, dtype = mine.load_device, mine.model.get_dtype()
    options = {**mine.model_options["transformer_options"], "wrappers": {kind: {key: list(found) for key, found in keys.items()} for kind, keys in mine.wrappers.items()}}
    call = dict(c_crossattn=torch.zeros(1, 16, harness.CONTEXT_DIM, device=device), y=torch.zeros(1, harness.POOLED_DIM, device=device), guidance=torch.ones(1, device=device))
    mine.pre_run()
    with torch.inference_mode():
        for _ in range(2):
            mine.model.apply_model(torch.zeros(1, 16, 8, 8, device=device, dtype=dtype), torch.full((1,), 0.5, device=device), transformer_options=options, **call)
    mine.cleanup()
    told = scene.report(mine)
    assert told["run"] == first["run"] + 1 and told["steps"] == 2 and told["outcome"] == "finished" and told["state"] == "fused"
    assert first["steps"] == 2 and model.model.diffusion_model not in mounting._plans


def test_a_block_that_another_pack_lends_for_one_run_is_let_go(scene):
    """B31"""
    model = scene.load()
    scene.sample(model)
    blocks = model.model.diffusion_model.single_blocks
    own, lent = blocks[0], copy.copy(blocks[0])
    alive = weakref.ref(lent)
    blocks[0] = lent
    del lent
    scene.sample(scene.ours(model))
    blocks[0] = own
    gc.collect()
    assert alive() is None


def test_what_another_pack_takes_back_after_each_call_costs_no_new_plan(scene):
    """B31"""
    model = scene.load()
    scene.sample(model)
    leaf, plans = model.model.diffusion_model.double_blocks[0].img_norm1, set()
    original = type(leaf)

    def act(transformer, run):
        plans.add(mounting._plans.get(transformer))
        leaf.__class__ = type("Other", (original,), {})
        try:
            return run()
        finally:
            leaf.__class__ = original

    (mine,) = inside(scene, act, scene.ours(model))
    scene.sample(mine, steps=4)
    assert len(plans) == 1 and scene.report(mine)["blocks_mounted"] == 4


def test_blocks_that_did_not_run_ours_are_not_counted(scene):
    """B23, B25: the report says what happened, not what could have."""
    model = scene.load()

    def theirs(transformer, run):
        for block in transformer.double_blocks:  # as NAG does for the time of a call
            block.forward = lambda *args, _block=block, **kwargs: type(_block).forward(_block, *args, **kwargs)
        try:
            return run()
        finally:
            for block in transformer.double_blocks:
                del block.forward

    other, mine = inside(scene, theirs, model, scene.ours(model))
    assert_bits_equal(scene.sample(mine), scene.sample(other))
    told = scene.report(mine)
    assert told["blocks_mounted"] == 3 and told["text"].startswith("3/5 blocks"), told["text"]
