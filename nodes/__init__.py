"""What the user touches: thin classes, importable without ComfyUI."""

from . import status
from .fast_path import FluxFastPath
from .latent_compare import FluxLatentCompare
from .quality_compare import FluxQualityCompare
from .quality_tier import FluxQualityTier
from .report import FluxFastPathReport

NODE_CLASS_MAPPINGS = {
    "FluxFastPath": FluxFastPath,
    "FluxQualityTier": FluxQualityTier,
    "FluxFastPathReport": FluxFastPathReport,
    "FluxQualityCompare": FluxQualityCompare,
    "FluxLatentCompare": FluxLatentCompare,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "FluxFastPath": "FLUX Fast Path",
    "FluxQualityTier": "FLUX Quality Tier",
    "FluxFastPathReport": "FLUX Fast Path Report",
    "FluxQualityCompare": "FLUX Quality Compare",
    "FluxLatentCompare": "FLUX Latent Compare",
}

status.register_routes()
