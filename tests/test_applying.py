"""The node as a user applies it, what it refuses, and the report of a run."""
import re

import pytest
import torch
from comfy_harness import assert_bits_equal
from flux_fast_path.bench.reference_patcher import APPLY_MODEL, OUTER_SAMPLE
from flux_fast_path.fusion import report, session
from flux_fast_path.kernels import proof
from flux_fast_path.nodes import status
from flux_fast_path.nodes.fast_path import FluxFastPath
from flux_fast_path.nodes.quality_tier import FluxQualityTier
from fusion_scene import assert_same, ours, report_of, run

pytestmark = pytest.mark.usefixtures("one_thread")


def test_applying_twice_is_applying_once(fused, patcher):
    wanted, twice = run(patcher), ours(ours(patcher))
    for kind in (OUTER_SAMPLE, APPLY_MODEL):
        assert len(twice.get_wrappers(kind, session.KEY)) == 1 and not patcher.get_wrappers(kind, session.KEY)
    fused.clear()
    assert_bits_equal(run(twice), wanted)
    assert fused.count("residual_gate") == 22 and "flux_fast_path" not in patcher.model_options["transformer_options"]


def test_what_another_pack_keeps_under_our_key_is_no_option_of_ours(fused, patcher):
    wanted = run(patcher)
    patcher.model_options.setdefault("transformer_options", {})[session.KEY] = "theirs"
    mine = ours(patcher)
    assert_bits_equal(run(mine), wanted)
    mine.model_options["transformer_options"][session.KEY] = "theirs again"
    assert_bits_equal(run(mine), wanted)
    assert report_of(mine)["state"] == "fused" and report_of(mine)["tier"] == "lossless"


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


def test_two_models_in_one_run_do_not_mix_their_counts():
    """Core's guider for two models sends both through the first one's wrappers: the report is of the model that had most blocks with us."""
    told, large, small = report.Run("token"), ({"double": 2, "single": 3}, {"residual_gate": 11}), ({"double": 1, "single": 2}, {"residual_gate": 6})
    for blocks, sites in (small, large, small):
        told.count_call()
        told.expect(blocks, sites)
        told.count_blocks(sum(blocks.values()), blocks, sites, ended=True)
    found = told.to_dict()
    assert (found["blocks_mounted"], found["blocks"], found["ops"][0]["sites"]) == (5, large[0], 11)


def test_a_build_is_announced_once_and_only_where_one_begins(fused, patcher, monkeypatch):
    settled, said = [], []
    monkeypatch.setattr(session.build, "is_settled", lambda device, dtype: bool(settled))
    monkeypatch.setattr(session, "why_not_device", lambda device, dtype: settled.append(True))
    monkeypatch.setattr(status, "show_text", lambda node, text: said.append(text))
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(session.recognise, "why_not_code", lambda model: "core version not recognised")
        run(ours(patcher), steps=3)
    assert not settled and not any("Building" in text for text in said)
    run(ours(patcher), steps=3)
    assert settled and sum("Building" in text for text in said) == 1


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


def test_a_report_read_later_counts_its_own_run_alone(monkeypatch):
    plan = proof.Plan("residual_gate", torch.device("cpu"), None, True)
    monkeypatch.setattr(proof.REGISTRY["residual_gate"], "plans", {0: plan})
    mine = report.Run("token")
    mine.count_call()
    mine.describe("Flux", plan.device, "bfloat16")
    mine.sites = {"residual_gate": 11}
    plan.launches += 11
    mine.count_fused()
    mine.end("finished")
    plan.launches += 22  # the next run's
    assert mine.to_dict()["ops"][0]["launches"] == 11


def test_with_the_fast_path_off_and_the_tier_lossless_nothing_is_said_to_be_on(fused, patcher):
    tier = FluxQualityTier().apply(patcher, "lossless", unique_id="8")[0]
    assert_bits_equal(run(tier), run(patcher))
    told = report_of(tier)
    assert (told["state"], told["blocks_mounted"], told["ops"]) == ("stepped_aside", 0, []) and not fused
    assert told["text"] == "Stepped aside: FLUX Fast Path is off and the tier is lossless. Image unaffected."


def told(**changes):
    """The node's line for a report with these entries."""
    gate = {"op": "residual_gate", "sites": 114, "launches": 114, "state": "proven"}
    return report.text({
        "state": "fused", "steps": 2, "outcome": "finished", "blocks": {"double": 19, "single": 38}, "blocks_mounted": 57, "ops": [gate], "gpu": "Test GPU",
        "saved_ms_per_step": 27.1, "disabled": [], "high": None, **changes,
    })


@pytest.mark.parametrize("changes, words", [
    (dict(), "57/57 blocks · 114 gates · proven on Test GPU · −27.1 ms/step"),
    (dict(saved_ms_per_step=-0.3), "57/57 blocks · 114 gates · proven on Test GPU · +0.3 ms/step"),
    (dict(outcome="error"), "57/57 blocks · 114 gates · proven on Test GPU · −27.1 ms/step · ended with an error"),
    (dict(outcome="error", steps=0), "Ended with an error before the first step."),
    (dict(outcome="interrupted", steps=0), "Interrupted before the first step."),
    (dict(outcome="finished", steps=0), "No call of the model came through here: nothing was sampled, or another pack calls the model in its own way."),
    (dict(outcome="running", steps=0), "Waiting for the first step."),
    (dict(ops=[dict(op="linear_gelu", sites=76, launches=76, state="bounded")], saved_ms_per_step=None, high=dict(sites=76, of=76, reasons=[])),
     "57/57 blocks · checked on Test GPU · high: 76/76 sites, not bit-exact"),
    (dict(disabled=[dict(op="gelu_concat", reason="its bits differ")] * 2, saved_ms_per_step=None), "57/57 blocks · 114 gates · proven on Test GPU · 1 operation off: its bits differ; image unaffected"),
], ids=lambda v: None if isinstance(v, dict) else v[:40])
def test_the_nodes_line_says_what_happened(changes, words):
    assert told(**changes) == words


def test_a_call_that_stepped_aside_among_others_is_a_note_not_the_whole_run(fused, patcher):
    """As where a mask or a patch comes in half-way: the rest of the run was fused, and the report says both."""
    mixed = report.Run("token")
    for reason in (None, "gradients are being recorded (training)", None):
        mixed.count_call()
        if reason:
            mixed.step_aside(reason)
        else:
            mixed.count_fused()
    found = mixed.to_dict()
    assert (found["state"], found["reason"]) == ("fused", None)
    assert "1 of 3 model calls ran as core runs them: gradients are being recorded (training)" in found["notes"]


def test_only_what_this_run_wanted_is_said_to_be_off(monkeypatch):
    """A refusal of another dtype, or of an operation of the other tier, is another run's news."""
    verdicts = {}
    for device, dtype in ((torch.device("cpu"), torch.bfloat16), (torch.device("cpu"), torch.float16), (torch.device("meta"), torch.bfloat16)):
        verdict = verdicts[device, dtype, "any"] = proof.Verdict("residual_gate", str(dtype))
        verdict.state, verdict.reason = "disabled", "its bits differ"
    monkeypatch.setattr(proof.REGISTRY["residual_gate"], "verdicts", verdicts)
    mine = report.Run("token")
    mine.count_call()
    mine.describe("Flux", torch.device("cpu"), "bfloat16")
    assert mine.to_dict()["disabled"] == [], "it wanted no gates"
    mine.sites = {"residual_gate": 11}
    assert [d["signature"] for d in mine.to_dict()["disabled"]] == ["torch.bfloat16"]


@pytest.mark.parametrize("quality", ["ultra", None, ["high"], "High"], ids=str)
def test_a_quality_that_a_link_brings_and_nobody_knows_is_lossless_and_said_to_be(patcher, monkeypatch, caplog, quality):
    texts = []
    monkeypatch.setattr(status, "show_text", lambda node, text: texts.append(text))
    tier = FluxQualityTier().apply(patcher, quality, unique_id="8")[0]
    assert tier.model_options["transformer_options"]["flux_fast_path"]["tier"] == "lossless"
    assert texts == [f"Unknown quality {quality!r}: lossless, bit-identical."] and "unknown quality" in caplog.text
