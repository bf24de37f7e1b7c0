"""Weights that a leaf reads itself, taken the way core takes them: offloaded, cast, LoRA-patched and hooked weights stay core's business."""

from __future__ import annotations

import sys
from contextlib import contextmanager

import torch


def _is_plain(module) -> bool:
    """Whether the module's own forward would use its weights as they lie: not cast, not patched at run time."""
    if not hasattr(type(module), "comfy_cast_weights"):
        return True  # torch's own class
    return not (module.comfy_cast_weights or module.weight_function or module.bias_function)


def plain_layer_norm(module, x: torch.Tensor) -> bool:
    """Whether `module(x)` is LayerNorm over the last dimension without weights: what `layer_norm_modulate` computes."""
    return module.weight is None and module.bias is None and module.normalized_shape == x.shape[-1:]


@contextmanager
def lent(module, like: torch.Tensor):
    """(weight, bias) of a module on `like`'s device and in its dtype, for the duration of the `with`; one module at a time.

    Resident, unpatched weights are read as core's own forward reads them; all others go through core's cast/uncast pair. Core streams weights
    through one buffer a stream: what it lends is overwritten when it lends the next one.
    """
    if _is_plain(module):
        parameters = module._parameters  # nn.Module's attribute access is the slow way to them
        yield parameters["weight"], parameters.get("bias")
        return
    ops = sys.modules["comfy.ops"]  # a module with cast weights comes from there
    if not hasattr(ops, "uncast_bias_weight"):  # 0.3.64 has no async offload, and nothing to give back
        yield ops.cast_bias_weight(module, like)
        return
    weight, bias, stream = ops.cast_bias_weight(module, like, offloadable=True)
    try:
        yield weight, bias
    finally:
        ops.uncast_bias_weight(module, weight, bias, stream)


def kept_weight(module, like: torch.Tensor) -> torch.Tensor:
    """The weight of a small module, to be held beside those of others: the module's own, or a copy of what core lent."""
    own = module._parameters["weight"]
    if _is_plain(module):
        return own
    with lent(module, like) as (weight, _):
        return weight if weight is own or weight.data_ptr() == own.data_ptr() else weight.clone()
