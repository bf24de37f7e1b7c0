"""Tier "high": where the GELU moves into the up-projection's GEMM. Not bit-exact; all sites of a class, or none of it.

Double blocks: `mlp[0]` then `mlp[1]` run as one product. Single blocks: `linear1` is split by rows into its q/k/v part, run as it is, and its
MLP part, whose activated result is written straight into the buffer that core's `cat((attention, mlp), 2)` is about to ask for.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..kernels import cublaslt
from ..kernels.column_copy import column_copy
from ..kernels.linear_gelu import UNIT_ROUNDOFF, linear_gelu
from ..kernels.nvrtc import KernelError
from .classes import is_known_leaf
from .leaves import Leaf, leaf
from .pending import Pending, real
from .standin import is_touched
from .values import Applied, Columns
from .weights import lent


def why_not_classes(linear, activation) -> str | None:
    """Why an up-projection of these classes keeps its own GELU, or None."""
    if not is_known_leaf("GELU", activation):
        return f"the activation is {type(activation).__name__}"
    if not is_known_leaf("Linear", linear):
        return f"a Linear is a {type(linear).__qualname__} (of a quantised file or of another pack)"
    return None


def why_not_site(linear, activation, dtype: torch.dtype) -> str | None:
    """Why this up-projection keeps its own GELU as it stands now, or None."""
    if activation.approximate != "tanh":
        return f"the activation is a GELU with approximate={activation.approximate!r}"
    for module in (linear, activation):
        if is_touched(module):
            return f"a {type(module).__name__} is patched by another pack"
    if linear.bias is None:
        return "a Linear has no bias"
    plain = type(linear.weight) in (torch.nn.Parameter, torch.Tensor)
    if not plain or linear.weight.dtype != dtype:
        quantised = "" if plain and linear.weight.dtype.itemsize > 1 else " (quantised)"
        return f"weights are {str(linear.weight.dtype)[6:]}{quantised}, the model computes in {str(dtype)[6:]}"
    return None


def why_not_device(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why no site can mount there, or None."""
    if device.type != "cuda" or torch.version.hip:
        return "no NVIDIA GPU"
    if dtype not in UNIT_ROUNDOFF:
        return f"the model computes in {str(dtype)[6:]}"
    if torch.cuda.get_device_capability(device)[0] == 12:
        return "on RTX 50 (sm_12x) the epilogue is slower than a separate GELU"
    try:
        cublaslt.library()
    except KernelError as error:
        return str(error)
    return None


class HighPlan:
    """The up-projections of a model: (class, linear, activation), and the forwards that mount them."""

    def __init__(self, doubles, singles):
        self.sites = {"double": [], "single": []}
        self.leaves = {}  # block -> [Leaf]
        for block in doubles:
            mine = self.leaves[block] = []
            for mlp in (block.img_mlp, block.txt_mlp):
                self.sites["double"].append((mlp[0], mlp[1]))
                mine += [Leaf("high_double", mlp[1], gelu_of_up_forward), Leaf("high_double", mlp[0], up_forward, (mlp[1],))]
        for block in singles:
            self.sites["single"].append((block.linear1, block.mlp_act))
            self.leaves[block] = [Leaf("high_single", block.linear1, linear1_forward(block.norm, block.hidden_size), (block.mlp_act,))]
        # By class, once: a plan is made again when classes change.
        self.refused = {name: next(filter(None, (why_not_classes(*site) for site in sites)), None) for name, sites in self.sites.items()}

    def choose(self, device, dtype) -> tuple[frozenset, dict]:
        """(kinds to mount, the report's "high" entry): a class mounts when every one of its sites can."""
        refused, kinds, mounted = why_not_device(device, dtype), set(), 0
        reasons = [refused] if refused else []
        for name, sites in self.sites.items():
            reason = refused or self.refused[name] or next(filter(None, (why_not_site(*site, dtype) for site in sites)), None)
            if reason is None:
                kinds.add(f"high_{name}")
                mounted += len(sites)
            elif not refused:
                reasons.append(f"{name} blocks: {reason}")
        total = sum(map(len, self.sites.values()))
        return frozenset(kinds), {"state": "mounted" if mounted else "stepped_aside", "sites": mounted, "of": total, "reasons": reasons, "max_relative_error": None}


class UpProjection(Applied):
    """`linear(x)` of a double block's MLP, waiting for its GELU."""

    __slots__ = ()

    def activated(self):
        with lent(self.module, self.x) as (weight, bias):
            return linear_gelu(self.x, weight, bias, None)


class SplitProjection(Pending):
    """A single block's `linear1(x)`: q/k/v as a tensor, the MLP part activated in `buffer[..., hidden:]`."""

    __slots__ = ("x", "module", "qkv", "buffer", "hidden", "defers_qk")

    def __init__(self, x, module, qkv, buffer, hidden, defers_qk):
        self._real, self.x, self.module, self.qkv, self.buffer, self.hidden, self.defers_qk = None, x, module, qkv, buffer, hidden, defers_qk

    def _eager(self):
        return type(self.module).forward(self.module, self.x)

    def split_into(self, sizes):
        width = self.qkv.shape[-1]
        if list(sizes) != [width, self.buffer.shape[-1] - self.hidden]:
            return NotImplemented
        return Columns(self.qkv, 0, width, False) if self.defers_qk else self.qkv, MlpColumns(self)


class MlpColumns(Pending):
    """The MLP part of a SplitProjection, before (`activated` False) or after its GELU."""

    __slots__ = ("projection", "is_activated", "joined")

    def __init__(self, projection, is_activated=False):
        self._real, self.projection, self.is_activated, self.joined = None, projection, is_activated, False

    def _eager(self):
        p = self.projection
        return p.buffer[..., p.hidden :] if self.is_activated else p.materialise()[..., p.qkv.shape[-1] :]

    def activated(self):
        return MlpColumns(self.projection, True)

    def join(self, attention):
        """`cat((attention, self), 2)`: the buffer, once; NotImplemented for anything but its other half."""
        p = self.projection
        left = p.buffer[..., : p.hidden]
        if not self.is_activated or self.joined or attention.shape != left.shape or attention.dtype != left.dtype or attention.device != left.device:
            return NotImplemented
        self.joined = True  # a second join would write into what the first one returned
        column_copy(left, attention)
        return p.buffer


@leaf(1)
def up_forward(module, shared, x):
    x = real(x)
    return UpProjection(x, module) if type(x) is torch.Tensor and x.ndim == 3 else NotImplemented


@leaf(1)
def gelu_of_up_forward(module, shared, x):
    return x.activated() if type(x) is UpProjection and x.fresh else NotImplemented


def linear1_forward(qk_norm, hidden):
    """The maker of a single block's `linear1`, whose first 3 * `hidden` rows are q, k and v and go to `qk_norm`."""

    @leaf(1)
    def forward(module, shared, x):
        x = real(x)
        if type(x) is not torch.Tensor or x.ndim != 3:
            return NotImplemented
        with lent(module, x) as (weight, bias):
            qkv = F.linear(x, weight[: 3 * hidden], bias[: 3 * hidden])
            mlp = weight.shape[0] - 3 * hidden
            buffer = x.new_empty((x.shape[0], x.shape[1], hidden + mlp))
            linear_gelu(x, weight[3 * hidden :], bias[3 * hidden :], buffer[..., hidden:])
        return SplitProjection(x, module, qkv, buffer, hidden, qk_norm in shared.mounted)

    return forward
