"""Graphs on disk, by key: what this machine has compiled before."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from .files import write_whole
from .graph_file import SUFFIX, GraphFileError, StoredGraph, read_graphs, write_graphs
from .trust import Trust

log = logging.getLogger(__name__)


class FolderStore:
    """One signed graph file per graph in a folder. A file is written whole or not at all."""

    def __init__(self, folder: str | os.PathLike, trust: Trust | None = None) -> None:
        self.folder = Path(folder)
        self._trust = trust or Trust()

    def get(self, key: str) -> StoredGraph | None:
        """Return a graph, or None if it is not there, not whole, or not this machine's."""
        path = self._path(key)
        try:
            graphs = read_graphs(path.read_bytes(), self._trust)
        except FileNotFoundError:
            return None
        except (OSError, GraphFileError) as error:
            log.warning("Stored graph %s is compiled again: %s.", path.name, error)
            return None
        return next((graph for graph in graphs if graph.key == key), None)

    def put(self, graph: StoredGraph) -> bool:
        """Write a graph and return True, or say why it could not be kept and return False."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._path(graph.key), write_graphs([graph], self._trust))
        except OSError as error:
            log.warning(
                "A compiled graph could not be kept in %s (%s); it serves this session and is compiled again in the "
                "next. Free some space or set COMPILED_GRAPHS_STORE to another folder.",
                self.folder,
                error.strerror or error,
            )
            return False
        return True

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"
