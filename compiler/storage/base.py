"""The interface of a store, which keeps graphs."""

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
    """A place where compiled graphs outlive the process."""

    limit: int
    """Bytes."""
    is_near: bool
    """Whether listing it is fast enough for every report."""

    def get(self, key: str) -> StoredGraph | None: ...

    def read_graph(self, name: str) -> StoredGraph:
        """Return the graph of a file, which does not count as a use. Raises OSError and GraphFileError."""
        ...

    def note_use(self, key: str) -> None:
        """Record that a graph was used, where the place keeps that."""
        ...

    def put(self, graph: StoredGraph) -> bool: ...

    def own(self, key: str) -> StoredGraph | None:
        """Return a graph that was signed with this machine's key, or None. That is no use of it."""
        ...

    def replace(self, graph: StoredGraph) -> None:
        """Write a graph that the store has. Raises OSError, GraphFileError and UnusableKey, and the old one stays."""
        ...

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
        """Return the note under a name, or None."""
        ...

    def put_note(self, name: str, data: bytes) -> None:
        """Keep a short note for later processes."""
        ...

    def exclusive(self, key: str) -> AbstractContextManager[None]:
        """Prevent others from compiling this key at the same time, as far as the store can."""
        ...
