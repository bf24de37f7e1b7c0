"""FLUX.1's transformer in plain PyTorch: the same torch calls, in the same order, on the same layouts as ComfyUI core's eager path.

Module names, block attributes and parameter names are core's, so whatever mounts on core's leaves mounts here, and either's state dict
loads into the other. Checked against 0.20.1 and 0.29.0: same bits. `out_of_place=True` rebinds `img` in the double blocks instead of
writing into it; `old_core=True` is 0.3.64 as a whole (out of place, `.scale` norms with eps 1e-6, RoPE as products and a sum).
Shapes: image tokens (B, N, D), text tokens (B, T, D), q/k/v (B, heads, T + N, D / heads), pe (B, 1, T + N, D / heads / 2, 2, 2).
"""
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

_COMMON = dict(in_channels=16, out_channels=16, mlp_ratio=4.0, axes_dim=[16, 56, 56], theta=10000, patch_size=2, qkv_bias=True, guidance_embed=True)
_SINCE_0_20 = dict(txt_ids_dims=[], global_modulation=False, mlp_silu_act=False, ops_bias=True, default_ref_method="offset",
                   ref_index_scale=1.0, yak_mlp=False, txt_norm=False)
SIZES = {
    "tiny": dict(hidden_size=256, num_heads=2, depth=2, depth_single_blocks=3, context_in_dim=64, vec_in_dim=32),
    "small": dict(hidden_size=3072, num_heads=24, depth=4, depth_single_blocks=8, context_in_dim=4096, vec_in_dim=768),
    "dev": dict(hidden_size=3072, num_heads=24, depth=19, depth_single_blocks=38, context_in_dim=4096, vec_in_dim=768),
}


def rope(pos, dim, theta):
    frequencies = 1.0 / (theta ** torch.linspace(0, (dim - 2) / dim, steps=dim // 2, dtype=torch.float64, device=pos.device))
    angle = torch.einsum("...n,d->...nd", pos.float(), frequencies)
    turn = torch.stack([torch.cos(angle), -torch.sin(angle), torch.sin(angle), torch.cos(angle)], dim=-1)
    return turn.unflatten(-1, (2, 2)).to(torch.float32)


def apply_rope1(x, freqs_cis):
    pairs = x.to(dtype=freqs_cis.dtype).reshape(*x.shape[:-1], -1, 1, 2)
    out = freqs_cis[..., 0] * pairs[..., 0]
    out.addcmul_(freqs_cis[..., 1], pairs[..., 1])
    return out.reshape(*x.shape).type_as(x)


def apply_rope(xq, xk, freqs_cis):
    if has_torch_function((xq, xk, freqs_cis)):   # core's rotation is a torch operator, which asks its arguments too
        return handle_torch_function(apply_rope, (xq, xk, freqs_cis), xq, xk, freqs_cis)
    return apply_rope1(xq, freqs_cis), apply_rope1(xk, freqs_cis)


def apply_rope_old_core(xq, xk, freqs_cis):
    q, k = (x.to(dtype=freqs_cis.dtype).reshape(*x.shape[:-1], -1, 1, 2) for x in (xq, xk))
    # One sum of two rounded products: addcmul may contract to a fused multiply-add and would then differ in the last bit.
    q = (freqs_cis[..., 0] * q[..., 0] + freqs_cis[..., 1] * q[..., 1]).reshape(*xq.shape).type_as(xq)
    k = (freqs_cis[..., 0] * k[..., 0] + freqs_cis[..., 1] * k[..., 1]).reshape(*xk.shape).type_as(xk)
    return q, k


def attention(q, k, v, pe, mask=None, old_core=False):
    if pe is not None:
        q, k = (apply_rope_old_core if old_core else apply_rope)(q, k, pe)
    if mask is not None:
        mask = mask.unsqueeze(0) if mask.ndim == 2 else mask
        mask = mask.unsqueeze(1) if mask.ndim == 3 else mask
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=False)
    return out.transpose(1, 2).reshape(q.shape[0], -1, q.shape[1] * q.shape[3])


def apply_mod(tensor, m_mult, m_add=None, modulation_dims=None):
    if modulation_dims is None:
        return tensor * m_mult if m_add is None else torch.addcmul(m_add, tensor, m_mult)
    for start, end, row in modulation_dims:
        tensor[:, start:end] *= m_mult[:, row:row + 1]
        if m_add is not None:
            tensor[:, start:end] += m_add[:, row:row + 1]
    return tensor


def finite(x):
    return torch.nan_to_num(x, nan=0.0, posinf=65504, neginf=-65504) if x.dtype == torch.float16 else x


def timestep_embedding(t, dim, max_period=10000):
    t = 1000.0 * t
    freqs = torch.exp(-math.log(max_period) * torch.arange(start=0, end=dim // 2, dtype=torch.float32, device=t.device) / (dim // 2))
    args = t[:, None].float() * freqs[None]
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1).to(t)


class EmbedND(nn.Module):
    def __init__(self, theta, axes_dim):
        super().__init__()
        self.theta, self.axes_dim = theta, axes_dim

    def forward(self, ids):
        return torch.cat([rope(ids[..., i], dim, self.theta) for i, dim in enumerate(self.axes_dim)], dim=-3).unsqueeze(1)


class MLPEmbedder(nn.Module):
    def __init__(self, in_dim, hidden_dim):
        super().__init__()
        self.in_layer, self.silu, self.out_layer = nn.Linear(in_dim, hidden_dim), nn.SiLU(), nn.Linear(hidden_dim, hidden_dim)

    def forward(self, x):
        return self.out_layer(self.silu(self.in_layer(x)))


class RMSNorm(nn.Module):
    """0.3.64's own class; later cores use `torch.nn.RMSNorm`, whose eps of None is float32's, not 1e-6."""
    def __init__(self, dim):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(dim))

    def forward(self, x):
        return F.rms_norm(x, self.scale.shape, weight=self.scale, eps=1e-6)


class QKNorm(nn.Module):
    def __init__(self, dim, old_core=False):
        super().__init__()
        self.query_norm, self.key_norm = (RMSNorm(dim), RMSNorm(dim)) if old_core else (nn.RMSNorm(dim), nn.RMSNorm(dim))

    def forward(self, q, k, v):
        return self.query_norm(q).to(v), self.key_norm(k).to(v)


class SelfAttention(nn.Module):
    def __init__(self, dim, num_heads, old_core=False):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.norm, self.proj = nn.Linear(dim, 3 * dim), QKNorm(dim // num_heads, old_core), nn.Linear(dim, dim)


@dataclass
class ModulationOut:
    shift: Tensor
    scale: Tensor
    gate: Tensor


class Modulation(nn.Module):
    def __init__(self, dim, double):
        super().__init__()
        self.is_double, self.multiplier = double, 6 if double else 3
        self.lin = nn.Linear(dim, self.multiplier * dim)

    def forward(self, vec):
        vec = vec[:, None, :] if vec.ndim == 2 else vec
        out = self.lin(F.silu(vec)).chunk(self.multiplier, dim=-1)
        return ModulationOut(*out[:3]), ModulationOut(*out[3:]) if self.is_double else None


def layer_norm(dim):
    return nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)


def heads_first(qkv, num_heads):
    return qkv.view(qkv.shape[0], qkv.shape[1], 3, num_heads, -1).permute(2, 0, 3, 1, 4)


class DoubleStreamBlock(nn.Module):
    def __init__(self, dim, num_heads, mlp_ratio, out_of_place=False, old_core=False):
        super().__init__()
        self.num_heads, self.hidden_size, self.out_of_place, self.old_core = num_heads, dim, out_of_place or old_core, old_core
        if old_core:
            self.flipped_img_txt = False
        else:
            self.modulation = True
        for stream in ("img", "txt"):
            setattr(self, f"{stream}_mod", Modulation(dim, double=True))
            setattr(self, f"{stream}_norm1", layer_norm(dim))
            setattr(self, f"{stream}_attn", SelfAttention(dim, num_heads, old_core))
            setattr(self, f"{stream}_norm2", layer_norm(dim))
            mlp = int(dim * mlp_ratio)
            setattr(self, f"{stream}_mlp", nn.Sequential(nn.Linear(dim, mlp), nn.GELU(approximate="tanh"), nn.Linear(mlp, dim)))

    def forward(self, img, txt, vec, pe, attn_mask=None, modulation_dims_img=None, modulation_dims_txt=None, transformer_options=None):
        (img1, img2), (txt1, txt2) = self.img_mod(vec), self.txt_mod(vec)
        img_in = apply_mod(self.img_norm1(img), (1 + img1.scale), img1.shift, modulation_dims_img)
        img_q, img_k, img_v = heads_first(self.img_attn.qkv(img_in), self.num_heads)
        img_q, img_k = self.img_attn.norm(img_q, img_k, img_v)
        txt_in = apply_mod(self.txt_norm1(txt), (1 + txt1.scale), txt1.shift, modulation_dims_txt)
        txt_q, txt_k, txt_v = heads_first(self.txt_attn.qkv(txt_in), self.num_heads)
        txt_q, txt_k = self.txt_attn.norm(txt_q, txt_k, txt_v)
        q, k, v = torch.cat((txt_q, img_q), dim=2), torch.cat((txt_k, img_k), dim=2), torch.cat((txt_v, img_v), dim=2)
        del img_in, txt_in, img_q, img_k, img_v, txt_q, txt_k, txt_v   # core frees these too: a benchmark may compare peak memory
        attn = attention(q, k, v, pe, attn_mask, self.old_core)
        del q, k, v
        txt_attn, img_attn = attn[:, :txt.shape[1]], attn[:, txt.shape[1]:]

        if self.out_of_place:
            img = img + apply_mod(self.img_attn.proj(img_attn), img1.gate, None, modulation_dims_img)
            img = img + apply_mod(self.img_mlp(apply_mod(self.img_norm2(img), (1 + img2.scale), img2.shift, modulation_dims_img)), img2.gate, None, modulation_dims_img)
        else:
            img += apply_mod(self.img_attn.proj(img_attn), img1.gate, None, modulation_dims_img)
            img += apply_mod(self.img_mlp(apply_mod(self.img_norm2(img), (1 + img2.scale), img2.shift, modulation_dims_img)), img2.gate, None, modulation_dims_img)
        txt += apply_mod(self.txt_attn.proj(txt_attn), txt1.gate, None, modulation_dims_txt)
        txt += apply_mod(self.txt_mlp(apply_mod(self.txt_norm2(txt), (1 + txt2.scale), txt2.shift, modulation_dims_txt)), txt2.gate, None, modulation_dims_txt)
        return img, finite(txt)


class SingleStreamBlock(nn.Module):
    def __init__(self, dim, num_heads, mlp_ratio, old_core=False):
        super().__init__()
        self.hidden_dim = self.hidden_size = dim
        self.num_heads, self.scale, self.mlp_hidden_dim, self.old_core = num_heads, (dim // num_heads) ** -0.5, int(dim * mlp_ratio), old_core
        if not old_core:
            self.mlp_hidden_dim_first, self.yak_mlp = self.mlp_hidden_dim, False
        self.mlp_act = nn.GELU(approximate="tanh")
        self.linear1 = nn.Linear(dim, 3 * dim + self.mlp_hidden_dim)
        self.linear2 = nn.Linear(dim + self.mlp_hidden_dim, dim)
        self.norm = QKNorm(dim // num_heads, old_core)
        self.pre_norm = layer_norm(dim)
        self.modulation = Modulation(dim, double=False)

    def forward(self, x, vec, pe, attn_mask=None, modulation_dims=None, transformer_options=None):
        mod, _ = self.modulation(vec)
        wide = self.linear1(apply_mod(self.pre_norm(x), (1 + mod.scale), mod.shift, modulation_dims))
        qkv, mlp = torch.split(wide, [3 * self.hidden_size, self.mlp_hidden_dim], dim=-1)
        q, k, v = heads_first(qkv, self.num_heads)
        del wide, qkv
        q, k = self.norm(q, k, v)
        attn = attention(q, k, v, pe, attn_mask, self.old_core)
        del q, k, v
        mlp = self.mlp_act(mlp)
        output = self.linear2(torch.cat((attn, mlp), 2))
        x += apply_mod(output, mod.gate, None, modulation_dims)
        return finite(x)


class LastLayer(nn.Module):
    def __init__(self, dim, out_channels):
        super().__init__()
        self.norm_final, self.linear = layer_norm(dim), nn.Linear(dim, out_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))

    def forward(self, x, vec, modulation_dims=None):
        vec = vec[:, None, :] if vec.ndim == 2 else vec
        shift, scale = self.adaLN_modulation(vec).chunk(2, dim=-1)
        return self.linear(apply_mod(self.norm_final(x), (1 + scale), shift, modulation_dims))


class Flux(nn.Module):
    def __init__(self, dtype=None, out_of_place=False, old_core=False, **params):
        super().__init__()
        self.dtype = dtype
        # 0.3.64's params lack the newer fields; a structural check has to cope with that, so they are absent here too.
        self.params = p = SimpleNamespace(**{**_COMMON, **({} if old_core else _SINCE_0_20), **params})
        self.hidden_size, self.num_heads, self.patch_size = p.hidden_size, p.num_heads, p.patch_size
        self.in_channels, self.out_channels = (c * p.patch_size ** 2 for c in (p.in_channels, p.out_channels))
        dim = p.hidden_size
        self.pe_embedder = EmbedND(p.theta, p.axes_dim)
        self.img_in, self.txt_in = nn.Linear(self.in_channels, dim), nn.Linear(p.context_in_dim, dim)
        self.time_in, self.vector_in = MLPEmbedder(256, dim), MLPEmbedder(p.vec_in_dim, dim)
        self.guidance_in = MLPEmbedder(256, dim) if p.guidance_embed else nn.Identity()
        self.double_blocks = nn.ModuleList(DoubleStreamBlock(dim, p.num_heads, p.mlp_ratio, out_of_place, old_core) for _ in range(p.depth))
        self.single_blocks = nn.ModuleList(SingleStreamBlock(dim, p.num_heads, p.mlp_ratio, old_core) for _ in range(p.depth_single_blocks))
        self.final_layer = LastLayer(dim, self.out_channels)

    def process_img(self, x):
        p = self.patch_size
        x = F.pad(x, (0, -x.shape[3] % p, 0, -x.shape[2] % p), mode="circular")
        b, c, h, w = x.shape[0], x.shape[1], x.shape[2] // p, x.shape[3] // p
        ids = torch.zeros((h, w, 3), device=x.device, dtype=torch.float32)
        ids[..., 1] = torch.arange(h, device=x.device)[:, None]
        ids[..., 2] = torch.arange(w, device=x.device)[None, :]
        tokens = x.reshape(b, c, h, p, w, p).permute(0, 2, 4, 1, 3, 5).reshape(b, h * w, c * p * p)
        return tokens, ids.reshape(1, h * w, 3).expand(b, -1, -1), h, w

    def forward(self, x, timestep, context, y=None, guidance=None, control=None, transformer_options=None, modulation_dims=None, **kwargs):
        """(B, C, H, W) latent to (B, C, H, W). `modulation_dims`: (first, last, row) over image tokens, row 1 modulated as at timestep zero."""
        options, mask = dict(transformer_options or {}), kwargs.get("attention_mask")
        img, ids, h, w = self.process_img(x)
        txt_ids = torch.zeros((x.shape[0], context.shape[1], 3), device=x.device, dtype=torch.float32)
        img, vec = self.img_in(img), self.embed(timestep, y, guidance, x)
        txt = self.txt_in(context)
        pe = self.pe_embedder(torch.cat((txt_ids, ids), dim=1))
        double, single, last = {}, {}, {}
        if modulation_dims is not None:
            vec = torch.stack((vec, self.embed(timestep * 0, y, guidance, x)), dim=1)
            shifted = [(a + txt.shape[1], b + txt.shape[1], row) for a, b, row in modulation_dims]
            double = dict(modulation_dims_img=modulation_dims, modulation_dims_txt=[(0, None, 0)])
            single, last = dict(modulation_dims=[(0, txt.shape[1], 0)] + shifted), dict(modulation_dims=modulation_dims)
        for i, block in enumerate(self.double_blocks):
            img, txt = block(img=img, txt=txt, vec=vec, pe=pe, attn_mask=mask, transformer_options=options, **double)
            self.add_control(img, control, "input", i)
        img = torch.cat((txt, finite(img)), 1)
        for i, block in enumerate(self.single_blocks):
            img = block(img, vec=vec, pe=pe, attn_mask=mask, transformer_options=options, **single)
            self.add_control(img[:, txt.shape[1]:], control, "output", i)
        img = self.final_layer(img[:, txt.shape[1]:, ...], vec, **last)
        p = self.patch_size
        img = img.view(x.shape[0], h, w, -1, p, p).permute(0, 3, 1, 4, 2, 5).reshape(x.shape[0], -1, h * p, w * p)
        return img[:, :, :x.shape[2], :x.shape[3]]

    def embed(self, timestep, y, guidance, like):
        vec = self.time_in(timestep_embedding(timestep, 256).to(like.dtype))
        if self.params.guidance_embed and guidance is not None:
            vec = vec + self.guidance_in(timestep_embedding(guidance, 256).to(like.dtype))
        y = torch.zeros((like.shape[0], self.params.vec_in_dim), device=like.device, dtype=like.dtype) if y is None else y
        return vec + self.vector_in(y[:, :self.params.vec_in_dim])

    @staticmethod
    def add_control(img, control, kind, i):
        residuals = (control or {}).get(kind) or []
        if i < len(residuals) and residuals[i] is not None:
            img[:, :residuals[i].shape[1]] += residuals[i]


def randomise(model, seed=0):
    """Weights that keep activations of order one, as the prototype measured with; each device's generator gives its own numbers."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            mean, std = (0.0, p.shape[-1] ** -0.5) if p.ndim > 1 else (1.0, 0.2) if name.endswith(("norm.weight", "norm.scale")) else (0.0, 0.02)
            p.normal_(mean, std, generator=generator)
    return model


def reference_flux(size="tiny", dtype: Optional[torch.dtype] = torch.bfloat16, device="cpu", seed=0, out_of_place=False, old_core=False, **params):
    """`size` names an entry of SIZES; any of its numbers can be replaced by keyword, e.g. `depth=1` or `guidance_embed=False`."""
    with torch.device("meta"):   # 12 billion parameters are then allocated once, on the device, and initialised once
        model = Flux(dtype=dtype, out_of_place=out_of_place, old_core=old_core, **{**SIZES[size], **params})
    return randomise(model.to(dtype).to_empty(device=device), seed).requires_grad_(False).train(False)


def example_inputs(model, height=64, width=64, text_tokens=16, batch=1, seed=0):
    """Keyword arguments for `model(...)`. Height and width are pixels: 1024 gives a latent of 128 and 64 x 64 image tokens."""
    weight = model.img_in.weight
    generator = torch.Generator(weight.device).manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, dtype=weight.dtype, device=weight.device, generator=generator)

    p = model.params
    steady = torch.ones(batch, dtype=weight.dtype, device=weight.device)
    return dict(x=noise(batch, p.in_channels, height // 8, width // 8), timestep=0.5 * steady, context=noise(batch, text_tokens, p.context_in_dim),
                y=noise(batch, p.vec_in_dim), guidance=3.5 * steady if p.guidance_embed else None)
