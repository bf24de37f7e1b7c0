"""Models on two GPUs in one process, ours and as ComfyUI puts them there: fused on their own device, with the bits of eager and no trace elsewhere."""

import gc
import threading
from collections import Counter

import comfy_harness as harness
import pytest
import torch
from flux_fast_path.bench import reference_flux
from flux_fast_path.fusion import session
from flux_fast_path.kernels import proof
from fusion_scene import ours, report_of
from two_gpus import BF16, FIRST, NEEDED, SECOND, launches, refusals, same, the_first_is_current  # noqa: F401 the last is a fixture

pytestmark = NEEDED


def model_on(device, seed=0):
    return reference_flux.reference_flux("tiny", BF16, device, seed=seed)


def fused(model, inputs):
    with session.mounted(session.plan_for(model), token_major=True, share_silu=True) as mounted:
        result = model(**inputs)
    assert mounted.entered == 5, f"{mounted.entered} of 5 blocks were ours"
    return result


def sites(model):
    """Operation -> kernels that one warm model call launches; the first call of a shape proves and tries besides."""
    return +Counter(session.plan_for(model).sites)


def test_a_model_on_the_second_gpu_is_fused_there_and_leaves_the_first_alone():
    model = model_on(SECOND)
    inputs, before = reference_flux.example_inputs(model), harness.snapshot(model)
    wanted = model(**inputs)
    proof.forget()  # so that building, proving and timing are on the second one too
    torch.cuda.synchronize(SECOND)
    torch.cuda.reset_peak_memory_stats(FIRST)
    held = torch.cuda.memory_allocated(FIRST)
    same(fused(model, inputs), wanted, "the first call")
    warm = launches(SECOND)
    same(fused(model, inputs), wanted, "the second call")
    assert launches(SECOND) - warm == sites(model), refusals()
    assert torch.cuda.current_device() == 0 and not any(p.device == FIRST for op in proof.REGISTRY.values() for p in op.plans.values())
    assert torch.cuda.max_memory_allocated(FIRST) <= held, "something was allocated on the first GPU"
    harness.assert_untouched(model, before)


def test_models_on_both_gpus_take_turns():
    models = {device: model_on(device) for device in (FIRST, SECOND)}
    runs = [(device, reference_flux.example_inputs(models[device], batch=1 + seed % 2, seed=seed)) for seed in range(3) for device in models]
    wanted = [models[device](**inputs) for device, inputs in runs]
    for device, inputs in runs:
        fused(models[device], inputs)
    for (device, inputs), want in zip(runs, wanted):
        before = {d: launches(d) for d in models}
        same(fused(models[device], inputs), want, f"on {device}")
        did = {d: launches(d) - before[d] for d in models}
        assert did.pop(device) == sites(models[device]), refusals()
        assert not any(did.values()), f"launched on the other GPU: {did}"


def test_one_model_that_moves_between_the_gpus_keeps_its_bits():
    model = model_on(FIRST)
    inputs = reference_flux.example_inputs(model)
    for device in (FIRST, SECOND, FIRST, SECOND):
        here = {k: v.to(device) for k, v in inputs.items()}
        wanted = model.to(device)(**here)
        same(fused(model, here), wanted, f"on {device}")
        before = launches(device)
        same(fused(model, here), wanted, f"on {device}, again")
        assert launches(device) - before == sites(model), refusals()


@pytest.mark.parametrize("own_device", [True, False], ids=["each-with-its-own-device-current", "both-with-the-first-one-current"])
def test_two_threads_one_per_gpu(own_device):
    proof.forget()  # both prove at the same time
    jobs, problems, barrier = [], [], threading.Barrier(2)
    for device in (FIRST, SECOND):
        model = model_on(device)
        inputs = [reference_flux.example_inputs(model, batch=1 + seed, seed=seed) for seed in range(2)]
        jobs.append((device, model, [(i, model(**i)) for i in inputs], harness.snapshot(model)))

    def work(device, model, cases, _):
        try:
            torch.cuda.set_device(device if own_device else FIRST)
            barrier.wait(60)
            with torch.inference_mode():
                for i in range(20):
                    inputs, wanted = cases[i % 2]
                    same(fused(model, inputs), wanted, f"call {i} on {device}")
        except BaseException as error:
            problems.append(f"{device}: {type(error).__name__}: {error}")
            barrier.abort()

    threads = [threading.Thread(target=work, args=job, daemon=True) for job in jobs]
    [t.start() for t in threads]
    [t.join(300) for t in threads]
    assert not any(t.is_alive() for t in threads), "a thread hangs"
    assert not problems, problems
    for device, model, _, before in jobs:
        assert launches(device)["residual_gate"] == 20 * sites(model)["residual_gate"], (device, launches(device), refusals())
        harness.assert_untouched(model, before)


# --- ComfyUI's own ways to a second GPU ---


@pytest.fixture
def gpus(comfy):
    """Core's own nodes for more than one GPU."""
    try:
        from comfy_extras import nodes_multigpu
    except ImportError:
        pytest.skip("this core has no nodes for a second GPU")
    yield nodes_multigpu
    comfy.comfy.model_management.unload_all_models()
    gc.collect()


def assert_fused(mine, wanted, order, gates, **options):
    """The latent is `wanted`, `gates` residual updates were launched on each GPU by name, and no module of any clone shows a trace."""
    before = {d: launches(d) for d in (FIRST, SECOND)}
    harness.assert_bits_equal(harness.sample(mine, **options), wanted, order)
    told, did = report_of(mine), {str(d): (launches(d) - before[d])["residual_gate"] for d in before}
    assert told["state"] == "fused" and told["outcome"] == "finished" and told["blocks_mounted"] == 5, (order, told)
    assert did == gates, (order, did, refusals())
    for model in (mine, *mine.get_additional_models_with_key("multigpu")):
        harness.assert_untouched(model)


@pytest.mark.comfyui
def test_a_model_that_core_puts_on_the_second_gpu(gpus, tiny_checkpoint):
    def put(model):
        return gpus.SelectModelDeviceNode.execute(model, "gpu:1").result[0]

    loaded = harness.load_flux(tiny_checkpoint)
    there = put(loaded)
    assert there.load_device == SECOND and there.model is not loaded.model
    wanted, before = harness.sample(there, steps=2), harness.snapshot(there)
    for order, mine in (("put there, then ours", ours(there)), ("ours, then put there", put(ours(loaded)))):
        assert_fused(mine, wanted, order, {"cuda:0": 0, "cuda:1": 2 * 11}, steps=2)
    harness.assert_bits_equal(harness.sample(there, steps=2), wanted, "without it again")
    harness.assert_untouched(there, before)


@pytest.mark.comfyui
def test_core_splits_prompt_and_negative_prompt_over_both_gpus(gpus, tiny_checkpoint):
    """Core keeps a clone of the model on each GPU and runs each in a thread of its own."""
    def split(model):
        return gpus.MultiGPUCFGSplitNode.execute(model, 2).result[0]

    options = dict(steps=3, cfg=2.0, negative=True)
    both = split(harness.load_flux(tiny_checkpoint))
    models = [both, *both.get_additional_models_with_key("multigpu")]
    assert [m.load_device for m in models] == [FIRST, SECOND] and models[0].model is not models[1].model
    wanted, before = harness.sample(both, **options), [harness.snapshot(m) for m in models]
    for order, mine in (("split, then ours", ours(both)), ("ours, then split", split(ours(harness.load_flux(tiny_checkpoint))))):
        seen = []

        def look(executor, x, *args, seen=seen, **kwargs):
            seen.append((str(x.device), threading.get_ident()))
            return executor(x, *args, **kwargs)

        mine.add_wrapper_with_key(session.APPLY_MODEL, "look", look)
        assert_fused(mine, wanted, order, {"cuda:0": 3 * 11, "cuda:1": 3 * 11}, **options)
        assert sorted(d for d, _ in seen) == ["cuda:0"] * 3 + ["cuda:1"] * 3 and len(set(seen)) == 2, f"{order}: core did not split: {seen}"
    harness.assert_bits_equal(harness.sample(both, **options), wanted, "without it again")
    for model, was in zip(models, before):
        harness.assert_untouched(model, was)
