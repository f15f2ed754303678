"""What the rest of the compiler asks of a place that keeps graphs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from .graph_file import StoredGraph


@dataclass(frozen=True)
class StoreEntry:
    """One file of a store."""

    name: str
    size: int
    """Bytes."""
    used: float
    """Unix seconds."""


class Store(Protocol):
    """Where compiled graphs outlive the process."""

    limit: int
    """Bytes."""
    is_near: bool
    """Whether it may be listed for every report."""

    def get(self, key: str) -> StoredGraph | None: ...

    def put(self, graph: StoredGraph) -> bool: ...

    def keys(self) -> set[str]:
        """Return the keys of all graphs, or of none if the place cannot be listed."""
        ...

    def entries(self) -> list[StoreEntry]:
        """Return the graph files. Raises OSError if the place cannot be listed."""
        ...

    def discard(self, key: str) -> bool:
        """Remove a graph, and return whether it is gone."""
        ...

    def note(self, name: str) -> bytes | None:
        """Return what was noted under a name."""
        ...

    def put_note(self, name: str, data: bytes) -> None:
        """Note a little that a process found out, for those after it."""
        ...

    def exclusive(self, key: str) -> AbstractContextManager[None]:
        """While it is held, no other process is compiling this key, as far as the store can tell."""
        ...
