"""Operands for the fused operations: FLUX's shapes, random signatures, special values, every value a half-width float can have."""

import random

import torch

from ..fusion import session  # noqa: F401  (registers every operation)
from ..kernels.gelu_concat import gelu_concat
from ..kernels.head_concat import head_concat
from ..kernels.layer_norm_modulate import layer_norm_modulate
from ..kernels.proof import REGISTRY
from ..kernels.qk_norm_rope import Stream, qk_norm_rope
from ..kernels.residual_gate import residual_gate
from ..kernels.slices import ColumnSlice
from .reference_flux import apply_rope

SPECIAL = [0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 65504.0, -65504.0, 1e-40, -1e-40, 6e-8, 3.39e38, -3.39e38]
APPROXIMATE = ("linear_gelu",)  # tier "high": its contract is a bound, not bits


def exact_ops() -> list:
    """The operations that promise eager's bits and that this file has cases for."""
    return [op for name, op in REGISTRY.items() if name not in APPROXIMATE and hasattr(Maker, name)]


def uncovered() -> list:
    """Names of bit-exact operations without cases here: a check that said nothing of them would claim too much."""
    return [name for name in REGISTRY if name not in APPROXIMATE and not hasattr(Maker, name)]


class Maker:
    """Random tensors of one dtype on one device, the same ones at every start."""

    def __init__(self, dtype, device, seed=0):
        self.dtype, self.device = dtype, device
        self.generator, self.random = torch.Generator(device).manual_seed(seed), random.Random(seed)

    def values(self, *shape, special=False, scale=1.0):
        t = torch.randn(*shape, device=self.device, generator=self.generator) * scale
        if special:
            flat = t.view(-1)
            flat[torch.randint(0, flat.numel(), (len(SPECIAL),), device=self.device, generator=self.generator)] = torch.tensor(SPECIAL, device=self.device)
        return t.to(self.dtype)

    def every_value(self):
        """All 65 536 bit patterns of the dtype as [1, 64, 1024]."""
        return torch.arange(65536, device=self.device, dtype=torch.int32).to(torch.int16).view(self.dtype).view(1, 64, 1024)

    def rows(self, batch, rows, width, offset=0, padding=0, special=False):
        """[B, L, D] inside wider rows, `offset` elements into its memory."""
        wide = self.values(batch * rows * (width + padding) + offset, special=special)
        return wide[offset:].view(batch, rows, width + padding)[:, :, :width]

    def modulation(self, kind, batch, rows, width, special=False):
        """A scale, shift or gate: "chunk" of a Modulation's output, or [1|B, 1|L, D] for "model", "batch", "row"."""
        if kind == "chunk":
            return ColumnSlice(self.values(batch, 1, 6 * width, special=special), 2 * width, width)
        return self.values(*{"model": (1, 1), "batch": (batch, 1), "row": (batch, rows)}[kind], width, special=special)

    # --- argument tuples, one method per operation ---

    def residual_gate(self, batch, rows, width, gate="chunk", inplace=True, special=False, **layout):
        x, y = (self.rows(batch, rows, width, special=special, **layout) for _ in range(2))
        return x, y, self.modulation(gate, batch, rows, width, special), inplace

    def layer_norm_modulate(self, batch, rows, width, modulation="chunk", plus_one=True, special=False, **layout):
        x = self.rows(batch, rows, width, special=special, **layout)
        if modulation == "chunk":
            base = self.values(batch, 1, 6 * width, special=special)
            return x, ColumnSlice(base, width, width), ColumnSlice(base, 0, width), 1e-6, plus_one
        return x, *(self.modulation(modulation, batch, rows, width, special) for _ in range(2)), 1e-6, plus_one

    def qk_norm_rope(self, batch, tokens, heads, dim, extra=0, pe_batch=1, token_major=True, rope=apply_rope, special=False):
        """`tokens`: (text, image) lengths of a double block or one length; `extra` columns follow q, k, v as in a single block."""
        width, streams = heads * dim, []
        for length in tokens:
            weights = [self.values(dim, scale=0.2) + 1 for _ in range(2)]
            streams.append(Stream(self.values(batch, length, 3 * width + extra, special=special), 0, width, heads, dim, *weights))
        angle = torch.randn(pe_batch, 1, sum(tokens), dim // 2, device=self.device, generator=self.generator) * 3
        pe = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=-1).unflatten(-1, (2, 2)).contiguous()
        return tuple(streams), pe, None, rope, token_major

    def head_concat(self, batch, text, image, heads=24, dim=128, special=False):
        width = heads * dim
        return *(ColumnSlice(self.values(batch, n, 3 * width, special=special), 2 * width, width) for n in (text, image)), heads

    def gelu_concat(self, batch, tokens, attention, mlp, special=False):
        wide = self.values(batch, tokens, 3 * attention + mlp, scale=2.0, special=special)
        return self.values(batch, tokens, attention, special=special), ColumnSlice(wide, 3 * attention, mlp)

    def column_copy(self, batch, tokens, width, wide):
        out = torch.zeros(batch, tokens, wide, dtype=self.dtype, device=self.device)
        return out[..., :width], self.values(batch, tokens, width, special=True)


def ropes() -> list:
    """The rotations that end a q/k chain here: plain torch's, and comfy-kitchen's where core has loaded it."""
    packet = getattr(getattr(torch.ops, "comfy_kitchen", None), "apply_rope", None)
    return [apply_rope, *([packet] if packet is not None else [])]


def flux_shapes(op, make: Maker, scale=1):
    """(name, arguments) at FLUX.1's own shapes; `scale` divides the tokens, so that a CPU ends in time."""
    image, text = 4096 // scale, 512 // scale
    if op in (residual_gate, layer_norm_modulate):
        for rows in (image, text, image + text):
            yield f"(1,{rows},3072)", getattr(make, op.name)(1, rows, 3072)
    elif op is qk_norm_rope:
        for rope in ropes():
            for token_major in (True, False):
                yield f"text {text} + image {image}", make.qk_norm_rope(1, (text, image), 24, 128, rope=rope, token_major=token_major)
                yield f"joined {text + image}", make.qk_norm_rope(1, (text + image,), 24, 128, extra=12288, rope=rope, token_major=token_major)
    elif op is head_concat:
        yield f"text {text} + image {image}", make.head_concat(1, text, image)
    elif op is gelu_concat:
        yield f"(1,{text + image},3072+12288)", make.gelu_concat(1, text + image, 3072, 12288)
    else:
        yield f"(1,{text + image},3072) into 15360 columns", make.column_copy(1, text + image, 3072, 15360)


def random_signature(op, make: Maker):
    """Arguments of a random shape, layout and batch; one in three holds NaN, infinities, signed zeros, subnormals."""
    r = make.random
    batch, rows, special = r.choice((1, 1, 2, 3, 4)), r.choice((1, 2, 7, 16, 33, 77, 128, 200, r.randint(1, 400))), r.random() < 0.33
    kind = r.choice(("chunk", "chunk", "model", "batch", "row"))
    if op is residual_gate:
        layout = r.choice(({}, {}, {"offset": r.randint(1, 9)}, {"padding": r.choice((1, 4, 8))}))
        return make.residual_gate(batch, rows, r.choice((8, 64, 65, 264, 512, 3072, r.randint(1, 700))), kind, r.random() < 0.7, special, **layout)
    if op is layer_norm_modulate:
        layout = r.choice(({}, {}, {"offset": 4 * r.randint(1, 4)}, {"padding": 4 * r.randint(1, 4)}))
        return make.layer_norm_modulate(batch, rows, r.choice((4, 64, 256, 516, 2048, 3072, 5120, 4 * r.randint(1, 400))), kind, r.random() < 0.8, special, **layout)
    if op is qk_norm_rope:
        tokens = r.choice(((rows,), (rows, r.randint(1, 200))))
        heads, dim = r.choice(((24, 128), (24, 128), (2, 128), (5, 64), (r.randint(1, 12), 128)))
        extra = r.choice((0, 4 * heads * dim)) if len(tokens) == 1 else 0
        return make.qk_norm_rope(batch, tokens, heads, dim, extra, r.choice((1, batch)), r.random() < 0.6, r.choice(ropes()), special)
    if op is head_concat:
        return make.head_concat(batch, rows, r.randint(1, 300), r.choice((2, 24)), r.choice((64, 128)), special)
    if op.name == "column_copy":
        width = 8 * r.randint(1, 400)
        return make.column_copy(batch, rows, width, width + 8 * r.randint(0, 400))
    return make.gelu_concat(batch, rows, 8 * r.choice((1, 32, 384)), 8 * r.choice((1, 16, 128, r.randint(1, 500))), special)


def exhaustive(op, make: Maker):
    """(name, arguments) that together hold every bit pattern of the dtype in each operand that is computed with."""
    every, one = make.every_value(), make.values(1, 64, 1024)
    if op is gelu_concat:
        yield "all 65 536 values", (every[:, :, :8], every)
    elif op is residual_gate:
        for i, name in enumerate(("x", "y", "gate")):
            operands = [one.clone(), make.values(1, 64, 1024), make.values(1, 64, 1024)]
            operands[i] = every.clone()
            yield f"all 65 536 values as {name}", (*operands, True)
    elif op is layer_norm_modulate:
        yield "all 65 536 values as scale", (one, every, make.values(1, 64, 1024), 1e-6, True)
        yield "all 65 536 values as shift", (one, make.values(1, 64, 1024), every, 1e-6, True)
        spread = every.reshape(-1)[torch.randperm(65536, device=make.device, generator=make.generator)].view(512, 1, 128)
        yield "all 65 536 values as x", (spread, make.values(1, 1, 128), make.values(1, 1, 128), 1e-6, True)
    elif op is head_concat:
        wide = every.reshape(1, 8, 8192)[:, :, :3 * 2688].contiguous()
        yield "bit patterns moved", (ColumnSlice(wide, 5376, 2688), ColumnSlice(wide, 2688, 2688), 21)
    elif op is qk_norm_rope:
        yield "special values", make.qk_norm_rope(2, (40, 60), 24, 128, special=True)
