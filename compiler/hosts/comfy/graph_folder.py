"""Graph files among ComfyUI's models: where they are, and how they are listed, read and written."""

from __future__ import annotations

import os
import posixpath
import re
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import folder_paths

from ...common.errors import one_line, printable
from ...common.files import create_whole, open_regular
from ...common.words import Words, join, say
from ...identity.graph_spec import CompiledGraph
from ...storage.graph_file import (
    NOT_MADE_HERE,
    SUFFIX,
    Entry,
    GraphFileError,
    StoredGraph,
    UntrustedFile,
    read_contents,
    read_graphs,
    write_graphs,
)
from ...storage.private_files import UnusableKey
from ...storage.trust import Trust, sha256
from .fitting import fits_here

FOLDER = "compiled_graphs"
DEFAULT_NAME = "graphs"
"""Of a file whose prefix is empty or names a folder only."""
NONE = "none"
"""What is chosen where there is no file."""
NEWEST = " (newest)"
"""Stands behind a prefix for its file of the highest number."""
MAX_WHERE = 300
"""Characters of a workflow's words that a node repeats."""
_PACKAGE = Path(__file__).absolute().parents[3].name
"""What the commands of this extension are called by."""
_WRITING = threading.Lock()
_NUMBERED = r"(.*)_(\d+)_"


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

    Graphs that somebody else signed are left out. This machine's signature would outlast the owner's trust in them, and
    a prompt can ask for it.

    Any thread may call this. They take turns, so that none writes graphs again that another has just written.
    """
    own = [graph for graph in graphs if not graph.is_foreign]
    others = _left_out(len(graphs) - len(own))
    if not own:
        raise GraphFileError(others)
    with _WRITING:
        return join([_write(own, filename_prefix), others], ". ")


def _write(graphs: list[CompiledGraph], filename_prefix: str) -> str:
    folder = folder_paths.get_folder_paths(FOLDER)[0]
    name = filename_prefix
    try:
        os.makedirs(folder, exist_ok=True)
        place, stem, counter = _place(filename_prefix, folder)
        newest = _numbered(place, stem, counter - 1)
        if _holds(newest, graphs):
            return _in_file(newest.name, len(graphs))
        data = write_graphs([StoredGraph.of(graph) for graph in graphs], Trust())
        name = _create(filename_prefix, folder, data)
    except UnusableKey as error:
        raise GraphFileError(say("{name} could not be written: {error}.", name=name, error=error)) from None
    except GraphFileError:
        raise
    except OSError as error:
        raise GraphFileError(
            say(
                "{name} could not be written ({error}): make room, or save to another folder.",
                name=name,
                error=error.strerror or error,
            )
        ) from None
    except Exception as error:  # what a backend raises that cannot give the bytes of a graph
        sentence = say("{name} could not be written: {error}.", name=name, error=one_line(error))
        raise GraphFileError(sentence) from error
    size = len(data) / 1e6
    if len(graphs) == 1:
        return say("1 graph saved to {name}, {size:.1f} MB", name=name, size=size)
    return say("{count} graphs saved to {name}, {size:.1f} MB", count=len(graphs), name=name, size=size)


def _left_out(count: int) -> Words | str:
    if count == 1:
        return say("1 graph that somebody else signed is left out")
    return say("{count} graphs that somebody else signed are left out", count=count) if count else ""


def _in_file(name: str, count: int) -> Words:
    if count == 1:
        return say("1 graph is in {name} already", name=name)
    return say("{count} graphs are in {name} already", count=count, name=name)


def _create(filename_prefix: str, folder: str, data: bytes) -> str:
    """Write a file under the next number and return its name. Servers that share the folder each get their own."""
    while True:
        path = _numbered(*_place(filename_prefix, folder))
        try:
            create_whole(path, data)
        except FileExistsError:  # another server has taken this number
            continue
        return path.name


def _numbered(place: str, stem: str, counter: int) -> Path:
    return Path(place, f"{stem}_{counter:05}_{SUFFIX}")


def _place(filename_prefix: str, folder: str) -> tuple[str, str, int]:
    """Return the folder, the name and the number of the next file. A prefix that names a folder gets a name in it."""
    given = filename_prefix.replace("\\", "/").strip()
    prefix = posixpath.normpath(given)
    if prefix == "." or given.endswith(("/", "/.")) or not given:
        prefix = posixpath.join(prefix, DEFAULT_NAME)
    try:
        if prefix.split("/")[0] in ("", ".."):
            raise ValueError(prefix)
        place, stem, counter, _, _ = folder_paths.get_save_image_path(posixpath.normpath(prefix), folder)
    except OSError:
        raise
    except Exception:  # ComfyUI raises one for names that lead elsewhere
        sentence = say("'{name}' is outside of the folder of graphs: choose another name.", name=filename_prefix)
        raise GraphFileError(sentence) from None
    while _numbered(place, stem, counter).exists():
        counter += 1
    return place, stem, counter


def _holds(path: Path, graphs: list[CompiledGraph]) -> bool:
    """Whether a file is sound and has just these graphs: then a workflow that saves writes no new file."""
    try:
        with open_regular(path) as file:
            stored = {graph.key: graph for graph in read_graphs(file, Trust())}
    except (OSError, GraphFileError):
        return False
    return stored.keys() == {graph.key for graph in graphs} and not any(
        graph.has_grown(stored[graph.key].executable) for graph in graphs
    )


def choices() -> list[str]:
    """Return what a person chooses from: the newest file of each prefix, then each file, or NONE.

    None of them ends as the file does: ComfyUI's frontend takes a file that it does not know for a model to download.
    """
    names = [name.removesuffix(SUFFIX) for name in listed_files()]
    prefixes = {match[1] for name in names if (match := re.fullmatch(_NUMBERED, name))}
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
        match for name in listed if (match := re.fullmatch(_NUMBERED, name.removesuffix(SUFFIX))) and match[1] == prefix
    ]
    return max(found, key=lambda match: int(match[2]))[0] if found else ""


@dataclass(frozen=True)
class Found:
    """What Load Graph has of a file."""

    graphs: Sequence[StoredGraph] = ()
    listed: Sequence[Entry] = ()
    """Of a file that may not run here."""
    left: Sequence[Entry] = ()
    """Of a file that may: graphs for other machines."""
    problem: str = ""
    """One sentence: why the file, or a part of it, cannot be used."""


def read(name: str, classes: Collection[str], digest: str = "", where: str = "") -> Found:
    """Return what a file has for networks with these classes of blocks.

    `digest` is the SHA-256 that the file must have, if a workflow names one, and `where` says where people get it.
    """
    path = find(name)
    if path is None:
        return Found(problem=join([_absent(name), _get_it(where)], " "))
    try:
        with open_regular(path) as file:
            if digest and (other := sha256(file)) != _plain(digest):
                return Found(problem=join([_another(path.name, other), _get_it(where)], " "))
            contents = read_contents(file, Trust(), lambda entry: entry.spec.region in classes and fits_here(entry))
    except (OSError, GraphFileError) as error:
        return Found(problem=say("{name} cannot be used; compiled instead: {error}.", name=path.name, error=error))
    wanted = [entry for entry in contents.listed if entry.spec.region in classes]
    if contents.untrusted is None:
        return Found(contents.graphs, left=wanted)
    return Found(listed=wanted, problem=_foreign(path.name, len(contents.listed), contents.untrusted))


def _plain(digest: str) -> str:
    return digest.strip().lower().removeprefix("sha256:")


def _absent(name: str) -> Words:
    if name == NONE:
        return say("No graph file is chosen, so the model is compiled. Save Graph writes one.")
    return say(
        "There is no file {name} in models/{folder} yet, so the model is compiled. Save Graph writes the file.",
        name=name.removesuffix(NEWEST).removesuffix(SUFFIX),
        folder=FOLDER,
    )


def _another(name: str, digest: str) -> Words:
    return say(
        "{name} is not the file that the workflow names, so the model is compiled: its SHA-256 is {digest}.",
        name=name,
        digest=digest,
    )


def _get_it(where: str) -> Words | str:
    """Return where a workflow says that its file is to be had. Nothing is downloaded."""
    text = printable(" ".join(where.split()))[:MAX_WHERE]
    return say("The workflow says where to get it: {where}", where=text) if text else ""


def _foreign(name: str, count: int, reason: UntrustedFile) -> Words:
    if reason.signer:
        return say(
            "{name} is signed by {signer}, whom the owner of this machine has not trusted, so its {count} graphs are "
            "compiled here instead. To trust the signer, the owner runs: python -m {package} trust add {signer}",
            name=name,
            signer=reason.signer,
            count=count,
            package=_PACKAGE,
        )
    if str(reason) != NOT_MADE_HERE:
        return say(
            "{name} may not run here ({reason}), so its {count} graphs are compiled here instead.",
            name=name,
            reason=reason,
            count=count,
        )
    return say(
        "{name} was not made on this machine, so its {count} graphs are compiled here instead.", name=name, count=count
    )
