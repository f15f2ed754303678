"""What is known of a network and may refer to it: kept on the network, so that both are freed together.

A `WeakKeyDictionary` keeps a network alive through a value that leads to it. What a watch has read can: other
extensions' functions close over the network that they change.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

_copy = object()
NAME = f"_compiled_graphs_{id(_copy)}"
"""The attribute. Another copy of this package has another."""


class Attached(dict[Any, Any]):
    """Values by key. A copy of the network starts without them."""

    stands_in = True
    """Keys do not read it."""

    def __init__(self, owner: nn.Module | None = None) -> None:
        super().__init__()
        self._owner = None if owner is None else weakref.ref(owner)

    def is_of(self, module: nn.Module) -> bool:
        """Whether it belongs to this module. A shallow copy of one has its attributes."""
        return self._owner is not None and self._owner() is module

    def __deepcopy__(self, memo: dict[int, Any]) -> Attached:
        """Return one that belongs to nothing."""
        return Attached()

    def __reduce__(self) -> tuple:
        """Pickle as one that belongs to nothing."""
        return Attached, ()


def attached(module: nn.Module) -> Attached:
    """Return what is attached to a module."""
    found = module.__dict__.get(NAME)
    if not isinstance(found, Attached) or not found.is_of(module):
        found = module.__dict__[NAME] = Attached(module)
    return found
