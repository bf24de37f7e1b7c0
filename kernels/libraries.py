"""Where the CUDA libraries that torch ships may lie: wheel layouts of CUDA 12 and 13, torch's own folder, conda, Windows."""

from __future__ import annotations

import glob
import os
import sys
from pathlib import Path

import torch


def candidates(name: str, wheel: str) -> list[str]:
    """Paths and names of library `name` ("nvrtc", "cublasLt"), best first; `wheel` is its folder in CUDA 12's wheel layout."""
    torch_dir = Path(torch.__file__).parent
    site, major = torch_dir.parent, (torch.version.cuda or "").split(".")[0]
    if os.name == "nt":
        folders, pattern = [torch_dir / "lib", Path(sys.prefix) / "Library" / "bin"], f"{name}64_*.dll"
        names = [f"{name}64_{major}.dll", f"{name}64_{major}0_0.dll"]
    else:
        folders = [site / "nvidia" / f"cu{major}" / "lib", site / "nvidia" / wheel / "lib", torch_dir / "lib", Path(sys.prefix) / "lib"]
        pattern = f"lib{name}*.so*"
        names = [f"lib{name}.so.{major}", f"lib{name}.so"]  # already loaded, or known to the system's loader
    # A folder may be called "AI [portable]", or hold ".alt" in its own name.
    found = [Path(path) for folder in folders for path in sorted(glob.glob(str(Path(glob.escape(str(folder))) / pattern)))]
    return [str(path) for path in found if "builtins" not in path.name and ".alt" not in path.name] + names
