"""Test-only nodes: a random conditioning, latent and picture, so that a tiny random FLUX runs without text encoders and VAE.

The browser tests copy this file into the server's custom_nodes.
"""

import torch

TOKENS, CONTEXT, POOLED = 16, 64, 32


def _random(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class TinyFluxConditioning:
    CATEGORY = "test"
    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "make"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"seed": ("INT", {"default": 0}), "guidance": ("FLOAT", {"default": 3.5})}}

    def make(self, seed, guidance):
        return ([[_random(seed, 1, TOKENS, CONTEXT), {"pooled_output": _random(seed + 1, 1, POOLED), "guidance": guidance}]],)


class TinyFluxLatent:
    CATEGORY = "test"
    RETURN_TYPES = ("LATENT",)
    FUNCTION = "make"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"seed": ("INT", {"default": 0}), "size": ("INT", {"default": 8, "min": 2})}}

    def make(self, seed, size):
        return ({"samples": _random(seed, 1, 16, size, size)},)


class TinyFluxImage:
    """Three latent channels, squeezed into 0…1 and enlarged: a picture good enough to compare."""

    CATEGORY = "test"
    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "make"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"latent": ("LATENT",)}}

    def make(self, latent):
        picture = torch.sigmoid(latent["samples"][:, :3].float())
        return (picture.repeat_interleave(8, -1).repeat_interleave(8, -2).movedim(1, -1).contiguous(),)


NODE_CLASS_MAPPINGS = {node.__name__: node for node in (TinyFluxConditioning, TinyFluxLatent, TinyFluxImage)}
