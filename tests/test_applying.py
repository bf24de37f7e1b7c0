"""The node as a user applies it, what it refuses, and the report of a run."""
import re

import comfy_harness as harness
import pytest
import torch
from comfy_harness import assert_bits_equal
from flux_fast_path.bench import reference_flux
from flux_fast_path.bench.reference_patcher import APPLY_MODEL, OUTER_SAMPLE, reference_patcher
from flux_fast_path.fusion import report, session, table
from flux_fast_path.kernels.proof import FusedOp
from flux_fast_path.nodes.fast_path import FluxFastPath

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
table.register_rope(reference_flux.apply_rope, True)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tiny operations gain nothing from threads, and lose tenfold when other processes use the cores too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fused(monkeypatch):
    """Leaves are mounted on a CPU too, where every operation then runs its reference; what is returned counts the operations."""
    if DEVICE == "cpu":
        monkeypatch.setattr(session, "why_not_device", lambda device, dtype: None)
    counts, run = {}, FusedOp.__call__

    def counted(self, *args):
        counts[self.name] = counts.get(self.name, 0) + 1
        return run(self, *args)

    monkeypatch.setattr(FusedOp, "__call__", counted)
    return counts


@pytest.fixture
def patcher():
    return reference_patcher("tiny", device=DEVICE)


def ours(model):
    return FluxFastPath().apply(model, True, unique_id="7")[0]


def run(model, batch=1, height=64, width=64, text_tokens=16, steps=2, seed=0, callback=None, **conditions):
    latent = torch.zeros(batch, 16, height // 8, width // 8)
    return model.sample(latent, steps, {**model.random_conditions(batch, text_tokens, seed), **conditions}, seed, callback)


def report_of(model):
    """The report of the newest run of this application."""
    return model.wrappers[OUTER_SAMPLE][session.KEY][0].__self__.run.to_dict()


def assert_same(model, **kwargs):
    wanted, before = run(model, **kwargs), harness.snapshot(model)
    mine = ours(model)
    assert_bits_equal(run(mine, **kwargs), wanted)
    harness.assert_untouched(model, before)
    return report_of(mine)


def test_applying_twice_is_applying_once(fused, patcher):
    wanted, twice = run(patcher), ours(ours(patcher))
    for kind in (OUTER_SAMPLE, APPLY_MODEL):
        assert len(twice.get_wrappers(kind, session.KEY)) == 1 and not patcher.get_wrappers(kind, session.KEY)
    fused.clear()
    assert_bits_equal(run(twice), wanted)
    assert fused["residual_gate"] == 22 and "flux_fast_path" not in patcher.model_options["transformer_options"]


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
