"""The picture that FLUX Quality Compare returns: A | B | difference, with a legend below."""

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

# From "no difference" to "at least 1 / amplify": black, purple, red, orange, yellow, white.
_STOPS = np.linspace(0.0, 1.0, 6)
_COLOURS = np.array([[0, 0, 0], [64, 16, 110], [190, 40, 70], [245, 125, 20], [250, 215, 60], [255, 255, 255]], dtype=np.float32)
_INK = (235, 235, 235)
_PAPER = (24, 24, 24)


def draw(a, b, amplify):
    """(height, width, channel) images in 0…1 → one (height + legend, 3 · width, 3) image."""
    height, width = a.shape[:2]
    apart = (a - b).abs().nan_to_num(nan=1.0, posinf=1.0).amax(-1) * amplify
    panels = [_rgb(a), _rgb(b), heat(apart.clamp(0.0, 1.0).numpy())]
    strip = Image.fromarray(_legend(width, max(24, min(96, height // 20)), amplify))
    canvas = Image.new("RGB", (3 * width, height + strip.height), _PAPER)
    for index, panel in enumerate(panels):
        canvas.paste(Image.fromarray(panel), (index * width, 0))
    canvas.paste(strip, (0, height))
    return torch.from_numpy(np.asarray(canvas).astype(np.float32) / 255.0)


def heat(values):
    """0…1 → colours, as bytes."""
    return np.stack([np.interp(values, _STOPS, _COLOURS[:, c]) for c in range(3)], -1).round().astype(np.uint8)


def _rgb(image):
    colours = image[..., :3] if image.shape[-1] >= 3 else image[..., :1].expand(*image.shape[:2], 3)
    return (colours.nan_to_num(nan=0.0).clamp(0.0, 1.0) * 255.0).round().to(torch.uint8).numpy()


def _legend(width, height, amplify):
    strip = Image.new("RGB", (3 * width, height), _PAPER)
    pen = ImageDraw.Draw(strip)
    for index, label in enumerate(("A", "B", f"difference × {amplify:g}")):
        _write(pen, label, index * width + width // 64 + 2, 0, width if index < 2 else width // 2, height)
    bar = np.tile(heat(np.linspace(0.0, 1.0, max(2, width // 4), dtype=np.float32)), (max(2, height // 3), 1, 1))
    left = 2 * width + width // 2 + width // 16
    strip.paste(Image.fromarray(bar), (left, (height - bar.shape[0]) // 2))
    _write(pen, "0", left - width // 32 - 4, 0, width // 16, height)
    _write(pen, f"≥ {255 / amplify:.3g} / 255", left + bar.shape[1] + width // 64 + 2, 0, width // 6, height)
    return np.asarray(strip)


def _write(pen, text, left, top, width, height):
    """One line, as large as fits; nothing when the picture is too small to read it."""
    for size in range(max(8, height // 2), 6, -1):
        try:
            font = ImageFont.load_default(size)
        except (TypeError, ImportError):  # Pillow before 10.1, or built without FreeType: one small font of ASCII only
            font = ImageFont.load_default()
            text = text.replace("×", "x").replace("≥", ">=").encode("ascii", "replace").decode()
        box = pen.textbbox((0, 0), text, font=font)
        if box[2] - box[0] <= width:
            pen.text((left, top + (height - box[3] - box[1]) // 2), text, fill=_INK, font=font)
            return
