"""Shows what FLUX Fast Path did in the run that made a latent, in words and as data."""

import json

from . import status
from .report_text import describe

NOTHING = (
    "No run recorded: nothing was sampled with FLUX Fast Path this time, or the picture came from ComfyUI's cache. "
    "Put the node FLUX Fast Path between the model loader and the sampler, and change the seed to sample again."
)
PLAIN = "This model has no FLUX Fast Path on it: the node is off, bypassed or in another branch. ComfyUI drew the image in its usual way."


class FluxFastPathReport:
    DESCRIPTION = (
        "Says what FLUX Fast Path did while this latent was sampled: what was fused, on which GPU, how much time it saved, and why it "
        "stepped aside when it did. Place it after the sampler; the latent passes through unchanged."
    )
    CATEGORY = "model_patches/flux"
    SEARCH_ALIASES = ["flux fast path report", "flux fast", "fast path status", "flux speed", "flux report", "acceleration report"]
    RETURN_TYPES = ("LATENT", "STRING")
    RETURN_NAMES = ("latent", "report")
    OUTPUT_TOOLTIPS = ("The latent that came in, untouched.", "The report in words.")
    FUNCTION = "report"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "latent": ("LATENT", {"tooltip": "From the sampler. It makes this node wait until sampling is over and passes through."}),
            },
            "optional": {
                "model": (
                    "MODEL",
                    {"tooltip": "The model that the sampler used: its own run is reported. Not connected: the newest run of this prompt."},
                ),
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    def report(self, latent, model=None, unique_id=None):
        reports = status.latest_reports()
        if model is None:
            prompt = status.current_prompt()
            reports = [r for r in reports if prompt is None or r.get("prompt") == prompt]
        else:
            token = _token(model)
            # The model's own run, else one that another of our nodes made from it.
            reports = [r for r in reports if token and r.get("token") == token] or [r for r in reports if token and token in (r.get("lineage") or ())]
        found = reports[0] if reports else None
        text = describe(found) if found else PLAIN if model is not None and token is None else NOTHING
        status.show_text(unique_id, text)
        # As text: ComfyUI counts every dictionary in such a list as a file that the prompt has made.
        data = [json.dumps(found, allow_nan=False)] if found else []
        return {"ui": {"flux_fast_path_report": data, "text": [text]}, "result": (latent, text)}


def _token(model):
    found = getattr(model, "model_options", None)
    for key in ("transformer_options", "flux_fast_path", "token"):
        found = found.get(key) if isinstance(found, dict) else None  # another pack may keep anything there
    return status.plain(found)
