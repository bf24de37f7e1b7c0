"""Weights that a leaf reads itself, taken the way core takes them: offloaded, cast, LoRA-patched and hooked weights stay core's business."""

from __future__ import annotations

import sys

import torch


def _has_functions(module) -> bool:
    return bool(getattr(module, "comfy_cast_weights", False) or getattr(module, "weight_function", None) or getattr(module, "bias_function", None))


def plain_layer_norm(module, x: torch.Tensor) -> bool:
    """Whether `module(x)` is LayerNorm over the last dimension without weights: what `layer_norm_modulate` computes."""
    return module.weight is None and module.bias is None and len(module.normalized_shape) == 1 and module.normalized_shape[0] == x.shape[-1]


def take(module, like: torch.Tensor, borrowed: list) -> tuple:
    """(weight, bias) of a module for use on `like`'s device and in its dtype until `give_back(borrowed)`.

    Resident, unpatched weights are read as core's own forward reads them; all others go through core's cast/uncast pair.
    """
    if not _has_functions(module):
        return module.weight, module.bias if "bias" in module._parameters else None
    ops = sys.modules["comfy.ops"]  # a module with cast weights comes from there
    weight, bias, stream = ops.cast_bias_weight(module, like, offloadable=True)
    borrowed.append((ops, module, weight, bias, stream))
    return weight, bias


def give_back(borrowed: list) -> None:
    for ops, *held in borrowed:
        ops.uncast_bias_weight(*held)
