"""NVRTC is found, compiles every kernel for every architecture we name, and says what is wrong when it cannot. No GPU is needed."""
import ctypes.util
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from flux_fast_path.kernels import build, libraries, nvrtc
from flux_fast_path.kernels.nvrtc import KernelError


def why_no_nvrtc():
    try:
        nvrtc.nvrtc()
    except KernelError as error:
        return f"no NVRTC here: {error}"[:200]
    return None


REASON = why_no_nvrtc()
needs_nvrtc = pytest.mark.skipif(REASON is not None, reason=REASON or "")
CASES = [(arch, dtype) for arch in (75, 80, 86, 89, 90, 100, 120) for dtype in (torch.bfloat16, torch.float16) if arch >= build.MIN_ARCH[dtype]]
SIMPLE = 'extern "C" __global__ void simple(float* x) { x[threadIdx.x] += 1.0f; }'


@needs_nvrtc
def test_the_compiler_states_its_version_and_what_it_knows():
    major, minor = map(int, nvrtc.compiler_version().split("."))
    known = nvrtc.supported_archs()
    assert major >= 11 and minor >= 0 and known == sorted(known) and {80, 86, 89, 90} <= set(known)
    assert torch.version.cuda is None or major == int(torch.version.cuda.split(".")[0])


@needs_nvrtc
@pytest.mark.parametrize("arch, dtype", CASES, ids=lambda v: str(v))
def test_every_kernel_compiles_to_machine_code(arch, dtype):
    if arch not in nvrtc.supported_archs():
        pytest.skip(f"NVRTC {nvrtc.compiler_version()} does not know sm_{arch}")
    code = build.compile_for(arch, dtype)
    assert code[:4] == b"\x7fELF"
    for name in ("residual_gate_vec", "residual_gate_scalar", "layer_norm_modulate_0", "qk_norm_rope_0_128", "qk_norm_rope_1_64", "head_concat", "gelu_concat_0", "gelu_concat_1"):
        assert name.encode() in code, f"{name} is not in the code for sm_{arch}"


@needs_nvrtc
def test_a_gpu_newer_than_the_compiler_gets_ptx_of_the_newest_it_knows():
    target = nvrtc.target_for(999)
    assert target == f"compute_{nvrtc.supported_archs()[-1]}"
    code = nvrtc.compile_source(build.source(), target, (build.DEFINES[torch.bfloat16],))
    assert b".target" in code and b"residual_gate_vec" in code and not code.startswith(b"\x7fELF")


@needs_nvrtc
def test_a_gpu_between_two_known_ones_gets_ptx_of_the_older():
    known = nvrtc.supported_archs()
    unknown = next(a for a in range(known[-1] - 1, 80, -1) if a not in known)
    assert nvrtc.target_for(unknown) == f"compute_{max(a for a in known if a < unknown)}"


@needs_nvrtc
@pytest.mark.parametrize("arch", [35, 61, 70, 72])
def test_an_old_gpu_is_told_so(arch):
    with pytest.raises(KernelError, match=rf"sm_{arch} is not supported \(sm_7\d or newer is\)"):
        nvrtc.target_for(arch)


def test_bfloat16_on_turing_is_told_so():
    with pytest.raises(KernelError, match="bfloat16 needs sm_80 or newer, this GPU is sm_75"):
        build.compile_for(75, torch.bfloat16)


@needs_nvrtc
def test_a_compile_error_carries_the_compilers_words():
    with pytest.raises(KernelError, match=r"(?s)could not compile for sm_90.*no_such_type"):
        nvrtc.compile_source('extern "C" __global__ void f(no_such_type x) {}', "sm_90")
    assert nvrtc.compile_source(SIMPLE, "sm_90")[:4] == b"\x7fELF", "and the next compilation works"


@needs_nvrtc
def test_an_unknown_target_is_an_error_with_the_target_in_it():
    with pytest.raises(KernelError, match="sm_1"):
        nvrtc.compile_source(SIMPLE, "sm_1")


@needs_nvrtc
def test_compiling_twice_gives_the_same_code():
    assert nvrtc.compile_source(SIMPLE, "sm_80") == nvrtc.compile_source(SIMPLE, "sm_80")


@needs_nvrtc
def test_the_source_asks_for_no_header():
    assert "#include" not in build.source()


def test_a_missing_library_names_every_place_that_was_tried(monkeypatch):
    monkeypatch.setattr(nvrtc, "_libraries", {})
    monkeypatch.setattr(nvrtc, "candidates", lambda *names: ["/nowhere/libnvrtc.so.13", "libnvrtc-missing.so"])
    with pytest.raises(KernelError, match=r"NVRTC.* was not found or cannot be loaded \(/nowhere/libnvrtc\.so\.13: .*; libnvrtc-missing\.so: ") as first:
        nvrtc.nvrtc()
    assert "\n" not in str(first.value)
    monkeypatch.setattr(nvrtc, "candidates", lambda *names: [])
    with pytest.raises(KernelError, match="nothing to try"):
        nvrtc.nvrtc()


def test_a_library_that_lacks_a_function_is_passed_over(monkeypatch):
    monkeypatch.setattr(nvrtc, "_libraries", {})
    monkeypatch.setattr(nvrtc, "candidates", lambda *names: [ctypes.util.find_library("c") or "libc.so.6"])
    with pytest.raises(KernelError, match=r"run-time compiler \(NVRTC\) is too old: it has no nvrtcVersion \(libc"):
        nvrtc.nvrtc()


def test_an_old_driver_is_not_called_a_missing_one(monkeypatch):
    monkeypatch.setattr(nvrtc, "_libraries", {})

    def old(name):
        if name in ("libcuda.so", "nvcuda.dll"):
            return SimpleNamespace(**{known: SimpleNamespace() for known in nvrtc._DRIVER_SIGNATURES if known != "cuLaunchKernelEx"})
        raise OSError("cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", old)
    with pytest.raises(KernelError, match=r"^the NVIDIA driver is too old: it has no cuLaunchKernelEx \("):
        nvrtc.driver()


def test_a_missing_driver_is_an_error_and_not_a_crash(monkeypatch):
    monkeypatch.setattr(nvrtc, "_libraries", {})
    monkeypatch.setattr(ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(f"{name}: cannot open shared object file")))
    with pytest.raises(KernelError, match=r"the NVIDIA driver was not found or cannot be loaded \(.*libcuda|nvcuda"):
        nvrtc.driver()


@pytest.mark.parametrize("os_name, wanted", [("posix", "libnvrtc.so"), ("nt", "nvrtc64_")])
def test_places_are_named_for_each_system(monkeypatch, os_name, wanted):
    monkeypatch.setattr(libraries, "os", SimpleNamespace(name=os_name))
    places = libraries.candidates("nvrtc", "cuda_nvrtc")
    assert places and all(wanted.split(".")[0] in p for p in places) and not any("builtins" in p or ".alt." in p for p in places)


@pytest.mark.parametrize("folder", ["plain", "joe.altman", "AI [portable]", "builtins", "ünï 中文"])
def test_libraries_are_found_whatever_the_folders_are_called(monkeypatch, tmp_path, folder):
    site = tmp_path / folder / "site-packages"
    (site / "torch" / "lib").mkdir(parents=True)
    wanted = site / "torch" / "lib" / "libnvrtc.so.13"
    for name in (wanted, wanted.with_name("libnvrtc-builtins.so.13.0"), wanted.with_name("libnvrtc.alt.so.13")):
        name.touch()
    monkeypatch.setattr(libraries, "os", SimpleNamespace(name="posix"))
    monkeypatch.setattr(torch, "__file__", str(site / "torch" / "__init__.py"))
    assert [path for path in libraries.candidates("nvrtc", "cuda_nvrtc") if path.startswith(str(tmp_path))] == [str(wanted)]


def test_reasons_name_what_is_missing():
    assert build.unavailable(torch.device("cpu"), torch.bfloat16) == "the model runs on cpu, not on an NVIDIA GPU"
    assert "float32" in build.unavailable(torch.device("cuda", 0), torch.float32)
    for kind in ("mps", "xpu"):
        assert kind in build.unavailable(torch.device(kind), torch.bfloat16)


def test_rocm_is_told_so(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert "ROCm" in build.unavailable(torch.device("cuda", 0), torch.bfloat16)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(build, "_modules", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: "GPU")
    monkeypatch.setattr(nvrtc, "supported_archs", lambda: [75, 80, 90])


def test_device_code_that_cannot_be_read_is_named_once_and_nothing_else_is_blamed(hopper, monkeypatch, caplog, tmp_path):
    folder = tmp_path / "cu"
    shutil.copytree(Path(build.__file__).parent / "cu", folder)
    monkeypatch.setattr(build, "__file__", str(tmp_path / "build.py"))
    (folder / "residual_gate.cu").unlink()
    for _ in range(3):
        why = build.unavailable(torch.device("cuda", 0), torch.bfloat16)
        assert str(folder / "residual_gate.cu") in why and "No such file" in why
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    (folder / "residual_gate.cu").write_bytes(b"\xff\xfe")
    with pytest.raises(KernelError, match=r"residual_gate\.cu cannot be read .*utf-8"):
        build.source()


def test_whatever_a_build_fails_with_is_one_remembered_error(hopper, monkeypatch, caplog):
    monkeypatch.setattr(nvrtc, "compile_source", lambda *a: (_ for _ in ()).throw(ZeroDivisionError("of all things")))
    for _ in range(3):
        assert build.unavailable(torch.device("cuda", 0), torch.bfloat16) == "building the kernels failed (ZeroDivisionError: of all things)"
    assert [r.levelname for r in caplog.records] == ["WARNING"]


def test_a_failed_build_is_remembered_and_not_tried_again(hopper, monkeypatch, caplog):
    tries = []
    monkeypatch.setattr(nvrtc, "compile_source", lambda *a: tries.append(a) or (_ for _ in ()).throw(KernelError("no compiler today\nsecond line")))
    for _ in range(3):
        assert build.unavailable(torch.device("cuda", 0), torch.bfloat16) == "no compiler today"
    assert len(tries) == 1 and [r.levelname for r in caplog.records] == ["WARNING"] and "Images are unaffected" in caplog.text
