"""Real ComfyUI in this process, from the checkout that COMFYUI_PATH names. FLUX_FAST_PATH_COMFY_ARGS adds command-line switches for core."""

import logging
import os
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

_loaded = None


def load():
    """(core, None), or (None, why the reference model is used instead). Core's command line is global: the first call decides it."""
    global _loaded
    path = os.environ.get("COMFYUI_PATH")
    if not path:
        return None, "COMFYUI_PATH is not set"
    if not (Path(path) / "comfy" / "ldm" / "flux" / "model.py").is_file():
        return None, f"COMFYUI_PATH={path} holds no comfy/ldm/flux/model.py"
    if _loaded is None:
        try:
            _loaded = _import(str(Path(path).resolve()))
        except Exception as error:  # a core without its requirements: the reference model needs none of them
            return None, f"ComfyUI at {path} could not be imported: {type(error).__name__}: {error}"
    return _loaded, None


def _switches():
    extra = shlex.split(os.environ.get("FLUX_FAST_PATH_COMFY_ARGS", ""))
    if torch.cuda.is_available():
        return extra
    # On a CPU core would choose its sub-quadratic attention, which no NVIDIA user ever runs.
    return ["--cpu", *([] if any("attention" in a for a in extra) else ["--use-pytorch-cross-attention"]), *extra]


def _import(path: str):
    sys.path.insert(0, path)  # it stays: core imports lazily
    for name in ("comfy", "nodes"):
        found = getattr(sys.modules.get(name), "__file__", None)
        if found and not found.startswith(path):
            raise RuntimeError(f"a module named {name!r} from {found} stands in for core's")
    argv, handlers, level = sys.argv, logging.root.handlers[:], logging.root.level
    sys.argv = ["main.py", *_switches()]
    try:
        import comfy.options

        comfy.options.enable_args_parsing()  # without it core parses an empty command line
        import comfy.ldm.flux.model
        import comfy.model_base
        import comfy.model_management
        import comfy.model_patcher
        import comfy.ops
        import comfy.sample
        import comfy.supported_models
        import comfy.utils
        import comfyui_version

        import nodes
    finally:
        sys.argv, logging.root.handlers[:] = argv, handlers
        logging.root.setLevel(level)
    comfy.utils.set_progress_bar_enabled(False)
    return SimpleNamespace(path=path, version_text=comfyui_version.__version__, comfy=comfy, nodes=nodes)
