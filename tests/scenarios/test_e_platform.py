"""Kind E: GPUs, drivers, compilers and folders as they are out there. No GPU is needed: the facts are put into torch's mouth."""
import builtins
import gc
import logging
import os
import threading
import weakref

import comfy_harness as harness
import pytest
import torch
from flux_fast_path.fusion import session
from flux_fast_path.kernels import build, nvrtc
from flux_fast_path.kernels.nvrtc import KernelError

pytestmark = pytest.mark.comfyui


@pytest.fixture
def machine(monkeypatch):
    """A machine with the GPUs in `cards` (index -> architecture); `built` lists (index, target) of every build, `fail` raises in it."""
    class Machine:
        cards, built, fail = {}, [], None

    def compile_source(source, target, defines=()):
        if Machine.fail is not None:
            raise KernelError(Machine.fail)
        return target.encode()

    class Module:
        def __init__(self, code, index):
            Machine.built.append((index, code.decode()))

    Machine.cards, Machine.built, Machine.fail = {}, [], None
    monkeypatch.setattr(build, "_modules", {})
    monkeypatch.setattr(build, "build_seconds", {})
    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    monkeypatch.setattr(nvrtc, "Module", Module)
    monkeypatch.setattr(nvrtc, "supported_archs", lambda: [75, 80, 86, 89, 90, 100, 120])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: divmod(Machine.cards[index], 10))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: f"card {index}")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return Machine


def reason(index, dtype=torch.bfloat16):
    return build.unavailable(torch.device("cuda", index), dtype)


@pytest.mark.parametrize("cards", [{0: 86, 1: 120, 2: 61}, {0: 120, 1: 86, 2: 61}, {0: 61, 1: 86, 2: 120}], ids=str)
def test_each_card_gets_code_for_its_own_architecture(machine, cards):
    """B33"""
    machine.cards = cards
    for index, arch in cards.items():
        told = reason(index)
        assert ("sm_61" in told and "needs sm_80" in told) if arch == 61 else told is None
    assert sorted(machine.built) == sorted((i, f"sm_{a}") for i, a in cards.items() if a != 61)
    for index in cards:
        reason(index)
    assert len(machine.built) == 2, "built once"


def test_one_card_in_two_dtypes_is_two_builds(machine):
    """B33"""
    machine.cards = {0: 90}
    assert reason(0) is None and reason(0, torch.float16) is None and len(machine.built) == 2


def test_a_card_newer_than_the_compiler_gets_code_that_the_driver_translates(machine):
    """B39"""
    machine.cards = {0: 130}
    assert reason(0) is None and machine.built == [(0, "compute_120")]


def test_turing_has_float16_only(machine):
    """B39"""
    machine.cards = {0: 75}
    assert reason(0, torch.float16) is None and "bfloat16 needs sm_80" in reason(0)


WORDS = {
    "no compiler": "torch's run-time compiler (NVRTC) was not found (libnvrtc.so.13: cannot open shared object file)", "driver too old": "loading the kernels failed: CUDA_ERROR_UNSUPPORTED_PTX_VERSION (222)",
    "no such image": "loading the kernels failed: CUDA_ERROR_NO_BINARY_FOR_GPU (209)", "compile error": "NVRTC 13.0 could not compile for sm_90 (error 6):\nflux_fast_path.cu(1): error: what is this",
}


@pytest.mark.parametrize("what", WORDS)
def test_a_build_that_fails_is_said_once_in_plain_words_and_sampling_goes_on(bare_scene, machine, what, monkeypatch, caplog):
    """B39, B43"""
    scene = bare_scene
    machine.cards, machine.fail = {0: 90}, WORDS[what]
    monkeypatch.setattr(session, "why_not_device", lambda device, dtype: build.unavailable(torch.device("cuda", 0), dtype))
    caplog.set_level(logging.WARNING, "flux_fast_path")
    model = scene.load()
    told = scene.same(model, fused=False)
    scene.same(model, fused=False)
    assert told["reason"] == WORDS[what].splitlines()[0] and told["text"] == f"Stepped aside: {told['reason']}. Image unaffected."
    lines = [r for r in caplog.records if r.name == "flux_fast_path"]
    assert len(lines) == 1 and "unaffected" in lines[0].getMessage() and "card 0" in lines[0].getMessage() and not lines[0].exc_info
    lines.clear()
    caplog.clear()  # the record's arguments hold the error, its traceback holds the model: see the next test
    build._modules.clear()


def test_a_remembered_failure_holds_no_model(bare_scene, machine, monkeypatch, caplog):
    """B31, S8: the first model call of the process is the one that builds."""
    machine.cards, machine.fail = {0: 90}, WORDS["no compiler"]
    monkeypatch.setattr(session, "why_not_device", lambda device, dtype: build.unavailable(torch.device("cuda", 0), dtype))
    model = harness.load_flux(bare_scene.checkpoint, compute_dtype=torch.bfloat16)
    bare_scene.sample(bare_scene.ours(model), steps=1)
    alive = weakref.ref(model.model.diffusion_model)
    del model
    caplog.clear()
    gc.collect()
    bare_scene.core.comfy.model_management.cleanup_models()
    held = alive() is not None
    build._modules.clear()
    assert not held


def test_two_threads_build_once(machine):
    """B37: nobody waits for a lock that a dead process left; threads of one process wait for each other."""
    machine.cards = {0: 90}
    threads = [threading.Thread(target=reason, args=(0,)) for _ in range(8)]
    [t.start() for t in threads]
    [t.join(10) for t in threads]
    assert len(machine.built) == 1


def test_a_whole_run_writes_no_file(scene, monkeypatch, tmp_path):
    """B35, B37, B41: there is no cache on disk: nothing to damage, to lock, or to find read-only."""
    from pathlib import Path

    import flux_fast_path
    root, written, original = Path(flux_fast_path.__file__).parent, [], builtins.open

    def watched(file, mode="r", *args, **kwargs):
        if set(str(mode)) & set("wax+"):
            written.append(str(file))
        return original(file, mode, *args, **kwargs)

    def listing():
        return {(str(p), p.stat().st_mtime_ns) for folder in ("fusion", "kernels", "nodes") for p in (root / folder).rglob("*") if "__pycache__" not in p.parts}

    model, before = scene.load(), listing()
    monkeypatch.setattr(builtins, "open", watched)
    for name in ("mkdir", "makedirs", "replace", "rename"):
        monkeypatch.setattr(os, name, lambda *args, name=name, **kwargs: written.append(name))
    scene.sample(scene.ours(model))
    monkeypatch.undo()
    assert written == [] and listing() == before


def test_a_missing_optional_part_of_core_disables_nothing_else(scene, monkeypatch):
    """B49: no comfy-kitchen, no server, no version module."""
    import sys
    model = scene.load()
    for name in ("comfyui_version", "server"):
        monkeypatch.setitem(sys.modules, name, None)
    told = scene.same(model)
    assert told["core"] is None and told["state"] == "fused"


def test_kernels_were_never_asked_for_on_a_cpu(bare_scene, machine):
    """B43"""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    bare_scene.same(bare_scene.load(), fused=False)
    assert machine.built == [] and not torch.cuda.is_initialized()
    harness.assert_untouched(bare_scene.models[0][0])
