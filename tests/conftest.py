"""Fixtures of every suite. COMFYUI_PATH names a checkout for the real-ComfyUI one; without it those tests skip and everything else runs."""
import os
import sys

import pytest
import torch

# At the end of the path, so that core's own top-level modules (`nodes`, `server`, `utils`, `tests`) always win over files of this folder.
sys.path.append(os.path.dirname(os.path.abspath(__file__)))

import comfy_harness  # noqa: E402
from flux_fast_path.nodes import status  # noqa: E402
from fusion_scene import fused, inference, one_thread, patcher  # noqa: E402, F401  (a fixture is known where a conftest names it)


def pytest_collection_modifyitems(items):
    """Tests marked `cuda` or `comfyui` state their reason here, so that a test file need not."""
    no_cuda = None if torch.cuda.is_available() else pytest.mark.skip(reason="torch sees no CUDA device")
    no_comfy = comfy_harness.why_not()
    no_comfy = no_comfy and pytest.mark.skip(reason=no_comfy)
    for item in items:
        for marker, skip in (("cuda", no_cuda), ("comfyui", no_comfy)):
            if skip and item.get_closest_marker(marker):
                item.add_marker(skip)


@pytest.fixture
def no_reports():
    """None from earlier tests, none for later ones."""
    status._reports.clear()
    yield
    status._reports.clear()


@pytest.fixture(scope="session")
def comfy():
    """Real ComfyUI, imported into this process once."""
    reason = comfy_harness.why_not()
    if reason:
        pytest.skip(reason)
    return comfy_harness.import_comfy()


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    return comfy_harness.write_tiny_flux_checkpoint(tmp_path_factory.mktemp("tiny_flux") / "tiny_flux.safetensors", seed=1)


@pytest.fixture(scope="session")
def tiny_lora(tmp_path_factory):
    return comfy_harness.write_tiny_lora(tmp_path_factory.mktemp("tiny_lora") / "tiny_lora.safetensors", seed=2)


@pytest.fixture
def tiny_flux(comfy, tiny_checkpoint):
    """A freshly loaded tiny FLUX.1 MODEL, as core's UNETLoader returns it."""
    return comfy_harness.load_flux(tiny_checkpoint)
