"""What is shipped: metadata, what its code may and may not use, what importing costs, and that core loads the archive as users install it."""
import ast
import fnmatch
import json
import os
import re
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib")
ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
NEVER = ("__pycache__", ".*", "*.egg-info", "*.pyc", "venv", "build", "dist")  # what git ignores or a registry leaves out anyway


def shipped():
    """Paths, relative to the root, of what the registry's archive holds: everything but `.comfyignore`'s."""
    ignored = [line.strip() for line in (ROOT / ".comfyignore").read_text().splitlines() if line.strip() and not line.startswith("#")]
    found = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [f for f in folders if not any(fnmatch.fnmatch(f, n) for n in NEVER)]
        for name in files:
            path = (Path(folder) / name).relative_to(ROOT)
            text = path.as_posix()
            if not any(fnmatch.fnmatch(name, n) for n in NEVER) and not any(text.startswith(i) if i.endswith("/") else fnmatch.fnmatch(text, i) for i in ignored):
                found.append(path)
    return sorted(found)


SHIPPED = shipped()
PYTHON = [p for p in SHIPPED if p.suffix == ".py"]
RUNTIME = [p for p in PYTHON if p.parts[0] in ("fusion", "kernels", "nodes", "__init__.py")]


def parsed(path):
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def imports(path):
    """(level, dotted name) of every import statement."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or ""


# --- metadata ---


def test_the_version_is_one():
    version = next(n.value.value for n in parsed("__init__.py").body if isinstance(n, ast.Assign) and n.targets[0].id == "__version__")
    assert version == PROJECT["project"]["version"] and re.fullmatch(r"\d+\.\d+\.\d+", version)


def test_the_project_says_what_the_registry_asks():
    project, comfy = PROJECT["project"], PROJECT["tool"]["comfy"]
    assert project["name"] == "flux-fast-path" and "comfyui" not in project["name"].lower() and len(project["description"]) > 20
    assert project["dependencies"] == [] and project["requires-python"] and project["urls"]["Repository"].startswith("https://")
    assert any("NVIDIA CUDA" in c for c in project["classifiers"]) and sum(c.startswith("Operating System") for c in project["classifiers"]) >= 2
    assert comfy["PublisherId"] and comfy["DisplayName"] and comfy["requires-comfyui"] == ">=0.3.64" and "web" not in comfy


def test_the_licence_is_apache_2():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0" in text and PROJECT["project"]["license"] == {"file": "LICENSE"}


def test_nothing_asks_the_manager_to_install_or_run_anything():
    assert not {"requirements.txt", "install.py", "prestartup_script.py", "setup.py"} & {p.name for p in SHIPPED if len(p.parts) == 1}


def test_the_archive_holds_the_kernels_and_no_tests_or_binaries():
    names = {p.as_posix() for p in SHIPPED}
    assert {"__init__.py", "pyproject.toml", "LICENSE", "kernels/cu/common.cu"} <= names
    assert not [n for n in names if n.startswith(("tests/", ".ci/")) or n.endswith((".so", ".dll", ".exe", ".pyd", ".cubin", ".ptx", ".pkl", ".pt", ".ckpt", ".safetensors"))]
    assert sum((ROOT / p).stat().st_size for p in SHIPPED) < 8 * 2**20


def test_wheel_packages_hold_every_module_that_is_shipped():
    packages = {"flux_fast_path", *(f"flux_fast_path.{p.parts[0]}" for p in PYTHON if len(p.parts) > 1)}
    assert packages <= set(PROJECT["tool"]["setuptools"]["packages"])


# --- code ---

FORBIDDEN_MODULES = {"subprocess", "urllib", "requests", "http", "socket", "pickle", "marshal", "shelve", "importlib", "runpy", "code", "unittest", "multiprocessing", "aiohttp", "ftplib", "webbrowser", "pip", "setuptools"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "print", "breakpoint", "input"}


@pytest.mark.parametrize("path", RUNTIME, ids=str)
def test_runtime_code_uses_nothing_forbidden(path):
    used = {name.split(".")[0] for level, name in imports(path) if not level}
    allowed = {"aiohttp"} if path.as_posix() == "nodes/status.py" else set()  # core's own server library, for our report route
    assert not used & (FORBIDDEN_MODULES - allowed)
    calls = {n.func.id for n in ast.walk(parsed(path)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    assert not calls & FORBIDDEN_CALLS
    attributes = {f"{n.func.value.id}.{n.func.attr}" for n in ast.walk(parsed(path)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and isinstance(n.func.value, ast.Name)}
    assert not attributes & {"os.system", "os.popen", "torch.load", "os.remove", "os.makedirs", "shutil.rmtree", "torch.compile"}


@pytest.mark.parametrize("path", PYTHON, ids=str)
def test_the_words_that_the_registrys_scan_looks_for_do_not_occur(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    assert not re.findall(r"\b(?:eval|exec)\s*\(|\bos\.system\b|\bsubprocess\b|\bpickle\b", text)


@pytest.mark.parametrize("path", RUNTIME, ids=str)
def test_native_code_is_reached_from_two_files_only(path):
    """Elsewhere under kernels/ ctypes gives types for scalars, and nothing that loads, casts or follows a pointer."""
    tree = parsed(path)
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "ctypes"}
    used |= {a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module == "ctypes" for a in n.names}
    if path.as_posix() in ("kernels/nvrtc.py", "kernels/cublaslt.py"):
        return
    assert not used or path.parts[0] == "kernels"
    assert used <= {"Structure", "c_int", "c_int32", "c_int64", "c_float", "c_uint", "c_uint32", "c_uint64", "c_size_t"}


@pytest.mark.parametrize("path", RUNTIME, ids=str)
def test_imports_inside_the_pack_are_relative_and_point_one_way(path):
    layers = {"kernels": {"kernels"}, "fusion": {"fusion", "kernels"}, "nodes": {"nodes", "fusion", "kernels"}, "__init__.py": {"nodes"}}
    for level, name in imports(path):
        assert level or name.split(".")[0] not in {"flux_fast_path", "fusion", "kernels", "nodes", "comfy", "server", "folder_paths"} or path.parts[0] == "nodes" and name.split(".")[0] in ("server", "folder_paths", "comfy")
        if level == 2 and name:
            assert name.split(".")[0] in layers[path.parts[0]]


def test_the_package_file_is_short():
    assert len((ROOT / "__init__.py").read_text().splitlines()) < 30


# --- importing ---


def fresh(code, *args, **environment):
    """What a new interpreter prints as JSON on its last line."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), *map(str, args)], capture_output=True, text=True, env={**os.environ, **environment}, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


IMPORT = """
    import json, sys, time, builtins, os, threading
    import torch, torch.nn.functional, torch.utils._pytree
    writes, opened, torch_modules, threads = [], builtins.open, set(sys.modules), threading.active_count()
    def watch(event, args):
        if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
            writes.append(str(args[0]))
        elif event in ("os.mkdir", "os.rename", "os.remove", "socket.connect", "subprocess.Popen", "os.system"):
            writes.append(event)
    sys.addaudithook(watch)
    started = time.process_time()  # of this process: other ones may keep the cores busy
    import flux_fast_path
    took = time.process_time() - started
    print(json.dumps({"took": took, "writes": writes, "cuda": torch.cuda.is_initialized(), "threads": threading.active_count() - threads, "nodes": sorted(flux_fast_path.NODE_CLASS_MAPPINGS),
                      "new": sorted({m.split(".")[0] for m in set(sys.modules) - torch_modules})}))
"""


def test_importing_is_quick_writes_nothing_and_touches_no_gpu():
    runs = [fresh(IMPORT)]
    while min(r["took"] for r in runs) >= 0.1 and len(runs) < 6:  # the first may have to compile, and a busy machine counts too much
        runs.append(fresh(IMPORT))
    assert min(r["took"] for r in runs) < 0.1, f"importing took {min(r['took'] for r in runs):.3f} s beyond torch"
    first = runs[0]
    assert first["writes"] == [] and not first["cuda"] and first["threads"] == 0
    assert not {"comfy", "server", "triton", "numpy.testing"} & set(first["new"])
    assert {"FluxFastPath", "FluxFastPathReport", "FluxQualityCompare"} <= set(first["nodes"])


def test_importing_works_with_no_gpu_to_be_seen():
    assert fresh(IMPORT, CUDA_VISIBLE_DEVICES="")["nodes"]


LOAD = """
    import asyncio, json, logging, sys
    core, *folders = sys.argv[1:]
    sys.argv = ["main.py", "--cpu"]
    sys.path.insert(0, core)
    lines = []
    import comfy.options
    comfy.options.enable_args_parsing()
    import nodes
    class Listen(logging.Handler):
        def emit(self, record):
            lines.append((record.levelname, record.getMessage()))
    logging.getLogger().addHandler(Listen())
    logging.getLogger().setLevel(logging.INFO)
    done, classes = [], []
    for folder in folders:
        done.append(asyncio.run(nodes.load_custom_node(folder)))
        classes.append({k: id(v) for k, v in nodes.NODE_CLASS_MAPPINGS.items() if k.startswith("Flux") and "custom_nodes" in getattr(v, "RELATIVE_PYTHON_MODULE", "")})
    print(json.dumps({"done": done, "classes": classes, "lines": lines, "web": {k: v for k, v in nodes.EXTENSION_WEB_DIRS.items()}}))
"""


def install(folder):
    for path in SHIPPED:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes((ROOT / path).read_bytes())
    return folder


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """What core says of the archive unpacked as the Manager names it, and of a second copy named as GitHub's zip does."""
    if not os.environ.get("COMFYUI_PATH"):
        pytest.skip("COMFYUI_PATH is not set: no ComfyUI checkout to test against")
    custom_nodes = tmp_path_factory.mktemp("custom_nodes")
    folders = [install(custom_nodes / name) for name in ("flux-fast-path", "flux-fast-path-main")]
    for folder in folders:  # B41: program folders are often read-only
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
    return fresh(LOAD, Path(os.environ["COMFYUI_PATH"]).resolve(), *folders)


def test_core_loads_the_archive_from_a_read_only_folder(loaded):
    assert loaded["done"][0] and {"FluxFastPath", "FluxFastPathReport", "FluxQualityCompare"} <= set(loaded["classes"][0])
    assert not [line for line in loaded["lines"] if line[0] in ("ERROR", "WARNING") and "flux" in line[1].lower() and "installed twice" not in line[1]]
    assert (ROOT / "web").is_dir() is any(v.endswith("web") for v in loaded["web"].values())


def test_a_copy_that_could_not_load_does_not_silence_one_that_can(monkeypatch):
    from flux_fast_path.fusion import copies
    monkeypatch.setattr(copies, "MARK", "_mark_of_this_test")
    for name in ("broken", "good", "late"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert not copies.another_is_active("broken")  # and then its nodes raise
    assert not copies.another_is_active("good")
    copies.claim("good")
    assert copies.another_is_active("late") and not copies.another_is_active("good")


def test_a_second_copy_stays_inert_and_says_so_once(loaded):
    """B49."""
    assert loaded["classes"][1] == loaded["classes"][0]
    assert len([line for line in loaded["lines"] if "installed twice" in line[1] and "flux-fast-path-main" in line[1]]) == 1
