"""Kind A: patch lifetime and identity. What one branch, run or prompt does with our node never reaches another one."""
import gc
import weakref

import comfy_harness as harness
import pytest
import torch
from comfy_harness import assert_bits_equal
from flux_fast_path.fusion import mounting, session
from flux_fast_path.nodes import status

pytestmark = pytest.mark.comfyui
GATES = 11


def test_a_branch_that_was_never_wired_to_our_node_never_runs_it(scene):
    """B01"""
    model = scene.load()
    wanted, mine = scene.sample(model), scene.ours(model)
    for _ in range(2):
        assert_bits_equal(scene.sample(mine), wanted)
        assert scene.calls["residual_gate"] == 2 * GATES
        assert_bits_equal(scene.sample(model), wanted)
        assert not scene.calls
    bypassed = scene.ours(model, enabled=False)
    assert bypassed is model
    assert_bits_equal(scene.sample(bypassed), wanted)
    assert not scene.calls
    harness.assert_untouched(model)


def test_clones_of_our_model_carry_it_and_clones_of_the_other_do_not(scene):
    """B01: model-patch nodes clone what they are given."""
    model = scene.load()
    mine, plain = scene.ours(model).clone(), model.clone()
    wanted = scene.sample(plain)
    assert not scene.calls
    assert_bits_equal(scene.sample(mine.clone()), wanted)
    assert scene.calls["residual_gate"] == 2 * GATES


def object_patched(model):
    """Another pack's object patch, on a callable that FLUX runs through."""
    other = model.clone()
    original = model.get_model_object("model_sampling").timestep
    other.add_object_patch("model_sampling.timestep", lambda sigma: original(sigma) * 0.97)
    return other


def test_alternating_graphs_do_not_poison_each_other(scene):
    """B09"""
    model = scene.load()
    graphs = {"plain": model, "ours": scene.ours(model), "both": scene.ours(object_patched(model)), "both, other order": object_patched(scene.ours(model)), "other": object_patched(model)}
    plain, other = scene.sample(graphs["plain"]), scene.sample(graphs["other"])
    assert not torch.equal(plain, other)
    wanted = {name: other if name.startswith(("both", "other")) else plain for name in graphs}
    for name in ("plain", "ours", "both", "other", "plain", "both, other order", "ours", "other", "both", "plain", "both", "ours"):
        assert_bits_equal(scene.sample(graphs[name]), wanted[name], name)
        assert bool(scene.calls) == (name.startswith("both") or name == "ours"), name
        assert all(type(v).__module__.startswith("torch") for v in model.model.state_dict().values())


def test_a_model_saved_or_merged_after_our_run_holds_nothing_of_ours(scene):
    """B09"""
    model = scene.load()
    before, mine = {k: v.cpu().clone() for k, v in model.model.state_dict().items()}, scene.ours(model)
    scene.sample(mine)
    after = mine.model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[k].cpu(), v) for k, v in before.items())
    results = []
    for source in (model, mine):  # as ModelMergeSimple takes weights from its second model
        merged = scene.lora(model).clone()
        merged.add_patches(source.get_key_patches("diffusion_model."), 0.5, 0.5)
        results.append(scene.sample(merged))
        assert not scene.calls
    assert_bits_equal(*results)


def test_a_cached_model_is_as_active_in_its_fifth_run_as_in_its_first(scene):
    """B23: core reuses the node's output; only the seed changes."""
    model = scene.load()
    mine, told, numbers = scene.ours(model), [], []
    for seed in range(5):
        wanted = scene.sample(model, seed=seed)
        assert_bits_equal(scene.sample(mine, seed=seed), wanted)
        assert scene.calls["residual_gate"] == 2 * GATES
        report = scene.report(mine)
        numbers.append(report["run"])
        told.append([report[k] for k in ("state", "steps", "blocks", "outcome", "notes", "token")])
    assert told == [told[0]] * 5 and len(set(numbers)) == 5
    from flux_fast_path.nodes import NODE_CLASS_MAPPINGS
    assert not any(hasattr(node, "IS_CHANGED") for node in NODE_CLASS_MAPPINGS.values())


def test_every_run_publishes_its_report_once_it_is_over(scene):
    """B23: the panel asks for reports; a cached node must still send them."""
    model = scene.load()
    mine = scene.ours(model)
    tokens = []
    for seed in range(2):
        scene.sample(mine, seed=seed)
        tokens.append([(r["run"], r["outcome"]) for r in status.latest_reports()][0])
    assert tokens[0][0] < tokens[1][0] and tokens[0][1] == tokens[1][1] == "finished"


def test_sampling_patches_between_our_runs_restore_to_cores_objects(scene):
    """B27: ours, plain, ours + ModelSamplingFlux, plain, three times; buffers keep their names and ids.

    The same prompts without our node, on a model of their own, are what each is compared with: with dynamic VRAM core itself may let a
    sampling patch act on later prompts (Comfy-Org/ComfyUI #16490), and then has to do so with us too.
    """
    from comfy_extras.nodes_model_advanced import ModelSamplingFlux

    def prompts(model, ours):
        shifted = ModelSamplingFlux().patch(ours(model), 1.3, 0.4, 512, 512)[0]
        buffers = {n: id(b) for n, b in model.model.diffusion_model.named_buffers()}
        results = [scene.sample(branch) for _ in range(3) for branch in (ours(model), model, shifted, model)]
        assert {n: id(b) for n, b in model.model.diffusion_model.named_buffers()} == buffers
        return results

    wanted = prompts(scene.load(), lambda model: model)
    assert not scene.calls
    for got, want in zip(prompts(scene.load(), scene.ours), wanted):
        assert_bits_equal(got, want)


def test_twenty_model_switches_keep_memory_flat_and_core_silent(scene, caplog):
    """B31, B11: two files, each loaded, used and dropped ten times. The scene checks for leak warnings."""
    paths = [scene.checkpoint, scene.write(21)]
    wanted, alive, tensors = {}, [], []
    for i in range(20):
        model = scene.load_unwatched(path=paths[i % 2])
        result = scene.sample(scene.ours(model), steps=1)
        assert scene.calls["residual_gate"] == GATES
        assert_bits_equal(result, wanted.setdefault(i % 2, result))
        alive.append(weakref.ref(model.model.diffusion_model))
        del model, result
        gc.collect()
        scene.core.comfy.model_management.cleanup_models()
        tensors.append(sum(isinstance(o, torch.Tensor) for o in gc.get_objects()))
    assert not [a for a in alive[:-1] if a() is not None] and not mounting._plans
    assert max(tensors[4:]) <= tensors[3] + 5
    assert "leak" not in caplog.text


def test_our_node_holds_no_model_that_core_has_let_go(scene):
    model = harness.load_flux(scene.checkpoint)
    mine = scene.ours(model)
    application = mine.wrappers[session.APPLY_MODEL][session.KEY][0].__self__
    scene.sample(mine, steps=1)
    alive = weakref.ref(model.model)
    del model, mine
    gc.collect()
    scene.core.comfy.model_management.cleanup_models()
    assert alive() is None and application.run.steps == 1


def test_it_steps_aside_on_a_cpu_and_says_so(bare_scene):
    """The same graph on a machine without a GPU."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    told = bare_scene.same(bare_scene.load(), fused=False)
    assert told["reason"] == "the model runs on cpu, not on an NVIDIA GPU" and told["text"].endswith("Image unaffected.")
