"""FLUX Fast Path: the node that turns the fused kernels on for one branch of the graph."""

from __future__ import annotations

import logging

from ..fusion import session
from . import status

log = logging.getLogger("flux_fast_path")


def publish(run, nodes):
    """Show the run's line on our nodes and hand the report to panel and API."""
    report = run.to_dict()
    for node_id in nodes:
        status.show_text(node_id, report["text"])
    status.publish_report(report)


def why_not_patcher(model) -> str | None:
    """Why `model` is nothing that a wrapper can be put on, or None."""
    if model is None:
        return "no model is connected"
    missing = [name for name in ("clone", "add_wrapper_with_key", "remove_wrappers_with_key", "model_options") if not hasattr(model, name)]
    return f"{type(model).__name__} is not a ComfyUI MODEL" if missing else None


def stood_aside(title: str, model, node_id) -> bool:
    """Whether `model` is none that we can shape; if so, log and node say why."""
    reason = why_not_patcher(model) or session.why_not_apply(model)
    if reason:
        log.warning("%s stepped aside: %s. The model is passed through unchanged.", title, reason)
        status.show_text(node_id, f"Stepped aside: {reason}. Image unaffected.")
    return reason is not None


class FluxFastPath:
    """Clones the model and adds one wrapper; everything else happens while it samples."""

    CATEGORY = "model_patches/flux"
    DESCRIPTION = (
        "Runs FLUX.1's memory-bound steps as fused CUDA kernels. The image is bit-identical: each kernel is proven against "
        "ComfyUI's own result on your GPU before it is used, and whatever cannot be proven runs as it always did."
    )
    SEARCH_ALIASES = ["flux fast", "flux speed", "faster flux", "flux accelerate", "lossless speedup", "fused kernels", "flux fast path"]
    RETURN_TYPES = ("MODEL",)
    RETURN_NAMES = ("model",)
    OUTPUT_TOOLTIPS = ("The same model with the fast path on. Connect it to your sampler.",)
    FUNCTION = "apply"

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "A FLUX.1 model (dev, schnell, Kontext, Fill, fine-tunes), with or without LoRA. Other models pass through unchanged."}),
                "enabled": ("BOOLEAN", {"default": True, "tooltip": "Off passes the model through untouched."}),
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    def apply(self, model, enabled=True, unique_id=None):
        if not enabled:
            before = session.is_applied(model)
            status.show_text(unique_id, "Off here; what the nodes before it set stays." if before else "Off. Image unaffected.")
            return (model,)
        if stood_aside("FLUX Fast Path", model, unique_id):
            return (model,)
        status.show_text(unique_id, "Ready. Kernels are built and proven at the first step.")
        return (session.apply(model, publish, unique_id, fast_path=True),)
