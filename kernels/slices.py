"""Column slices that are not yet views: the host cost of a step is partly the cost of making small views that only a kernel reads."""

from __future__ import annotations

import torch


def ceil_div(count: int, size: int) -> int:
    """How many pieces of `size` hold `count`."""
    return -(-count // size)


class ColumnSlice:
    """Columns `[start, start + width)` of the last dimension of `base`; what `base.chunk(...)[i]` would be."""

    __slots__ = ("base", "start", "width")

    def __init__(self, base: torch.Tensor, start: int, width: int):
        self.base, self.start, self.width = base, start, width

    def tensor(self) -> torch.Tensor:
        return self.base.narrow(-1, self.start, self.width)


def as_tensor(value) -> torch.Tensor:
    return value.tensor() if type(value) is ColumnSlice else value


def pointer(value) -> int:
    """Address of the first element."""
    if type(value) is ColumnSlice:
        return value.base.data_ptr() + value.start * 2  # only half-width elements ever reach a kernel
    return value.data_ptr()


def layout(value) -> tuple:
    """Hashable: all that a launch depends on, the 16-byte alignment of the address included."""
    if type(value) is ColumnSlice:
        base = value.base
        return base.shape, base.stride(), base.dtype, base.get_device(), value.start, value.width, base.data_ptr() & 15
    return value.shape, value.stride(), value.dtype, value.get_device(), value.data_ptr() & 15


def row_strides(value, batch: int, rows: int) -> tuple[int, int]:
    """Strides (batch, row) in elements of a `[1|B, 1|L, D]` operand that broadcasts over `[B, L, D]`: 0 where it broadcasts."""
    base = value.base if type(value) is ColumnSlice else value
    return (base.stride(0) if base.shape[0] == batch and batch > 1 else 0), (base.stride(1) if base.shape[1] == rows and rows > 1 else 0)


def why_not_rows(name: str, value, like: torch.Tensor) -> str | None:
    """Why `value` is not a `[1|B, 1|L, D]` operand for `like` of shape `[B, L, D]`, or None."""
    tensor = as_tensor(value)
    if tensor.dtype != like.dtype:
        return f"{name} is {str(tensor.dtype)[6:]}, x is {str(like.dtype)[6:]}"
    if tensor.device != like.device:
        return f"{name} is on {tensor.device}, x is on {like.device}"
    if tensor.ndim != 3 or tensor.shape[2] != like.shape[2] or tensor.shape[0] not in (1, like.shape[0]) or tensor.shape[1] not in (1, like.shape[1]):
        return f"{name} is {tuple(tensor.shape)}, which does not broadcast over {tuple(like.shape)} by batch or row"
    if tensor.stride(2) != 1:
        return f"the elements of {name} are not adjacent (stride {tensor.stride(2)})"
    return None


def why_not_plain(name: str, tensor: torch.Tensor, ndim: int) -> str | None:
    """Why `tensor` cannot be read through a raw pointer as `ndim` dimensions of adjacent half-width elements, or None."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"{name} is a {type(tensor).__name__}"
    if tensor.layout != torch.strided:
        return f"{name} is not a dense tensor"
    if tensor.requires_grad and torch.is_grad_enabled():
        return f"{name} needs a gradient"
    if tensor.ndim != ndim:
        return f"{name} has {tensor.ndim} dimensions, not {ndim}"
    if tensor.numel() == 0:
        return f"{name} is empty"
    if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        return f"the elements of {name} are not adjacent (stride {tensor.stride(-1)})"
    return None


def why_not_vectors(name: str, tensor: torch.Tensor, address: int) -> str | None:
    """Why `[B, L, D]` cannot be walked as B · L evenly spaced rows of 16-byte vectors from `address`, or None."""
    if tensor.shape[2] % 8 or tensor.stride(1) % 8 or address % 16:
        return f"{name} is not made of aligned 16-byte vectors (width {tensor.shape[2]}, row stride {tensor.stride(1)})"
    if tensor.shape[0] > 1 and tensor.stride(0) != tensor.shape[1] * tensor.stride(1):
        return f"rows of {name} are not evenly spaced over the batch"
    return None
