"""What a measurement was made on: GPU, driver, versions, clocks, commit. Asks no other program; what cannot be known is None."""

import hashlib
import os
import platform
import re
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from .. import __version__
from ..kernels import nvrtc

ROOT = Path(__file__).resolve().parent.parent


def commit(root: Path = ROOT):
    """FLUX_FAST_PATH_COMMIT, for a tree that is newer than its .git says; else the checked-out commit as .git says it, or None."""
    named = os.environ.get("FLUX_FAST_PATH_COMMIT")
    if named:
        return named
    try:
        git = root / ".git"
        if git.is_file():  # a worktree: the file names the folder
            git = (root / git.read_text(encoding="utf-8").partition("gitdir:")[2].strip()).resolve()
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref:"):
            return head
        name, shared = head[4:].strip(), git
        if (git / "commondir").is_file():
            shared = (git / (git / "commondir").read_text(encoding="utf-8").strip()).resolve()
        for folder in (git, shared):
            if (folder / name).is_file():
                return (folder / name).read_text(encoding="utf-8").strip()
        for line in (shared / "packed-refs").read_text(encoding="utf-8").splitlines():
            if line.endswith(" " + name):
                return line.split()[0]
    except OSError:
        pass
    return None


def source_digest(root: Path = ROOT) -> str:
    """A digest of the code that was measured (kernels/ and fusion/), so that a result names its code even between two commits."""
    digest = hashlib.sha256()
    for path in sorted(p for folder in ("kernels", "fusion") for p in (root / folder).rglob("*") if p.suffix in (".py", ".cu")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return digest.hexdigest()[:16]


def _package(name: str):
    try:
        return version(name)
    except PackageNotFoundError:
        return None


class Gpu:
    """NVML's view of one CUDA device, when nvidia-ml-py is installed; torch reports neither driver nor clocks without it."""

    def __init__(self, device: torch.device):
        self.nvml = self.handle = None
        if device.type != "cuda":
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            index = device.index or 0
            try:  # by identity: CUDA_VISIBLE_DEVICES renumbers torch's devices, not NVML's
                self.handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
            except (AttributeError, pynvml.NVMLError):
                self.handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            self.nvml = pynvml
        except Exception:  # absent, another package of that name, or a driver that refuses: facts only, never a reason to stop
            self.nvml = None

    def _ask(self, name: str, *args, scale: float = 1):
        try:
            value = getattr(self.nvml, name)(*args)
            return value / scale if scale != 1 else value
        except Exception:
            return None

    def driver(self):
        found = self.nvml and self._ask("nvmlSystemGetDriverVersion")
        return found.decode() if isinstance(found, bytes) else found

    def clocks(self):
        """Clocks, power and temperature now, or None."""
        if not self.nvml:
            return None
        n, h = self.nvml, self.handle
        return {
            "sm_mhz": self._ask("nvmlDeviceGetClockInfo", h, n.NVML_CLOCK_SM), "memory_mhz": self._ask("nvmlDeviceGetClockInfo", h, n.NVML_CLOCK_MEM),
            "power_w": self._ask("nvmlDeviceGetPowerUsage", h, scale=1000), "power_limit_w": self._ask("nvmlDeviceGetEnforcedPowerLimit", h, scale=1000),
            "temperature_c": self._ask("nvmlDeviceGetTemperature", h, n.NVML_TEMPERATURE_GPU),
        }


def nvrtc_version():
    try:
        return nvrtc.compiler_version()
    except nvrtc.KernelError:
        return None


def facts(device: torch.device, gpu: Gpu, core) -> dict:
    """Plain data for the results file. `core` is what comfy_core.load() returned, or None."""
    cuda = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if cuda else None
    return {
        "gpu": properties.name if cuda else None,
        "compute_capability": f"{properties.major}.{properties.minor}" if cuda else None,
        "memory_gib": round(properties.total_memory / 2**30, 1) if cuda else None,
        "multiprocessors": properties.multi_processor_count if cuda else None,
        "l2_mib": round(getattr(properties, "L2_cache_size", 0) / 2**20, 1) if cuda else None,
        "driver": gpu.driver(), "clocks_at_start": gpu.clocks(),
        "torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version() if cuda else None, "nvrtc": nvrtc_version(),
        "core": core.version_text if core else None, "comfy_kitchen": _package("comfy-kitchen") if core else None,
        "pack": __version__, "python": platform.python_version(), "platform": platform.platform(), "cpu": _cpu_name(), "cpu_count": os.cpu_count(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
    }


def _cpu_name():
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
        return found.group(1).strip() if found else platform.processor() or None
    except OSError:
        return platform.processor() or None


PLACES = {"--out": "DIR", "--into": "FILE"}  # where things lay on one machine says nothing to the next


def command_line(argv=None) -> str:
    """The command, without the paths of this machine."""
    words = list(map(str, sys.argv[1:] if argv is None else argv))
    for i, (option, value) in enumerate(zip(words, words[1:]), 1):
        words[i] = PLACES.get(option) or (Path(value).name if option == "--checkpoint" else value)
    return " ".join(["python -m flux_fast_path.bench", *words])
