"""The cells in which the modules of one block of a video VAE keep frames between the chunks of a video.

Either each module has a dictionary of its own, with one entry for each thread that decodes, or a call brings one
dictionary, with one entry for each module. A graph is given what the cells of its block hold, as one more argument of
the call, and returns what the block would leave there.
"""

from __future__ import annotations

import threading
from collections.abc import MutableMapping, Sequence
from typing import Any

from torch import nn

from ..common.host import Host
from ..common.reason import ReasonCode, Unsupported
from .call_signature import CELLS

Cell = tuple[Any, ...]
"""What a cell holds for one thread: one value, or nothing."""


class Cells:
    """The cells of a block, as the running thread sees them."""

    def __init__(self, dictionaries: Sequence[dict[int, Any]]) -> None:
        self._dictionaries = dictionaries
        self._thread = threading.get_ident()

    def __len__(self) -> int:
        return len(self._dictionaries)

    @classmethod
    def of(cls, block: nn.Module, host: Host) -> Cells:
        """Return a block's cells in the order of its modules.

        Raises Unsupported if a module keeps something else under the same name.
        """
        found = [vars(module)[host.frame_cells] for module in block.modules() if host.frame_cells in vars(module)]
        if not all(type(each) is dict and all(type(key) is int for key in tuple(each)) for each in found):
            raise Unsupported(ReasonCode.WRITES_ARGUMENT)
        return cls(found)

    def are_of_one_thread(self) -> bool:
        """Whether nothing is kept but for the running thread."""
        return all(cell.keys() <= {self._thread} for cell in self._dictionaries)

    def read(self) -> list[Cell]:
        """Return what the cells hold."""
        return [(cell[self._thread],) if self._thread in cell else () for cell in self._dictionaries]

    def write(self, contents: Sequence[Cell]) -> None:
        """Have the cells hold this."""
        for cell, content in zip(self._dictionaries, contents, strict=True):
            if content:
                (cell[self._thread],) = content
            else:
                cell.pop(self._thread, None)


class SharedCells:
    """The cells of a block in a dictionary that a call brings, in the order of the block's modules."""

    def __init__(self, block: nn.Module, entries: MutableMapping[nn.Module, Any]) -> None:
        self._modules = tuple(block.modules())
        self._entries = entries

    def read(self) -> list[Cell]:
        """Return what the cells hold."""
        return [(self._entries[module],) if module in self._entries else () for module in self._modules]

    def write(self, contents: Sequence[Cell]) -> None:
        """Have the cells hold this."""
        for module, content in zip(self._modules, contents, strict=True):
            if content:
                (self._entries[module],) = content
            else:
                self._entries.pop(module, None)


class CellWindow:
    """A block's cells during one call. What `Window` is for a block's entries in a list."""

    def __init__(self, cells: Cells | SharedCells) -> None:
        self._cells = cells
        self.given = tuple(cells.read())
        """What they held before the call."""

    def argument(self) -> dict[str, list[Cell]]:
        """Return what a graph is given besides the call's own arguments."""
        return {CELLS: list(self.given)}

    def now(self) -> tuple[list[Cell], int]:
        """Return what the cells hold, and 0: there is no cursor to move."""
        return self._cells.read(), 0

    def write(self, values: Sequence[Cell], moved: int) -> None:
        """Leave in the cells what the block would have left there."""
        self._cells.write(values)

    def accepts(self, values: Sequence[Any]) -> bool:
        """Whether these can be what the block leaves."""
        return len(values) == len(self.given) and all(type(value) is tuple and len(value) < 2 for value in values)

    def reset(self) -> None:
        """Have the cells hold what they held before."""
        self._cells.write(self.given)
