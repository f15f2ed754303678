"""Graph files among ComfyUI's models: where they are, and how they are listed, read and written."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import folder_paths

from ...backends import BACKENDS
from ...common.files import open_regular, write_whole
from ...identity.graph_spec import CompiledGraph
from ...storage.graph_file import SUFFIX, Entry, GraphFileError, StoredGraph, read_graphs, read_or_list, write_graphs
from ...storage.trust import Trust, UnusableKey

FOLDER = "compiled_graphs"
_WRITING = threading.Lock()


def register_folder() -> None:
    """Give graph files a folder among ComfyUI's models, beside any that extra_model_paths.yaml names."""
    folder_paths.add_model_folder_path(FOLDER, os.path.join(folder_paths.models_dir, FOLDER))


def listed_files() -> list[str]:
    """Return the graph files among ComfyUI's models, by the names that the widget has."""
    try:
        names = folder_paths.get_filename_list(FOLDER)
    except OSError:  # Somebody deleted the folder while ComfyUI runs.
        return []
    return [name for name in names if name.endswith(SUFFIX)]


def write(graphs: list[CompiledGraph], filename_prefix: str) -> str:
    """Write a graph file and return what was written. Raises GraphFileError if that cannot be done.

    Any thread may call this: one at a time takes the next number for the name.
    """
    with _WRITING:
        return _write(graphs, filename_prefix)


def _write(graphs: list[CompiledGraph], filename_prefix: str) -> str:
    folder = folder_paths.get_folder_paths(FOLDER)[0]
    name = filename_prefix
    try:
        os.makedirs(folder, exist_ok=True)
        place, stem, counter, _, _ = folder_paths.get_save_image_path(filename_prefix, folder)
        path, newest = (Path(place, f"{stem}_{number:05}_{SUFFIX}") for number in (counter, counter - 1))
        if _holds(newest, graphs):
            return f"{len(graphs)} graphs are in {newest.name} already"
        name = path.name
        data = write_graphs([StoredGraph.of(graph) for graph in graphs], Trust())
        write_whole(path, data)
    except UnusableKey as error:
        raise GraphFileError(f"{name} could not be written: {error}.") from None
    except OSError as error:
        raise GraphFileError(
            f"{name} could not be written ({error.strerror or error}): make room, or save to another folder."
        ) from None
    return f"{len(graphs)} graphs saved to {name}, {len(data) / 1e6:.1f} MB"


def _holds(path: Path, graphs: list[CompiledGraph]) -> bool:
    """Whether a file is sound and has just these graphs: then a workflow that saves writes no new file."""
    try:
        with open_regular(path) as file:
            stored = {graph.key: graph for graph in read_graphs(file, Trust())}
    except (OSError, GraphFileError):
        return False
    return stored.keys() == {graph.key for graph in graphs} and not any(
        BACKENDS[graph.backend].grows and stored[graph.key] != StoredGraph.of(graph) for graph in graphs
    )


def find(name: str) -> Path | None:
    """Return the path of a listed file, or None. No name leads out of the folders that ComfyUI lists."""
    if name not in listed_files():
        return None
    path = folder_paths.get_full_path(FOLDER, name)
    return Path(path) if path else None


def read(name: str) -> tuple[list[StoredGraph], list[Entry], str]:
    """Return the graphs of a file, or a list of what they were, and one sentence with the reason."""
    path = find(name)
    if path is None:
        return [], [], f"{name} is not in models/{FOLDER}; compiled instead (Save Graph makes the file)."
    try:
        with open_regular(path) as file:
            graphs, listed = read_or_list(file, Trust())
    except (OSError, GraphFileError) as error:
        return [], [], f"{name} cannot be used; compiled instead: {error}."
    told = f"{name} was not made on this machine, so its {len(listed)} graphs are compiled here instead."
    return graphs, listed, told if listed else ""
