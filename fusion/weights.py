"""Weights that a leaf reads itself, taken the way core takes them: offloaded, cast, LoRA-patched and hooked weights stay core's business."""

from __future__ import annotations

import sys

import torch

from ..kernels.linear import linear

# Linears whose forward is `F.linear` with the weights that `take` gives.
PLAIN_LINEARS = {("comfy.ops", "disable_weight_init.Linear"), ("comfy.ops", "manual_cast.Linear"), ("torch.nn.modules.linear", "Linear")}


def is_plain_linear(module) -> bool:
    kind = type(module)
    return (kind.__module__, kind.__qualname__) in PLAIN_LINEARS


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
    if not hasattr(ops, "uncast_bias_weight"):  # 0.3.64 has no async offload, and nothing to give back
        return ops.cast_bias_weight(module, like)
    weight, bias, stream = ops.cast_bias_weight(module, like, offloadable=True)
    borrowed.append((ops, module, weight, bias, stream))
    return weight, bias


def run_linear(module, x: torch.Tensor) -> torch.Tensor:
    """`module(x)` for a Linear, by the fastest product that gives the same bits."""
    if not is_plain_linear(module) or x.ndim != 3 or module.bias is None:
        return type(module).forward(module, x)
    ops, borrowed = sys.modules.get("comfy.ops"), []
    if ops is not None and hasattr(ops, "run_every_op"):
        ops.run_every_op()  # where core's own forward looks for an interrupt
    try:
        weight, bias = take(module, x, borrowed)
        return linear(x, weight, bias, None)
    finally:
        give_back(borrowed)


def give_back(borrowed: list) -> None:
    for ops, *held in borrowed:
        ops.uncast_bias_weight(*held)
