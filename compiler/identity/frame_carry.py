"""The lists by which one block of a video VAE takes frames over from the chunk before, and hands others on.

All blocks share the two lists. A block takes its own entries from the front of one, and puts as many at the end of the
other. A graph sees its own entries only, and an empty list.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from ..common.host import FrameCarry
from ..common.reason import ReasonCode, Unsupported
from .call_signature import CELLS


class CarryWindow:
    """A block's entries in the lists of one call. What `Window` is for a block's entries in a list with a cursor."""

    def __init__(self, names: FrameCarry, bound: inspect.BoundArguments, entries: int) -> None:
        """`bound` comes from `bind_read`, and `entries` is how many the block takes and puts.

        Raises Unsupported if the call's lists are none, or have fewer.
        """
        self._names, self._bound = names, bound
        self._given, self._left = (bound.arguments.get(name) for name in (names.given, names.left))
        if any(given is not None and type(given) is not list for given in (self._given, self._left)):
            raise Unsupported(ReasonCode.WRITES_ARGUMENT)
        if self._given is not None and len(self._given) < entries:
            raise Unsupported(ReasonCode.WRITES_ARGUMENT)
        self._before = list(self._given or ())
        self._end = len(self._left or ())
        self.given = tuple(self._before[:entries])
        """The entries that the block takes."""
        self._put = 0 if self._left is None else entries

    def call(self) -> tuple[tuple, dict[str, Any]]:
        """Return the call's arguments with lists of these entries only: copies, which nobody else has."""
        own = {
            self._names.given: None if self._given is None else list(self.given),
            self._names.left: None if self._left is None else [],
        }
        bound = inspect.BoundArguments(self._bound.signature, {**self._bound.arguments, **own})
        return bound.args, {**bound.kwargs, CELLS: []}

    def now(self) -> tuple[list[Any], int]:
        """Return the entries that the block has put, and how many it has taken."""
        return list(self._left or ())[self._end :], len(self._before) - len(self._given or ())

    def write(self, values: Sequence[Any], moved: int) -> None:
        """Put and take what the block would have."""
        if self._given is not None:
            self._given[:] = self._before[moved:]
        if self._left is not None:
            self._left[self._end :] = values

    def accepts(self, values: Sequence[Any]) -> bool:
        """Whether these can be what the block puts."""
        return len(values) == self._put

    def reset(self) -> None:
        """Leave both lists as they were."""
        self.write([], 0)
