"""What the user touches: thin classes, importable without ComfyUI."""

from . import status
from .fast_path import FluxFastPath
from .latent_compare import FluxLatentCompare
from .quality_compare import FluxQualityCompare
from .report import FluxFastPathReport

NODE_CLASS_MAPPINGS = {
    "FluxFastPath": FluxFastPath,
    "FluxFastPathReport": FluxFastPathReport,
    "FluxQualityCompare": FluxQualityCompare,
    "FluxLatentCompare": FluxLatentCompare,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "FluxFastPath": "FLUX Fast Path",
    "FluxFastPathReport": "FLUX Fast Path Report",
    "FluxQualityCompare": "FLUX Quality Compare",
    "FluxLatentCompare": "FLUX Latent Compare",
}

status.register_routes()
