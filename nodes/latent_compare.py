"""Are two latents the same, bit for bit, and if not, how far apart are they?"""

import math

import torch

from . import status

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class FluxLatentCompare:
    DESCRIPTION = (
        "Compares two latents bit for bit. Use it after two samplers with the same seed to see for yourself that FLUX Fast Path "
        "changes nothing."
    )
    CATEGORY = "model_patches/flux"
    SEARCH_ALIASES = ["flux latent compare", "flux fast path", "bit identical", "compare latents", "latent difference", "same seed"]
    RETURN_TYPES = ("BOOLEAN", "FLOAT", "FLOAT", "STRING")
    RETURN_NAMES = ("bits_equal", "max_difference", "relative_difference", "summary")
    OUTPUT_TOOLTIPS = (
        "True when every bit of both latents is the same.",
        "The largest difference between two values; 0 when all values are equal.",
        "Size (L2 norm) of the difference divided by that of latent A; 0 when all values are equal.",
        "The result in words.",
    )
    FUNCTION = "compare"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "latent_a": ("LATENT", {"tooltip": "The latent to compare with, for example from the sampler without the fast path."}),
                "latent_b": ("LATENT", {"tooltip": "The other latent. It must have the same size."}),
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    def compare(self, latent_a, latent_b, unique_id=None):
        pairs = list(zip(*_same_shapes(_tensors(latent_a), _tensors(latent_b))))
        equal = all(same_bits(a, b) for a, b in pairs)
        largest, relative = difference(pairs)
        summary = _words(pairs, equal, largest, relative)
        status.show_text(unique_id, summary)
        return {"ui": {"text": [summary]}, "result": (equal, largest, relative, summary)}


def same_bits(a, b):
    """Whether two tensors hold the same bits: NaN equals the same NaN, −0.0 does not equal 0.0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return not unequal_bits(a, b).any().item()


def unequal_bits(a, b):
    """Where two tensors of one dtype hold different bits."""
    whole = _INTEGERS[a.element_size()]
    return a.detach().cpu().contiguous().view(whole) != b.detach().cpu().contiguous().view(whole)


def difference(pairs):
    """(largest, relative L2) difference over pairs of tensors. A NaN against anything but itself is infinitely far."""
    largest = squares = reference = 0.0
    for a, b in pairs:
        x, y = a.detach().cpu().double(), b.detach().cpu().double()
        apart = (x - y).abs()
        apart[(x == y) | (x.isnan() & y.isnan())] = 0.0
        apart = apart.nan_to_num(nan=math.inf, posinf=math.inf)
        largest = max(largest, apart.max().item() if apart.numel() else 0.0)
        squares += apart.square().sum().item()
        reference += x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).square().sum().item()
    if squares == 0.0:
        return largest, 0.0
    return largest, math.sqrt(squares / reference) if reference else math.inf


def _tensors(latent):
    samples = latent["samples"]
    # Models with several streams (video with sound) keep a list of tensors inside one latent.
    return list(samples.unbind()) if getattr(samples, "is_nested", False) else [samples]


def _same_shapes(a, b):
    sizes_a, sizes_b = ([" × ".join(map(str, t.shape)) for t in tensors] for tensors in (a, b))
    if sizes_a != sizes_b:
        raise ValueError(
            f"FLUX Latent Compare: latent A is {', '.join(sizes_a)} and latent B is {', '.join(sizes_b)}. "
            "Both must have the same size (batch × channels × height × width)."
        )
    return a, b


def _words(pairs, equal, largest, relative):
    size = ", ".join(" × ".join(map(str, a.shape)) for a, _ in pairs)
    if equal:
        return f"Bit-identical: every bit of both latents is the same ({size})."
    total = sum(a.numel() for a, _ in pairs)
    if any(a.dtype != b.dtype for a, b in pairs):
        kinds = " and ".join(_kind(t) for t in pairs[0])
        lines = [f"Not bit-identical: the latents are stored in different number formats ({kinds})."]
    else:
        count = sum(unequal_bits(a, b).sum().item() for a, b in pairs)
        lines = [f"Not bit-identical: {count:,} of {total:,} values differ ({size})."]
        if largest == 0.0:
            lines.append("Every value is equal all the same: only the sign of a zero or the bits of a NaN differ.")
    lines.append(f"Largest difference {largest:.6g}, relative difference {relative:.6g}.")
    broken = sum((~t.isfinite()).sum().item() for pair in pairs for t in pair)
    if broken:
        lines.append(f"{broken:,} values are NaN or infinite: at least one latent is broken (it would decode to a black image).")
    return "\n".join(lines)


def _kind(tensor):
    return str(tensor.dtype).replace("torch.", "")
