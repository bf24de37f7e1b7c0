"""FLUX Quality Tier: lossless (bit-identical) or high (GELU inside the GEMM, faster, not bit-exact) for one branch of the graph."""

from __future__ import annotations

import logging

from ..fusion import session
from . import status
from .fast_path import publish, stood_aside

log = logging.getLogger("flux_fast_path")

QUALITIES = ["lossless", "high"]
TEXTS = {"lossless": "lossless: bit-identical.", "high": "high: mounts while sampling."}


class FluxQualityTier:
    """Writes the tier into the clone's options; mounting happens while it samples, and is undone after each model call."""

    CATEGORY = "model_patches/flux"
    DESCRIPTION = (
        "lossless: the image is bit-identical to ComfyUI's. high: the GELU of the up-projections runs inside their matrix product, "
        "which is faster but rounds differently: a very slightly different image, always the same one for a seed."
    )
    SEARCH_ALIASES = ["flux quality", "flux tier", "lossless", "high quality", "flux fast", "gelu epilogue"]
    RETURN_TYPES = ("MODEL",)
    RETURN_NAMES = ("model",)
    OUTPUT_TOOLTIPS = ("The same model with the tier set. Works before, after or without FLUX Fast Path.",)
    FUNCTION = "apply"

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "A FLUX.1 model. Other models pass through unchanged."}),
                "quality": (QUALITIES, {"default": "lossless", "tooltip": "lossless changes nothing in the image. high trades exact bits for speed."}),
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    def apply(self, model, quality="lossless", unique_id=None):
        if stood_aside("FLUX Quality Tier", model, unique_id):
            return (model,)
        if quality not in QUALITIES:  # a link brings what the widget does not offer
            log.warning("FLUX Quality Tier: unknown quality %r; it knows lossless and high. The tier is lossless.", quality)
            status.show_text(unique_id, f"Unknown quality {quality!r}: lossless, bit-identical.")
            quality = "lossless"
        else:
            status.show_text(unique_id, TEXTS[quality])
        return (session.apply(model, publish, unique_id, tier=quality),)
