"""Are two pictures identical, and if not, how visible is the difference?"""

import math

import torch

from . import status
from .compare_picture import draw
from .latent_compare import same_bits

AMPLIFY, LEAST, MOST = 10.0, 1.0, 1000.0  # how much brighter a difference is drawn: default and limits


class FluxQualityCompare:
    DESCRIPTION = (
        "Compares two images: identical or not, PSNR and SSIM, and a picture that shows where they differ. Use it to see that the "
        "lossless tier changes nothing, and what the high tier changes."
    )
    CATEGORY = "model_patches/flux"
    SEARCH_ALIASES = ["flux quality compare", "flux fast path", "psnr", "ssim", "image difference", "compare images", "heat map", "diff"]
    RETURN_TYPES = ("BOOLEAN", "FLOAT", "FLOAT", "IMAGE")
    RETURN_NAMES = ("identical", "psnr", "ssim", "comparison")
    OUTPUT_TOOLTIPS = (
        "True when every bit of both images is the same.",
        "Peak signal-to-noise ratio in decibels: higher is closer, infinite when equal. The mean over a batch.",
        "Structural similarity: 1 when equal. The mean over a batch.",
        "Image A, image B, and the difference made brighter, side by side.",
    )
    FUNCTION = "compare"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "image_a": ("IMAGE", {"tooltip": "The image to compare with, for example made without the fast path."}),
                "image_b": ("IMAGE", {"tooltip": "The other image. It must have the same size."}),
                "amplify": (
                    "FLOAT",
                    {
                        "default": AMPLIFY,
                        "min": LEAST,
                        "max": MOST,
                        "step": 1.0,
                        "tooltip": "How much brighter differences are drawn. It changes the comparison picture only, never the numbers.",
                    },
                ),
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    def compare(self, image_a, image_b, amplify=AMPLIFY, unique_id=None):
        a, b = _same_size(image_a.detach().cpu(), image_b.detach().cpu())
        if a.dtype != b.dtype:
            a, b = a.float(), b.float()
        equal = [same_bits(x, y) for x, y in zip(a, b)]
        psnrs = [math.inf if same else psnr(x, y) for same, x, y in zip(equal, a, b)]
        ssims = [1.0 if same else ssim(x, y) for same, x, y in zip(equal, a, b)]
        summary = _words(a, b, equal, psnrs, ssims)
        amplify = _amplification(amplify)
        picture = torch.stack([draw(x, y, amplify) for x, y in zip(a.float(), b.float())])
        status.show_text(unique_id, summary)
        return {"ui": {"text": [summary]}, "result": (all(equal), _mean_psnr(psnrs), sum(ssims) / len(ssims), picture)}


def _amplification(value):
    """A link brings any number, past the widget's limits: NaN draws as the default does, others as the nearest limit."""
    try:
        value = float(value)
    except (TypeError, ValueError):
        return AMPLIFY
    return AMPLIFY if math.isnan(value) else min(max(value, LEAST), MOST)


def psnr(a, b):
    """10·log10(1 / mean squared error) for images whose values run from 0 to 1; infinite when every value is equal."""
    error = (a.double() - b.double()).square().mean().item()
    if math.isnan(error):
        return math.nan
    return math.inf if error == 0.0 else -10.0 * math.log10(error)


def ssim(a, b):
    """Structural similarity of two (height, width, channel) images: Gaussian window of 11, sigma 1.5, borders left out."""
    try:
        from kornia.metrics import ssim as ssim_map
    except ImportError as error:
        raise RuntimeError(
            "FLUX Quality Compare measures SSIM with the Python package kornia, which ComfyUI lists in its requirements.txt, and it "
            f"cannot be imported here ({error}). Install ComfyUI's requirements again, then restart."
        ) from error
    a, b = (image.float().movedim(-1, 0).unsqueeze(0) for image in (a, b))
    shortest = min(a.shape[-2:])
    # An image smaller than the window gets the largest odd window that fits.
    window = 11 if shortest >= 11 else shortest - 1 + shortest % 2
    return ssim_map(a, b, window, max_val=1.0, eps=0.0, padding="valid").mean().item()


def _same_size(a, b):
    if a.shape[1:] != b.shape[1:]:
        raise ValueError(
            f"FLUX Quality Compare: image A is {_size(a)} and image B is {_size(b)}. Both must have the same width, height and "
            "number of channels; resize or crop one of them first."
        )
    if a.shape[0] != b.shape[0] and 1 not in (a.shape[0], b.shape[0]):
        raise ValueError(
            f"FLUX Quality Compare: A holds {a.shape[0]} images and B holds {b.shape[0]}. Both must hold the same number, or one of "
            "them a single image."
        )
    count = max(a.shape[0], b.shape[0])
    return a.expand(count, -1, -1, -1), b.expand(count, -1, -1, -1)


def _size(images):
    return f"{images.shape[2]} × {images.shape[1]} pixels with {images.shape[3]} channels"


def _mean_psnr(values):
    # One identical pair would make the mean of a batch infinite and hide the others.
    finite = [value for value in values if value != math.inf]
    return sum(finite) / len(finite) if finite else math.inf


def _words(a, b, equal, psnrs, ssims):
    count = len(equal)
    what = f"{count} image{'s' if count > 1 else ''}, {a.shape[2]} × {a.shape[1]}"
    if all(equal):
        return f"Identical: every bit of every pixel is the same ({what})."
    different = count - sum(equal)
    lines = ["Not identical" + (f": {different} of {count} images differ" if count > 1 else "") + f" ({what})."]
    broken = (~a.isfinite()).sum().item() + (~b.isfinite()).sum().item()
    if broken:
        lines.append(f"{broken:,} values are NaN or infinite: an image is broken, and PSNR and SSIM cannot be measured for it.")
    lines.append(f"PSNR {_decibels(_mean_psnr(psnrs))}" + _lowest(psnrs, _decibels))
    lines.append(f"SSIM {sum(ssims) / count:.5f}" + _lowest(ssims, "{:.5f}".format))
    apart = (a.float() - b.float()).abs().nan_to_num(nan=1.0, posinf=1.0).amax(-1)
    lines.append(f"Largest difference {apart.max().item() * 255:.2f} of 255 steps; {(apart > 0).float().mean().item():.1%} of pixels differ.")
    if not apart.any():
        lines.append("No pixel looks different: only the sign of a zero differs.")
    return "\n".join(lines)


def _lowest(values, text):
    if len(values) == 1:
        return ""
    worst = min(range(len(values)), key=lambda i: -math.inf if math.isnan(values[i]) else values[i])
    return f" (mean; lowest {text(values[worst])}, image {worst + 1})"


def _decibels(value):
    return "infinite (no pixel differs)" if value == math.inf else f"{value:.2f} dB"
