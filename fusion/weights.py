"""Weights that a leaf reads itself, taken the way core takes them: offloaded, cast, LoRA-patched and hooked weights stay core's business."""

from __future__ import annotations

import sys

import torch


def _is_plain(module) -> bool:
    """Whether the module's own forward would use its weights as they lie: not cast, not patched at run time."""
    if not hasattr(type(module), "comfy_cast_weights"):
        return True  # torch's own class
    return not (module.comfy_cast_weights or module.weight_function or module.bias_function)


def plain_layer_norm(module, x: torch.Tensor) -> bool:
    """Whether `module(x)` is LayerNorm over the last dimension without weights: what `layer_norm_modulate` computes."""
    return not module.elementwise_affine and module.normalized_shape == x.shape[-1:]


def take(module, like: torch.Tensor, borrowed: list) -> tuple:
    """(weight, bias) of a module for use on `like`'s device and in its dtype until `give_back(borrowed)`.

    Resident, unpatched weights are read as core's own forward reads them; all others go through core's cast/uncast pair.
    """
    if _is_plain(module):
        parameters = module._parameters  # nn.Module's attribute access is the slow way to them
        return parameters["weight"], parameters.get("bias")
    ops = sys.modules["comfy.ops"]  # a module with cast weights comes from there
    if not hasattr(ops, "uncast_bias_weight"):  # 0.3.64 has no async offload, and nothing to give back
        return ops.cast_bias_weight(module, like)
    weight, bias, stream = ops.cast_bias_weight(module, like, offloadable=True)
    borrowed.append((ops, module, weight, bias, stream))
    return weight, bias


def give_back(borrowed: list) -> None:
    for ops, *held in borrowed:
        ops.uncast_bias_weight(*held)
