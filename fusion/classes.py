"""Classes of modules that a leaf may stand in for, and whether they still compute what they were written to compute."""

from __future__ import annotations

import sys

import torch

# Classes whose forward a leaf may stand in for: (module, qualified name), by what they compute. GGUF's LayerNorm differs from core's in how
# it finds weights, and FLUX's LayerNorms have none.
LEAF_CLASSES = {
    "LayerNorm": {("comfy.ops", "disable_weight_init.LayerNorm"), ("comfy.ops", "manual_cast.LayerNorm"), ("torch.nn.modules.normalization", "LayerNorm")},
    "RMSNorm": {("comfy.ops", "disable_weight_init.RMSNorm"), ("comfy.ops", "manual_cast.RMSNorm"), ("torch.nn.modules.normalization", "RMSNorm")},
    "Linear": {("comfy.ops", "disable_weight_init.Linear"), ("comfy.ops", "manual_cast.Linear"), ("torch.nn.modules.linear", "Linear")},
    "GELU": {("torch.nn.modules.activation", "GELU")},
}


def is_own_code(function, module: str) -> bool:
    """Whether a function is the one that its module's file was written with, not one put there at run time."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == getattr(sys.modules.get(module), "__file__", None)


def is_own_class(cls: type) -> bool:
    """Whether a module class computes what it was written to compute, down to torch's Module: nothing on the way was replaced at run time."""
    for owner in cls.__mro__[: cls.__mro__.index(torch.nn.Module)]:
        for name in ("forward", "forward_comfy_cast_weights"):
            function = owner.__dict__.get(name)
            if function is not None and (getattr(function, "__name__", None) != name or not is_own_code(function, owner.__module__)):
                return False
    return cls.__call__ is torch.nn.Module.__call__


def is_known_leaf(kind: str, module) -> bool:
    """Whether `module` is of a class that computes what the leaf of this kind defers."""
    cls = type(module)
    known = (cls.__module__, cls.__qualname__) in LEAF_CLASSES[kind] or (kind == "LayerNorm" and cls.__qualname__ == "GGMLOps.LayerNorm")
    return known and is_own_class(cls)


def is_cores_linear(module) -> bool:
    """Whether `module` is a Linear of torch's or core's, quantised or not: none of them writes to its input."""
    cls = type(module)
    return cls.__module__ in ("comfy.ops", "torch.nn.modules.linear") and is_own_class(cls)
