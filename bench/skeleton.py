"""The limit: a step with only its matrix products and attention, everything memory-bound removed. Its numbers mean nothing, its time does."""

import torch
import torch.nn.functional as F


def skeleton(model, inputs: dict):
    """A function without arguments that makes the same Linear and attention calls on the same shapes as `model(**inputs)`."""
    x, context = inputs["x"], inputs["context"]
    batch, text, dim, heads = x.shape[0], context.shape[1], model.hidden_size, model.num_heads
    patch = model.patch_size
    image = -(-x.shape[2] // patch) * -(-x.shape[3] // patch)
    mlp, joined = model.single_blocks[0].mlp_hidden_dim, image + text

    def noise(*shape):
        return torch.randn(*shape, dtype=x.dtype, device=x.device)

    pixels, img, txt, both, vec = noise(batch, image, model.in_channels), noise(batch, image, dim), noise(batch, text, dim), noise(batch, joined, dim), noise(batch, 1, dim)
    img_mlp, txt_mlp, wide = noise(batch, image, mlp), noise(batch, text, mlp), noise(batch, joined, dim + mlp)
    # (token, head, dim) in memory, so that attention's result needs no copy either.
    q, k, v = (noise(batch, joined, heads, dim // heads).transpose(1, 2) for _ in range(3))

    def step():
        model.img_in(pixels)
        model.txt_in(context)
        for block in model.double_blocks:
            for stream, tokens, hidden in (("img", img, img_mlp), ("txt", txt, txt_mlp)):
                attention, feed = getattr(block, f"{stream}_attn"), getattr(block, f"{stream}_mlp")
                getattr(block, f"{stream}_mod").lin(vec)
                attention.qkv(tokens)
                attention.proj(tokens)
                feed[0](tokens)
                feed[2](hidden)
            F.scaled_dot_product_attention(q, k, v)
        for block in model.single_blocks:
            block.modulation.lin(vec)
            block.linear1(both)
            F.scaled_dot_product_attention(q, k, v)
            block.linear2(wide)
        return model.final_layer.linear(img)

    return step
