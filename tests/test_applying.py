"""The node as a user applies it, what it refuses, and the report of a run."""
import re

import pytest
import torch
from comfy_harness import assert_bits_equal
from flux_fast_path.bench.reference_patcher import APPLY_MODEL, OUTER_SAMPLE
from flux_fast_path.fusion import report, session
from flux_fast_path.kernels import proof
from flux_fast_path.nodes.fast_path import FluxFastPath
from fusion_scene import assert_same, ours, report_of, run

pytestmark = pytest.mark.usefixtures("one_thread")


def test_applying_twice_is_applying_once(fused, patcher):
    wanted, twice = run(patcher), ours(ours(patcher))
    for kind in (OUTER_SAMPLE, APPLY_MODEL):
        assert len(twice.get_wrappers(kind, session.KEY)) == 1 and not patcher.get_wrappers(kind, session.KEY)
    fused.clear()
    assert_bits_equal(run(twice), wanted)
    assert fused.count("residual_gate") == 22 and "flux_fast_path" not in patcher.model_options["transformer_options"]


def test_switched_off_it_passes_the_very_model_on(patcher):
    assert FluxFastPath().apply(patcher, False, unique_id="7")[0] is patcher


@pytest.mark.parametrize("thing", [None, object(), {}, "model", torch.nn.Linear(2, 2), type("DiffusersPipeline", (), {"unet": torch.nn.Linear(2, 2), "clone": lambda self: self})()], ids=lambda t: type(t).__name__)
def test_what_is_no_model_passes_through(thing):
    assert FluxFastPath().apply(thing, True, unique_id="7")[0] is thing


def test_the_report_has_the_keys_that_its_docstring_promises(fused, patcher):
    promised = {key for line in report.__doc__.splitlines() for found in [re.match(r"    ([a-z_]+(?:, [a-z_]+)*)  +\S", line)] if found for key in found[1].split(", ")}
    told = assert_same(patcher)
    assert len(promised) >= 20 and set(told) == promised
    assert (told["state"], told["outcome"], told["steps"], told["model"], told["blocks"], told["disabled"]) == ("fused", "finished", 2, "Flux", {"double": 2, "single": 3}, [])
    names = [op["op"] for op in told["ops"] if op["sites"]]
    assert names == [name for name in report.OPS if name in names] and {"residual_gate", "layer_norm_modulate", "qk_norm_rope", "head_concat", "gelu_concat"} <= set(names)
    waiting = ours(patcher)
    with pytest.raises(ZeroDivisionError):
        run(waiting, callback=lambda *_: 1 / 0)
    assert set(report_of(waiting)) == promised and report_of(waiting)["outcome"] == "error"


def test_a_run_over_several_gpus_counts_all_of_them(fused, patcher, monkeypatch):
    """Core can give the two halves of a CFG step to two GPUs, a thread each; one run then has launches on both."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Test GPU" if device.index < 2 else "Other GPU")
    first, second, third = (torch.device("cuda", i) for i in range(3))
    told = report.Run("token")
    plans = [proof.Plan("residual_gate", device, None, True) for device in (first, second, third)]
    monkeypatch.setattr(proof.REGISTRY["residual_gate"], "plans", dict(enumerate(plans)))
    told.blocks, told.sites = {"double": 2, "single": 3}, {"residual_gate": 11}
    for device, plan in zip((first, second, first), (plans[0], plans[1], plans[0])):
        told.count_call()
        told.describe("Flux", device, "bfloat16")
        plan.launches += 11
        plan.eager_us, plan.fused_us = 30.0, 10.0
        told.count_fused()
    plans[2].launches += 5  # another run's
    found = told.to_dict()
    assert (found["gpu"], found["steps"], found["ops"][0]["launches"]) == ("2 × Test GPU", 3, 33)
    assert found["saved_ms_per_step"] == round(11 * 20e-3, 2)
    told.describe("Flux", third, "bfloat16")
    assert told.to_dict()["gpu"] == "2 × Test GPU + Other GPU"
