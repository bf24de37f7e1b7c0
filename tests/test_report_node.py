"""FLUX Fast Path Report: the right run, in words that are true of it."""

import copy
import json
import types

import pytest
from flux_fast_path.nodes import status
from flux_fast_path.nodes.report import FluxFastPathReport
from flux_fast_path.nodes.report_text import describe
from made_up_report import FUSED

pytestmark = pytest.mark.usefixtures("no_reports")

ASIDE = {**FUSED, "run": 1004, "state": "stepped_aside", "reason": "model is fp32", "ops": [], "disabled": [], "notes": [], "saved_ms_per_step": None}


def model(token):
    options = {} if token is None else {"transformer_options": {"flux_fast_path": {"token": token}}}
    return types.SimpleNamespace(model_options=options)


def run_node(**inputs):
    latent = {"samples": object()}
    answer = FluxFastPathReport().report(latent, **inputs)
    assert answer["result"][0] is latent
    return answer


def test_without_a_run_it_says_so_and_the_latent_passes():
    answer = run_node()
    assert answer["result"][1].startswith("No run recorded")
    assert answer["ui"]["flux_fast_path_report"] == []


def test_the_newest_report_is_shown_and_handed_to_api_users_whole():
    status.publish_report(ASIDE)
    status.publish_report(FUSED)
    answer = run_node()
    (data,) = answer["ui"]["flux_fast_path_report"]
    assert isinstance(data, str) and json.loads(data) == FUSED, "ComfyUI counts a dictionary as one more picture"
    assert answer["ui"]["text"] == [answer["result"][1]]
    json.dumps(answer["ui"], allow_nan=False)


def test_a_wired_model_picks_its_own_run():
    status.publish_report({**FUSED, "run": 1, "token": "mine"})
    status.publish_report({**FUSED, "run": 2, "token": "other"})
    assert json.loads(run_node(model=model("mine"))["ui"]["flux_fast_path_report"][0])["run"] == 1


def test_without_a_wired_model_only_a_run_of_this_prompt_is_shown(monkeypatch):
    for prompt in ("earlier", "this one"):
        monkeypatch.setattr(status, "current_prompt", lambda prompt=prompt: prompt)
        status.publish_report({**FUSED, "run": len(prompt), "token": "mine"})
    assert json.loads(run_node()["ui"]["flux_fast_path_report"][0])["prompt"] == "this one"
    monkeypatch.setattr(status, "current_prompt", lambda: "one without our nodes")
    answer = run_node()
    assert answer["ui"]["flux_fast_path_report"] == [] and answer["result"][1].startswith("No run recorded")
    assert json.loads(run_node(model=model("mine"))["ui"]["flux_fast_path_report"][0])["prompt"] == "this one", "its picture may come from the cache"
    monkeypatch.setattr(status, "current_prompt", lambda: None)
    assert json.loads(run_node()["ui"]["flux_fast_path_report"][0])["prompt"] == "this one", "where no prompt is known: the newest"


@pytest.mark.parametrize("wired, words", [
    (model("unknown"), "No run recorded"),
    (model(None), "This model has no FLUX Fast Path on it"),
    (types.SimpleNamespace(), "This model has no FLUX Fast Path on it"),
    (types.SimpleNamespace(model_options={"transformer_options": None}), "This model has no FLUX Fast Path on it"),
    (types.SimpleNamespace(model_options={"transformer_options": {"flux_fast_path": "another's"}}), "This model has no FLUX Fast Path on it"),
], ids=["not sampled yet", "unpatched", "no options", "empty options", "no dictionary"])
def test_another_models_run_is_never_shown_for_a_wired_one(wired, words):
    """Switched off, bypassed, or on another branch: the newest run has nothing to do with this picture."""
    status.publish_report({**FUSED, "token": None})
    answer = run_node(model=wired)
    assert answer["ui"]["flux_fast_path_report"] == [] and answer["result"][1].startswith(words)


def test_a_fused_run_in_words():
    text = describe({**FUSED, "blocks_mounted": 55})
    off, note = next(op for op in FUSED["ops"] if op["state"] == "disabled"), FUSED["notes"][0]
    for line in (
        "FLUX Fast Path · run 1003 · 12:00:00 · lossless",
        "The fast path was on in 55 of 57 blocks of Flux, on Test GPU (bfloat16).",
        "The image is bit-identical to ComfyUI without this pack.",
        "20 model calls in 2.7 s, 134 ms each, about 15.0 ms saved in each.",
        "  residual gates: 114 places, proven bit for bit on this GPU, saves 3.0 ms per model call",
        f"  {off['label']}: {off['sites']} places, switched off",
        f"  {off['label']}: {FUSED['disabled'][0]['reason']}",
        f"  {note}",
        "FLUX Fast Path 0.1.0 · ComfyUI 0.29.0 · PyTorch 2.11.0",
    ):
        assert line in text.splitlines(), line
    assert "GELUs in the GEMM" not in text and FUSED["disabled"][0]["signature"] not in text


def test_what_is_not_exact_is_not_called_proven():
    bounded = {"op": "linear_gelu", "label": "GELUs in the GEMM", "sites": 76, "launches": 1520, "state": "bounded", "saved_ms_per_step": -0.3}
    text = describe({**FUSED, "ops": [bounded], "saved_ms_per_step": -0.3})
    assert "  GELUs in the GEMM: 76 places, checked on this GPU: differs from ComfyUI by rounding only, costs 0.3 ms per model call" in text.splitlines()
    assert "proven" not in text and "0.3 ms more in each" in text and "-0.3" not in text


def test_a_run_that_stepped_aside_says_why_and_that_the_image_is_unaffected():
    text = describe(ASIDE)
    assert "The fast path stepped aside: model is fp32." in text and "The image is unaffected" in text
    assert "bit-identical" not in text


def test_the_high_tier_never_claims_a_bit_identical_image():
    high = {"state": "mounted", "sites": 76, "of": 76, "reasons": [], "max_relative_error": 0.0029}
    text = describe({**FUSED, "tier": "high", "high": high})
    assert "not bit-identical" in text and "76 of 76 places, largest relative error 0.0029" in text


def test_a_high_tier_that_stepped_aside_is_lossless_and_gives_its_reasons():
    high = {"state": "stepped_aside", "sites": 0, "of": 76, "reasons": ["linear1 is quantised (fp8)"], "max_relative_error": None}
    text = describe({**FUSED, "tier": "high", "high": high})
    assert "The image is bit-identical" in text and "  linear1 is quantised (fp8)" in text


@pytest.mark.parametrize("outcome, words", [("interrupted", "was interrupted"), ("error", "ended with an error")])
@pytest.mark.parametrize("report", [FUSED, {**FUSED, "steps": 0}, ASIDE], ids=["fused", "before the first step", "stepped aside"])
def test_a_run_that_did_not_finish_says_so_and_claims_nothing_of_an_image(report, outcome, words):
    text = describe({**report, "outcome": outcome})
    assert words in text and "bit-identical" not in text and "unaffected" not in text


def test_a_run_without_a_step_claims_nothing():
    text = describe({**FUSED, "steps": 0, "ops": [], "disabled": [], "notes": []})
    assert text.splitlines()[1:3] == ["No call of the model came through here: nothing was sampled, or another pack calls the model in its own way.", ""] and "fast path was on" not in text


@pytest.mark.parametrize("key", sorted(FUSED))
def test_a_report_without_one_of_its_entries_is_still_readable(key):
    for change in ("missing", "none"):
        report = copy.deepcopy(FUSED)
        if change == "missing":
            del report[key]
        else:
            report[key] = None
        text = describe(report)
        assert text.startswith("FLUX Fast Path") and "None" not in text


def test_every_input_and_output_has_a_tooltip():
    inputs = FluxFastPathReport.INPUT_TYPES()
    assert all(spec[1]["tooltip"] for group in ("required", "optional") for spec in inputs[group].values())
    assert len(FluxFastPathReport.OUTPUT_TOOLTIPS) == len(FluxFastPathReport.RETURN_TYPES)
