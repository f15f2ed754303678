"""Graph files among ComfyUI's models: where they are, and how they are listed, read and written."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import folder_paths

from ...backends import BACKENDS
from ...common.files import open_regular, write_whole
from ...common.words import Words, say
from ...identity.graph_spec import CompiledGraph
from ...storage.graph_file import SUFFIX, Entry, GraphFileError, StoredGraph, read_graphs, read_or_list, write_graphs
from ...storage.private_files import UnusableKey
from ...storage.trust import Trust

FOLDER = "compiled_graphs"
NONE = "none"
"""What is chosen where there is no file."""
NEWEST = " (newest)"
"""Stands behind a prefix for its file of the highest number."""
_WRITING = threading.Lock()
_NUMBERED = re.compile(r"(.*)_(\d+)_")


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
            return say("{count} graphs are in {name} already", count=len(graphs), name=newest.name)
        name = path.name
        data = write_graphs([StoredGraph.of(graph) for graph in graphs], Trust())
        write_whole(path, data)
    except UnusableKey as error:
        raise GraphFileError(say("{name} could not be written: {error}.", name=name, error=error)) from None
    except OSError as error:
        raise GraphFileError(
            say(
                "{name} could not be written ({error}): make room, or save to another folder.",
                name=name,
                error=error.strerror or error,
            )
        ) from None
    return say("{count} graphs saved to {name}, {size:.1f} MB", count=len(graphs), name=name, size=len(data) / 1e6)


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


def choices() -> list[str]:
    """Return what a person chooses from: the newest file of each prefix, then each file, or NONE.

    None of them ends as the file does: ComfyUI's frontend takes a file that it does not know for a model to download.
    """
    names = [name.removesuffix(SUFFIX) for name in listed_files()]
    prefixes = {match[1] for name in names if (match := _NUMBERED.fullmatch(name))}
    return [f"{prefix}{NEWEST}" for prefix in sorted(prefixes)] + names or [NONE]


def find(name: str) -> Path | None:
    """Return the path of the file that a choice means, or None. No name leads out of the folders that ComfyUI lists."""
    listed = listed_files()
    if name.endswith(NEWEST):
        name = _newest(name.removesuffix(NEWEST), listed)
    name = name if name.endswith(SUFFIX) else f"{name}{SUFFIX}"
    path = folder_paths.get_full_path(FOLDER, name) if name in listed else None
    return Path(path) if path else None


def label(name: str) -> str:
    """Return what people call the file that a choice means."""
    path = find(name)
    return (path.name if path else Path(name).name).removesuffix(SUFFIX)


def _newest(prefix: str, listed: list[str]) -> str:
    found = [
        match for name in listed if (match := _NUMBERED.fullmatch(name.removesuffix(SUFFIX))) and match[1] == prefix
    ]
    return max(found, key=lambda match: int(match[2]))[0] if found else ""


def read(name: str) -> tuple[list[StoredGraph], list[Entry], str]:
    """Return the graphs of a file, or a list of what they were, and one sentence with the reason."""
    path = find(name)
    if path is None:
        return [], [], _absent(name)
    try:
        with open_regular(path) as file:
            graphs, listed = read_or_list(file, Trust())
    except (OSError, GraphFileError) as error:
        return [], [], say("{name} cannot be used; compiled instead: {error}.", name=path.name, error=error)
    return graphs, listed, _foreign(path.name, len(listed)) if listed else ""


def _absent(name: str) -> Words:
    if name == NONE:
        return say("No graph file is chosen, so the model is compiled. Save Graph writes one.")
    return say(
        "There is no file {name} in models/{folder} yet, so the model is compiled. Save Graph writes the file.",
        name=name.removesuffix(NEWEST).removesuffix(SUFFIX),
        folder=FOLDER,
    )


def _foreign(name: str, count: int) -> Words:
    return say(
        "{name} was not made on this machine, so its {count} graphs are compiled here instead.", name=name, count=count
    )
