"""Kind D: torch.compile beside our node (B31, S7). Compiled models run as compiled; nothing is compiled twice because of us."""
import comfy_harness as harness
import pytest
import torch
from comfy_harness import assert_bits_equal

pytestmark = pytest.mark.comfyui


@pytest.fixture
def small(scene):
    """One block of each kind: compiling is what takes the time here."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = scene.load_unwatched(path=scene.write(31, depth=1, single=1))
    if scene.core.dynamic_vram:
        scene.sample(model)  # weights that are still on their way make graphs of their own
    yield model
    torch._dynamo.reset()


def compiled(model, keys=("diffusion_model",)):
    from comfy_api.torch_helpers import set_torch_compile_wrapper
    model = model.clone()
    set_torch_compile_wrapper(model, backend="eager", keys=list(keys), options=None)
    return model


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_a_compile_node_before_or_after_ours_runs_compiled(scene, small):
    """B31"""
    wanted, made = scene.sample(compiled(small)), graphs()
    for both in (scene.ours(compiled(small)), compiled(scene.ours(small))):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        assert_bits_equal(scene.sample(both), wanted)
        told = scene.report(both)
        assert told["state"] == "stepped_aside" and "torch.compile" in told["reason"] and not scene.calls
        assert graphs() == made > 0
        harness.assert_untouched(small)
    fused, eager = scene.ours(small), scene.sample(small)
    assert_bits_equal(scene.sample(fused), eager)
    assert scene.report(fused)["state"] == "fused" and scene.calls, "and the branch without the compile node is fused"


def test_only_some_blocks_compiled(scene, small):
    """B31: packs compile block by block."""
    keys = ["diffusion_model.double_blocks.0"]
    wanted = scene.sample(compiled(small, keys))
    both = compiled(scene.ours(small), keys)
    assert_bits_equal(scene.sample(both), wanted)
    assert "torch.compile" in scene.report(both)["reason"] and not scene.calls


def test_prompts_of_other_lengths_compile_no_more_often_than_without_us(scene, small):
    """B31: queue after queue; then the node toggled."""
    counts = []
    for wrap in (lambda m: m, scene.ours):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = wrap(compiled(small))
        for tokens in (8, 12):
            scene.sample(model, steps=1, text_tokens=tokens)
        counts.append(graphs())
    assert counts[0] == counts[1]


@pytest.fixture
def block_patches_come_off(scene):
    if scene.core.dynamic_vram:
        pytest.skip("core itself cannot run the model again: dynamic VRAM looks for weights under the compiled block's name")


def test_a_block_replaced_by_a_compiled_one(scene, small, block_patches_come_off):
    """S7, B09: object patches put a compiled module where the block was."""
    block = torch.compile(small.model.diffusion_model.single_blocks[0], backend="eager")

    def patched(model):
        model = model.clone()
        model.add_object_patch("diffusion_model.single_blocks.0", block)
        return model

    both = patched(scene.ours(small))
    plain, wanted = scene.sample(small), scene.sample(patched(small))
    assert_bits_equal(scene.sample(both), wanted)
    told = scene.report(both)
    assert told["state"] == "stepped_aside" and "compiled" in told["reason"]
    assert_bits_equal(scene.sample(small), plain)
    assert type(small.model.diffusion_model.single_blocks[0]).__name__ == "SingleStreamBlock"


def test_a_patch_that_another_branch_left_on_the_model_does_not_switch_us_off_for_good(scene, small, block_patches_come_off):
    """S6, B09, B23: object patches stay until the next load; our node may run in between."""
    other = small.clone()
    other.add_object_patch("diffusion_model.single_blocks.0", torch.compile(small.model.diffusion_model.single_blocks[0], backend="eager"))
    wanted = scene.sample(small)
    scene.sample(other)
    mine = scene.ours(small)
    assert_bits_equal(scene.sample(mine), wanted)
    assert scene.calls["residual_gate"] == 2 * 5


@pytest.mark.parametrize("path", ["double_blocks.0.img_attn.qkv", "double_blocks.0.img_norm1", "single_blocks.0.linear2"])
def test_a_leaf_compiled_in_place(scene, small, path):
    """B31: `module.compile()` leaves the module where it is."""
    module = small.model.diffusion_model.get_submodule(path)
    module.compile(backend="eager")
    wanted = scene.sample(small)
    assert_bits_equal(scene.sample(scene.ours(small)), wanted)
    assert_bits_equal(scene.sample(small), wanted)
    module._compiled_call_impl = None
    harness.assert_untouched(small)


def test_while_something_else_traces_the_call_nothing_is_mounted(scene, small, monkeypatch):
    """B31"""
    wanted = scene.sample(small)
    mine = scene.ours(small)
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert_bits_equal(scene.sample(mine), wanted)
    assert "torch.compile" in scene.report(mine)["reason"] and not scene.calls
