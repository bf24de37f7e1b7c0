"""What the tests of fusion share: fixtures (conftest.py offers them to every file), the tiny model's runs with and without us, random operands."""
import comfy_harness as harness
import pytest
import torch
from flux_fast_path.bench import reference_flux
from flux_fast_path.bench.reference_patcher import OUTER_SAMPLE, reference_patcher
from flux_fast_path.fusion import session, table
from flux_fast_path.kernels.proof import FusedOp
from flux_fast_path.nodes.fast_path import FluxFastPath
from op_cases import values

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
table.register_rope(reference_flux.apply_rope, True)


@pytest.fixture(scope="module")
def one_thread():
    """Tiny operations gain nothing from threads, and lose tenfold when other processes use the cores too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def inference():
    with torch.inference_mode():
        yield


@pytest.fixture
def fused(monkeypatch):
    """Names of the fused operations in the order they were asked for. Leaves are mounted on a CPU too, where each operation runs its reference."""
    if DEVICE == "cpu":
        monkeypatch.setattr(session, "why_not_device", lambda device, dtype: None)
    calls, run_op = [], FusedOp.__call__

    def noted(self, *args):
        calls.append(self.name)
        return run_op(self, *args)

    monkeypatch.setattr(FusedOp, "__call__", noted)
    return calls


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
    """The run with us equals the run without us and leaves nothing on the model; the report of it."""
    wanted, before = run(model, **kwargs), harness.snapshot(model)
    mine = ours(model)
    harness.assert_bits_equal(run(mine, **kwargs), wanted)
    harness.assert_untouched(model, before)
    return report_of(mine)


def noise(*shape, seed=0, dtype=torch.bfloat16):
    return values(*shape, dtype=dtype, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed), special=False)
