"""What a plan's decisions rest on, by identity, in a form that a block can ask each time it is entered.

The code that a call will run is recognised when the call begins. Wrappers and patches of other packs inside the call can still replace some of it;
comparing identities costs a block two microseconds and shows that.
"""

from __future__ import annotations

import sys
from operator import attrgetter

ON_CLASSES = ("forward", "__call__", "forward_comfy_cast_weights")


class Watch:
    """Attributes of modules and classes as they were when this was made."""

    __slots__ = ("_places", "_read", "_seen")

    def __init__(self, places):
        """`places`: (owner, names) pairs; names that the owner does not have are left out."""
        found = [(owner, [name for name in names if hasattr(owner, name)]) for owner, names in places]
        self._places = [place for place in found if place[1]]
        self._read = [(attrgetter(*names), owner) for owner, names in self._places]
        self._seen = self._now()

    def _now(self) -> list:
        return [get(owner) for get, owner in self._read]

    def unchanged(self) -> bool:
        try:
            return self._now() == self._seen
        except AttributeError:
            return False

    def first_changed(self) -> str | None:
        """The first that is another now, as "Owner.name"; None when all are as they were."""
        for (owner, names), seen in zip(self._places, self._seen):
            for name, was in zip(names, seen if len(names) > 1 else (seen,)):
                if getattr(owner, name, None) is not was:
                    return f"{owner.__name__.rpartition('.')[2]}.{name}"
        return None


class Below:
    """The modules of one block: which hang where, and of what class each is. `modules` are all of them, the block first."""

    __slots__ = ("modules", "_types", "_places", "_children")

    def __init__(self, block):
        self.modules = list(block.modules())
        self._types = list(map(type, self.modules))
        self._places = [m._modules for m in self.modules if m._modules]
        self._children = self._now()

    def _now(self) -> list:
        return [child for place in self._places for child in place.values()]

    def unchanged(self) -> bool:
        return list(map(type, self.modules)) == self._types and self._now() == self._children


def code_places(attention, block) -> list:
    """(owner, names) of the functions that stand between a block's leaves and what they compute, besides the classes' own."""
    places = [(sys.modules[type(block).__module__], ("attention", "apply_mod", "ModulationOut"))]
    places.append((sys.modules.get(attention.__module__), ("apply_rope", "apply_rope1", "_apply_rope", "_apply_rope1")))
    kitchen = kitchen_of(attention)
    if kitchen is not None:
        places += [(sys.modules["comfy.quant_ops"], ("ck",)), (kitchen, ("apply_rope", "apply_rope1"))]
    return places


def kitchen_of(attention):
    """comfy-kitchen as the rotation of this `attention` reaches it, or None."""
    core = attention.__globals__.get("comfy")
    return getattr(getattr(core, "quant_ops", None), "ck", None)
