"""A long session: whatever somebody does next, in any order, each picture is compared with its own plain run. Steps count model calls of ours.

FLUX_FAST_PATH_SOAK_STEPS (500 on a GPU, 12 on a CPU) and FLUX_FAST_PATH_SOAK_SEED (0) set the length and the order of events.
"""
import os
import random
from collections import Counter

import comfy_harness as harness
import pytest
import torch
from flux_fast_path.nodes.quality_tier import FluxQualityTier

pytestmark = pytest.mark.comfyui

CUDA = torch.cuda.is_available()
STEPS = int(os.environ.get("FLUX_FAST_PATH_SOAK_STEPS", 500 if CUDA else 12))
SEED = int(os.environ.get("FLUX_FAST_PATH_SOAK_SEED", 0))
SAMPLERS = ("euler", "euler_ancestral", "heun", "dpmpp_2m", "uni_pc", "lcm")
# The tiny model, and two or three blocks of FLUX.1's width, which take the kernels' other paths.
MODELS = {"tiny": dict(), "wide": dict(hidden=3072, depth=1, single=2)}


def picture(rng):
    """Arguments of one run of the sampler: any size that core takes, any prompt length, batch, guidance and sampler."""
    cfg = rng.choice((1.0, 1.0, 3.0))
    return dict(seed=rng.randrange(2**31), steps=rng.randint(1, 4), width=8 * rng.randint(1, 40), height=8 * rng.randint(1, 40), text_tokens=rng.choice((1, 7, 16, 77, 256, rng.randint(2, 300))),
                batch=rng.choice((1, 1, 1, 2, 3)), cfg=cfg, negative=cfg > 1, sampler_name=rng.choice(SAMPLERS), denoise=rng.choice((1.0, 1.0, 0.6)))


def with_loras(scene, model, choice):
    for seed, strength in choice:
        model = scene.lora(model, strength, seed)
    return model


def interrupt(scene, model, how, at):
    """A branch that stops in mid-step: at a block, or between two of them, as the button does."""
    stop, left = scene.core.comfy.model_management.InterruptProcessingException, [at]

    def block(args, extra):
        left[0] -= 1
        if left[0] < 0 and how == "before":
            raise stop
        out = extra["original_block"](args)
        if left[0] < 0:
            raise stop
        return out

    model = model.clone()
    for kind, index in (("double_block", 0), ("single_block", 1)):
        model.set_model_patch_replace(block, "dit", kind, index)
    return model, stop


@pytest.mark.parametrize("kind", [k for k in MODELS if CUDA or k == "tiny"])
def test_a_long_session_of_everything(scene, kind):
    """B04, B06, B07, B11, B15, B21, B23"""
    rng, events, loras = random.Random(SEED), Counter(), () if kind == "wide" else ((None, 1.0), (12, 0.4), (13, -0.7))
    model = scene.load(path=scene.write(70, **MODELS[kind])) if MODELS[kind] else scene.load()
    left, before = STEPS // (2 if CUDA else 1), harness.snapshot(model)
    while left > 0:
        what, chosen = picture(rng), rng.sample(loras, rng.randint(0, len(loras)))
        plain = with_loras(scene, model, chosen)
        mine = scene.ours(plain) if rng.random() < 0.5 else with_loras(scene, scene.ours(model), chosen)
        told = str((what, chosen))
        if rng.random() < 0.2:
            stopped, stop = interrupt(scene, mine, rng.choice(("before", "after")), rng.randint(0, 3))
            try:
                scene.sample(stopped, **what)
            except stop:
                events["interrupted"] += 1
            harness.assert_untouched(model, before)
        wanted = scene.sample(plain, **what)
        assert not scene.calls, told
        if rng.random() < 0.25:
            high = FluxQualityTier().apply(mine, "high")[0]
            first, second = scene.sample(high, **what), scene.sample(high, **what)
            harness.assert_bits_equal(first, second, f"tier high twice, {told}")
            events["high"] += 1
            left -= 2 * scene.report(high)["steps"]
        harness.assert_bits_equal(scene.sample(mine, **what), wanted, told)
        report = scene.report(mine)
        assert report["state"] == "fused" and scene.calls["residual_gate"], (report, told)
        assert not CUDA or sum(op["launches"] for op in report["ops"]), (report, told)
        harness.assert_untouched(model, before)
        events["pictures"] += 1
        events["with lora"] += bool(chosen)
        left -= report["steps"]
    print(f"soak, {kind}: {STEPS // (2 if CUDA else 1) - left} steps, {dict(events)}")
    assert events["pictures"] > 2
