"""The nodes in real ComfyUI: stock loader, real sampler, tiny FLUX. Final latents must equal the run without the node, bit for bit."""

import comfy_harness as harness
import pytest
import torch
from flux_fast_path.fusion import session
from flux_fast_path.kernels.proof import REGISTRY
from flux_fast_path.nodes import status
from flux_fast_path.nodes.fast_path import FluxFastPath
from flux_fast_path.nodes.quality_tier import FluxQualityTier

pytestmark = pytest.mark.comfyui
CUDA = torch.cuda.is_available()


@pytest.fixture
def calls(monkeypatch):
    """Counts operations by name. On a CPU the session is told that it may mount: every operation then runs on its eager reference."""
    counts = dict.fromkeys(REGISTRY, 0)
    if not CUDA:
        monkeypatch.setattr(session, "why_not_device", lambda device, dtype: None)

    def counted(op, original):
        def call(self, *args):
            counts[self.name] += 1
            return original(self, *args)
        return call

    for op in REGISTRY.values():
        monkeypatch.setattr(type(op), "__call__", counted(op, type(op).__call__))
    return counts


def load(path):
    return harness.load_flux(path, compute_dtype=torch.bfloat16)


def fast(model):
    return FluxFastPath().apply(model, True, unique_id="7")[0]


def report():
    return status.latest_reports()[0]


def test_latents_are_identical_and_every_block_is_mounted(comfy, tiny_checkpoint, calls):
    model = load(tiny_checkpoint)
    before = harness.snapshot(model)
    plain = harness.sample(model, seed=3, steps=3)
    assert not any(calls.values()), "the plain branch must not meet our code"
    fused = harness.sample(fast(model), seed=3, steps=3)
    harness.assert_bits_equal(plain, fused)
    harness.assert_untouched(model, before)
    assert calls["residual_gate"] == 3 * (4 * 2 + 3) and calls["layer_norm_modulate"] == 3 * (4 * 2 + 3 + 1)
    assert calls["gelu_concat"] == 3 * 3
    if comfy.version >= (0, 13):  # before that core had an RMSNorm of its own, and q, k and v stay core's
        assert calls["head_concat"] == 3 * 2 and calls["qk_norm_rope"] >= 3 * 5
    assert report()["state"] == "fused" and report()["steps"] == 3 and report()["outcome"] == "finished"
    if CUDA:
        assert all(op["launches"] == 3 * op["sites"] for op in report()["ops"] if op["op"] == "residual_gate"), report()


def test_on_a_cpu_it_steps_aside_with_the_reason(comfy, tiny_checkpoint):
    if CUDA:
        pytest.skip("this machine has a GPU")
    model = load(tiny_checkpoint)
    harness.assert_bits_equal(harness.sample(model, seed=1), harness.sample(fast(model), seed=1))
    assert report()["state"] == "stepped_aside" and "cpu" in report()["text"]


@pytest.mark.parametrize("batch,width,height,text", [(1, 64, 64, 16), (2, 96, 64, 7), (3, 64, 128, 33)])
def test_batches_shapes_and_guidance_are_identical(comfy, tiny_checkpoint, calls, batch, width, height, text):
    model = load(tiny_checkpoint)
    options = dict(seed=5, steps=2, batch=batch, width=width, height=height, text_tokens=text, cfg=2.0, negative=True)
    harness.assert_bits_equal(harness.sample(model, **options), harness.sample(fast(model), **options))


def test_lossless_before_between_and_after_high_is_identical_and_high_is_deterministic(comfy, tiny_checkpoint, calls):
    model = load(tiny_checkpoint)
    before = harness.snapshot(model)
    high = FluxQualityTier().apply(fast(model), "high", unique_id="8")[0]
    other_order = fast(FluxQualityTier().apply(model, "high", unique_id="8")[0])
    back = FluxQualityTier().apply(high, "lossless", unique_id="9")[0]
    plain = harness.sample(model, seed=2)
    results = [harness.sample(high, seed=2), harness.sample(other_order, seed=2)]
    mounted = report()["high"]
    harness.assert_bits_equal(plain, harness.sample(back, seed=2))
    results.append(harness.sample(high, seed=2))
    harness.assert_bits_equal(plain, harness.sample(fast(model), seed=2))
    for result in results[1:]:
        harness.assert_bits_equal(results[0], result)
    if CUDA:
        assert mounted["sites"] == mounted["of"] == 2 * 2 + 3, mounted
        assert not torch.equal(plain, results[0]) and mounted["max_relative_error"] > 0
    else:
        assert mounted["state"] == "stepped_aside" and mounted["reasons"]
    harness.assert_untouched(model, before)


def test_an_interrupt_in_mid_step_leaves_nothing_behind(comfy, tiny_checkpoint, calls):
    model = load(tiny_checkpoint)
    plain, before = harness.sample(model, seed=4), harness.snapshot(model)
    high = FluxQualityTier().apply(fast(model), "high", unique_id="8")[0]
    interrupt = comfy.comfy.model_management.InterruptProcessingException

    def stop(args, extra):
        raise interrupt()

    stopped = high.clone()
    stopped.set_model_patch_replace(stop, "dit", "double_block", 1)
    with pytest.raises(interrupt):
        harness.sample(stopped, seed=4)
    harness.assert_untouched(model, before)
    assert report()["outcome"] == "interrupted"
    harness.assert_bits_equal(plain, harness.sample(fast(model), seed=4))
