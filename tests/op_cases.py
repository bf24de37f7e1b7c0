"""Operands for the operations at FLUX's shapes, ragged ones and worse, on any device. Special values are mixed into all of them."""

import torch

SPECIAL = [0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 65504.0, -65504.0, 1e-40, -1e-40, 6e-8, 3.39e38, -3.39e38]


def values(*shape, dtype, device, generator, special=True):
    """Random normals with a few special values (NaN, infinities, signed zeros, subnormals, largest numbers) sprinkled in."""
    t = torch.randn(*shape, dtype=torch.float32, device=device, generator=generator)
    if special and t.numel() > 64:
        flat = t.view(-1)
        where = torch.randint(0, flat.numel(), (len(SPECIAL),), device=device, generator=generator)
        flat[where] = torch.tensor(SPECIAL, device=device)
    return t.to(dtype)


def bits_equal(a, b):
    if isinstance(a, torch.Tensor):
        assert a.shape == b.shape and a.dtype == b.dtype
        if a.dtype in (torch.bfloat16, torch.float16):
            differ = int((a.contiguous().view(torch.int16) != b.contiguous().view(torch.int16)).sum())
            assert differ == 0, f"{differ} of {a.numel()} values differ"
            return
        assert torch.equal(a, b)
        return
    assert len(a) == len(b)
    for x, y in zip(a, b):
        bits_equal(x, y)


def gate_case(batch, rows, width, gate, dtype, device, generator, offset=0, padding=0):
    """(x, y, gate): gate is "chunk" (slice of 6 D), "model" [1,1,D], "batch" [B,1,D] or "row" [B,L,D]; offset and padding in elements."""
    from flux_fast_path.kernels.slices import ColumnSlice

    def make(b, r):
        wide = values(b * r * (width + padding) + offset, dtype=dtype, device=device, generator=generator)
        return wide[offset:].view(b, r, width + padding)[:, :, :width]

    if gate == "chunk":
        g = ColumnSlice(values(batch, 1, 6 * width, dtype=dtype, device=device, generator=generator), 2 * width, width)
    else:
        shape = {"model": (1, 1), "batch": (batch, 1), "row": (batch, rows)}[gate]
        g = make(*shape)
    return make(batch, rows), make(batch, rows), g


def norm_case(batch, rows, width, dtype, device, generator, modulation="chunk", special=False):
    """(x, scale, shift): chunk of 6 D, or [1|B, 1|L, D] tensors for "model", "batch", "row"."""
    from flux_fast_path.kernels.slices import ColumnSlice

    x = values(batch, rows, width, dtype=dtype, device=device, generator=generator, special=special) * 3 + 0.5
    if modulation == "chunk":
        base = values(batch, 1, 6 * width, dtype=dtype, device=device, generator=generator, special=special)
        return x, ColumnSlice(base, width, width), ColumnSlice(base, 0, width)
    shape = {"model": (1, 1), "batch": (batch, 1), "row": (batch, rows)}[modulation]
    return x, *(values(*shape, width, dtype=dtype, device=device, generator=generator, special=special) for _ in range(2))


def qk_case(batch, tokens, heads, dim, dtype, device, generator, pe_batch=1, extra=0, pair=True):
    """(streams, pe): `tokens` is a tuple of one or two lengths; `extra` columns follow q, k, v as in a single block."""
    from flux_fast_path.kernels.qk_norm_rope import Stream

    width, streams = heads * dim, []
    for length in tokens:
        base = values(batch, length, 3 * width + extra, dtype=dtype, device=device, generator=generator, special=False)
        weights = [values(dim, dtype=dtype, device=device, generator=generator, special=False) * 0.2 + 1 for _ in range(2)]
        streams.append(Stream(base, 0, width if pair else None, heads, dim, weights[0], weights[1] if pair else None))
    angle = torch.randn(pe_batch, 1, sum(tokens), dim // 2, device=device, generator=generator) * 3
    pe = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=-1).unflatten(-1, (2, 2))
    return tuple(streams), pe.contiguous()


def eager_rope(x, pe):
    """Core's eager rotation of one tensor."""
    pairs = x.to(pe.dtype).reshape(*x.shape[:-1], -1, 1, 2)
    out = pe[..., 0] * pairs[..., 0]
    out.addcmul_(pe[..., 1], pairs[..., 1])
    return out.reshape(*x.shape).type_as(x)


def eager_rope_pair(q, k, pe):
    return eager_rope(q, pe), eager_rope(k, pe)
