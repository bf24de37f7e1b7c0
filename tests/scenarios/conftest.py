"""One scene per test: real core, our node as a user applies it, and after every test the proof that nothing is left behind."""
import gc
import weakref
from collections import Counter

import comfy_harness as harness
import pytest
import torch
from flux_fast_path.fusion import session
from flux_fast_path.kernels.proof import FusedOp
from flux_fast_path.nodes.fast_path import FluxFastPath

BF16, CUDA = torch.bfloat16, torch.cuda.is_available()
GATES = 4 * 2 + 3  # residual updates of the tiny model in one model call


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    if call.when == "call":
        item.came_to_the_end = call.excinfo is None
    yield


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tiny operations gain nothing from threads, and lose tenfold when other processes use the cores too."""
    if not CUDA:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def frozen(comfy):
    """Core and its libraries are a million objects; the collector, which every scene asks at its end, need not look at them."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Scene:
    """What a user has on screen. Models are made here, so that the end of the scene can look at all of them."""

    def __init__(self, core, checkpoint, lora, folder):
        self.core, self.checkpoint, self.lora_file, self.folder = core, checkpoint, lora, folder
        self.calls, self.models = Counter(), []

    def load(self, weight_dtype="default", path=None):
        """UNETLoader. On a CPU the model is told to compute in bfloat16, as a graphics card would."""
        return self.watch(self.load_unwatched(weight_dtype, path))

    def load_unwatched(self, weight_dtype="default", path=None):
        """The same, for a model that the test itself changes or lets go of: the end of the scene does not look at it."""
        return harness.load_flux(path or self.checkpoint, weight_dtype, None if CUDA else BF16)

    def watch(self, model):
        self.models.append((model, harness.snapshot(model), tuple(model.model.state_dict())))
        return model

    def write(self, seed, **params):
        return harness.write_tiny_flux_checkpoint(self.folder / f"tiny_{seed}.safetensors", seed=seed, **params)

    def lora(self, model, strength=1.0, seed=None):
        path = self.lora_file if seed is None else harness.write_tiny_lora(self.folder / f"lora_{seed}.safetensors", seed=seed)
        return harness.load_lora(model, path, strength)

    def ours(self, model, enabled=True):
        return FluxFastPath().apply(model, enabled, unique_id="7")[0]

    def wrapped(self, model, wrapper, kind="diffusion_model"):
        """A clone with a wrapper of another pack; on a model of ours it runs inside our call."""
        clone = model.clone()
        clone.add_wrapper_with_key(kind, "other pack", wrapper)
        return clone

    def sample(self, model, steps=2, **kwargs):
        """The latent, as a prompt would get it; `calls` counts our operations in this run alone."""
        self.calls.clear()
        return harness.sample(model, steps=steps, **kwargs)

    def report(self, model):
        """Of the newest run of this application of the node."""
        return model.wrappers[session.OUTER_SAMPLE][session.KEY][0].__self__.run.to_dict()

    def same(self, model, ours=None, fused=True, steps=2, **kwargs):
        """The run with our node gives the bits of the run without it, before and after; returns the report."""
        wanted = self.sample(model, steps, **kwargs)
        assert not self.calls
        mine = ours or self.ours(model)
        harness.assert_bits_equal(self.sample(mine, steps, **kwargs), wanted, "with our node")
        told = self.report(mine)
        if fused:
            assert told["state"] == "fused" and self.calls["residual_gate"] == GATES * told["steps"] and told["outcome"] == "finished", (told, self.calls)
        else:
            assert told["state"] == "stepped_aside" and told["reason"] and not self.calls, (told, self.calls)
        harness.assert_bits_equal(self.sample(model, steps, **kwargs), wanted, "without it again")
        assert not self.calls
        return told

    def end(self, check_memory):
        for model, before, keys in self.models:
            harness.assert_untouched(model, before)
            assert tuple(model.model.state_dict()) == keys, "state-dict keys changed"
        alive = [weakref.ref(model.model.diffusion_model) for model, _, _ in self.models]
        self.models.clear()
        model = before = keys = None
        if not check_memory:
            return
        self.core.comfy.model_management.unload_all_models()
        gc.collect()
        self.core.comfy.model_management.cleanup_models()
        gc.collect()
        held = [a() for a in alive if a() is not None]
        assert not held, f"still held: {[type(r) for h in held for r in gc.get_referrers(h)][:20]}"


@pytest.fixture
def mount_on_cpu(monkeypatch):
    """Leaves are mounted on a CPU too, where every operation then runs its eager reference: identity and bits are real, speed is not."""
    if not CUDA:
        monkeypatch.setattr(session, "why_not_device", lambda device, dtype: None)


@pytest.fixture
def bare_scene(request, comfy, frozen, tiny_checkpoint, tiny_lora, tmp_path, monkeypatch, caplog):
    """A scene in which our node steps aside on a CPU, as users see it there."""
    scene = Scene(comfy, tiny_checkpoint, tiny_lora, tmp_path)
    run = FusedOp.__call__

    def counted(self, *args):
        scene.calls[self.name] += 1
        return run(self, *args)

    monkeypatch.setattr(FusedOp, "__call__", counted)
    everything = harness.comfy_globals_snapshot()
    yield scene
    changed = [k for k, v in harness.comfy_globals_snapshot().items() if everything.get(k) is not v]
    # torch.compile puts its own functions beside those that it compiles, and wraps Module's constructor once.
    changed = [k for k in changed if not ("__compiled_fn" in k or "__resume_at" in k or k in ("Module.__init__", "Module.__setstate__"))]
    assert not changed, f"globals of core or torch changed: {changed}"
    scene.end(check_memory=getattr(request.node, "came_to_the_end", False) and request.node.get_closest_marker("keeps_models") is None)
    assert "memory leak" not in caplog.text.lower() and "not loaded" not in caplog.text


@pytest.fixture
def scene(bare_scene, mount_on_cpu):
    return bare_scene
