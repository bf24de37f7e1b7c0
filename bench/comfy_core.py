"""Real ComfyUI in this process, from the checkout that COMFYUI_PATH names. FLUX_FAST_PATH_COMFY_ARGS adds command-line switches for core.

One process holds one core with one set of switches: the first call decides them.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

_loaded = None


def why_not() -> str | None:
    """Why there is no core to import, or None."""
    path = os.environ.get("COMFYUI_PATH")
    if not path:
        return "COMFYUI_PATH is not set"
    if not (Path(path) / "comfy" / "ldm" / "flux" / "model.py").is_file():
        return f"COMFYUI_PATH={path} holds no comfy/ldm/flux/model.py"
    return None


def load(dynamic_vram: bool = False):
    """(core, None), or (None, why the reference model is used instead)."""
    reason = why_not()
    if reason:
        return None, reason
    try:
        return import_core(dynamic_vram), None
    except Exception as error:  # a core without its requirements: the reference model needs none of them
        return None, f"ComfyUI at {os.environ['COMFYUI_PATH']} could not be imported: {type(error).__name__}: {error}"


def import_core(dynamic_vram: bool):
    """Core's modules and facts: path, version, version_text, comfy (the package), nodes, folder_paths, device, dynamic_vram (whether it is on).

    `dynamic_vram`: let core manage memory as its main.py would, instead of the classic way that a core imported as a library keeps.
    """
    global _loaded
    if _loaded is None:
        _loaded = _import(str(Path(os.environ["COMFYUI_PATH"]).resolve()), dynamic_vram)
    return _loaded


def _switches() -> list[str]:
    extra = shlex.split(os.environ.get("FLUX_FAST_PATH_COMFY_ARGS", ""))
    if torch.cuda.is_available():
        return extra
    # On a CPU core would choose its sub-quadratic attention, which no NVIDIA user ever runs.
    return ["--cpu", *([] if any("attention" in a for a in extra) else ["--use-pytorch-cross-attention"]), *extra]


def _import(path: str, dynamic_vram: bool):
    sys.path.insert(0, path)  # it stays: core imports lazily
    for name in ("comfy", "nodes", "folder_paths", "server"):
        found = getattr(sys.modules.get(name), "__file__", None)
        if found and not found.startswith(path):
            raise RuntimeError(f"a module named {name!r} from {found} stands in for core's")
    argv, handlers, level = sys.argv, logging.root.handlers[:], logging.root.level
    sys.argv = ["main.py", *_switches()]
    try:
        import comfy.options

        comfy.options.enable_args_parsing()  # without it core parses an empty command line
        dynamic = dynamic_vram and _prepare_dynamic_vram()
        import comfy.ldm.flux.model
        import comfy.model_base
        import comfy.model_management
        import comfy.model_patcher
        import comfy.ops
        import comfy.sample
        import comfy.sd
        import comfy.supported_models
        import comfy.utils
        import comfyui_version
        import folder_paths

        import nodes

        dynamic = dynamic and _switch_on_dynamic_vram()
    finally:
        sys.argv, logging.root.handlers[:] = argv, handlers
        logging.root.setLevel(level)
    comfy.utils.set_progress_bar_enabled(False)
    text = comfyui_version.__version__
    return SimpleNamespace(
        path=path, version=tuple(int(n) for n in text.split(".")[:3]), version_text=text, comfy=comfy, nodes=nodes, folder_paths=folder_paths,
        device=comfy.model_management.get_torch_device(), dynamic_vram=dynamic,
    )


def _prepare_dynamic_vram() -> bool:
    """First half of what core's main.py does before it imports the rest; false where this core or this machine has none."""
    import comfy.cli_args

    if not getattr(comfy.cli_args, "enables_dynamic_vram", lambda: False)() or not torch.cuda.is_available():
        return False
    import comfy_aimdo.control

    comfy_aimdo.control.init()
    return True


def _switch_on_dynamic_vram() -> bool:
    """Second half."""
    import comfy.memory_management
    import comfy.model_management as mm
    import comfy.model_patcher
    import comfy_aimdo.control
    from comfy.cli_args import args

    if not mm.is_nvidia():
        return False
    if hasattr(comfy_aimdo.control, "init_devices") and hasattr(mm, "get_all_torch_devices"):
        devices = [d.index for d in mm.get_all_torch_devices()]
        try:
            ready = comfy_aimdo.control.init_devices((d, int(args.vram_headroom * 1024**3)) for d in devices)
        except TypeError:  # comfy-aimdo before headroom became an argument
            ready = comfy_aimdo.control.init_devices(d for d in devices)
    else:
        ready = comfy_aimdo.control.init_device(mm.get_torch_device().index)
    if ready:
        getattr(comfy_aimdo.control, "set_log_warning", lambda: None)()  # it starts with a line for every allocation
        comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
        comfy.memory_management.aimdo_enabled = True
    return bool(ready)
