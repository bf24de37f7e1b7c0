"""Pending values: operations that core has asked for and that have not run yet.

A leaf module of a FLUX block returns one instead of a tensor. Where core uses it in a way that `table.py` knows, a fused kernel runs. Any
other use (an operator, a torch function, an attribute, an index) materialises it: the eager operation core would have run, once, and from
then on the value is that tensor. They are plain objects, not tensor subclasses: making one costs 0.3 µs instead of 3, and nothing that
wants raw memory can mistake them for a tensor.
"""

from __future__ import annotations

import copy
import logging

import torch
from torch.utils._pytree import tree_map

log = logging.getLogger("flux_fast_path")

TABLE: dict = {}  # torch function -> handler(*args, **kwargs), which may return NotImplemented


def real(value):
    """The tensor behind `value`, if it is pending; anything else as it is."""
    return value.materialise() if isinstance(value, Pending) else value


class Pending:
    """Base. A subclass keeps its operands in slots and says in `_eager` what core would have computed from them."""

    __slots__ = ("_real", "__weakref__", "__dict__")  # __dict__ only for what others may hang on a value
    _operands: tuple = ()  # slots to let go of once the value is a tensor

    def materialise(self) -> torch.Tensor:
        """The value as a tensor: exactly the eager operation, run at most once."""
        if self._real is None:
            self._real = self._eager()
            for name in self._operands:  # core would have let go of them here
                setattr(self, name, None)
        return self._real

    @property
    def fresh(self) -> bool:
        """Whether the operation is still to run. A value that became a tensor may have been written to since."""
        return self._real is None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        handler = TABLE.get(func)
        if handler is not None:
            try:
                result = handler(*args, **kwargs) if kwargs else handler(*args)
            except torch.cuda.OutOfMemoryError:
                raise  # core answers this one itself: it unloads models and tries again
            except Exception:  # a fault of ours must not become a fault of the picture: what core asked for still runs below
                log.warning("FLUX Fast Path: a fused operation failed and core's own runs instead, the image is unaffected.", exc_info=True)
                result = NotImplemented
            if result is not NotImplemented:
                return result
        return func(*tree_map(real, args), **tree_map(real, kwargs or {}))

    def __getattr__(self, name):
        # Reached only for what the class does not define: .shape, .to, .contiguous, .data_ptr, ...
        if name == "_real":  # an object that was made without its constructor, as copying does
            raise AttributeError(name)
        return getattr(self.materialise(), name)

    def __iter__(self):
        return iter(self.materialise())

    def __reduce_ex__(self, protocol):
        return self.materialise().__reduce_ex__(protocol)  # copies and pickles are tensors

    def __deepcopy__(self, memo):
        return copy.deepcopy(self.materialise(), memo)

    def __repr__(self):
        return f"<{type(self).__name__}, {'not run yet' if self.fresh else 'materialised'}>"

    __hash__ = object.__hash__


def _operator(name: str):
    function = getattr(torch.Tensor, name)

    def method(self, *args):
        return Pending.__torch_function__(function, (), (self, *args))

    method.__name__ = name
    return method


for _name in (
    "add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv floordiv rfloordiv ifloordiv mod rmod imod pow rpow ipow "
    "matmul rmatmul neg pos abs invert and rand iand or ror ior xor rxor ixor lshift rlshift ilshift rshift rrshift irshift "
    "eq ne lt le gt ge getitem setitem len reversed contains bool float int complex index array"
).split():
    if hasattr(torch.Tensor, f"__{_name}__"):
        setattr(Pending, f"__{_name}__", _operator(f"__{_name}__"))
