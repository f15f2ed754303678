"""Bundles: graph files with graphs of several models, GPUs and versions, to give to others."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from ..compiler.common.errors import printable
from ..compiler.common.files import open_regular, write_whole
from ..compiler.identity.graph_spec import GraphIdentity
from ..compiler.storage.graph_file import (
    SUFFIX,
    GraphFileError,
    StoredGraph,
    read_graphs,
    read_manifest,
    read_signature,
    read_where,
    write_graphs,
)
from ..compiler.storage.private_files import UnusableKey
from ..compiler.storage.store import FolderStore, StoreError, UrlStore, open_store
from ..compiler.storage.trust import Trust, sha256

MEGABYTE = 10**6
Say = Callable[[str], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the actions of the command `bundle`."""
    actions = parser.add_subparsers(required=True, dest="action")
    make = actions.add_parser("make", help="put graphs of files and of a store into one file")
    make.add_argument("target", metavar="BUNDLE", type=Path, help="graphs that it has already stay in it")
    make.add_argument("files", metavar="FILE", nargs="*", type=Path, help="graph files and bundles")
    make.add_argument("--store", metavar="PLACE", help="all graphs of a store, too")
    make.add_argument("--where", default="", help="words that say where people get the bundle")
    make.set_defaults(act=_make)
    show = actions.add_parser("show", help="say what a file has, for which machines, and who signed it")
    show.add_argument("target", metavar="FILE", type=Path)
    show.set_defaults(act=_show)


def run(options: argparse.Namespace, say: Say) -> int:
    """Run an action, and return the exit status."""
    try:
        return options.act(options, say)
    except (GraphFileError, StoreError, UnusableKey, OSError) as error:
        say(f"{options.target.name}: {error}")
        return 2


def write_from_store(target: Path, place: str, keys: Collection[str], say: Say) -> int:
    """Put these graphs of a store into a bundle. Return how many are missing."""
    graphs, missing = _read_from(open_store(place), [f"{key}{SUFFIX}" for key in sorted(keys)], say)
    try:
        _write(_named(target), graphs, "", say)
    except (GraphFileError, UnusableKey, OSError) as error:
        say(f"{target.name}: {error}")
        return missing + 1
    return missing


def add_to_store(
    store: FolderStore | UrlStore, files: Iterable[Path], fits: Callable[[GraphIdentity], bool], say: Say
) -> int:
    """Put the graphs of files that fit this machine into a store. Return the exit status."""
    status = 0
    for path in files:
        try:
            with open_regular(path) as file:
                graphs, entries = read_graphs(file, Trust(), fits), read_manifest(file)
        except (OSError, GraphFileError) as error:
            say(f"{path.name}: {error}")
            status = 1
            continue
        known = store.keys()
        kept = sum(store.put(graph) for graph in graphs if graph.key not in known)
        there = sum(graph.key in known for graph in graphs)
        say(f"{path.name}: {kept} graphs added to {store.place}, {there} were there")
        status = status or int(kept + there < len(graphs))
        _say_machines([entry for entry in entries if not fits(entry)], "  not taken: ", say)
    return status


def _make(options: argparse.Namespace, say: Say) -> int:
    graphs, missing = [], 0
    for path in options.files:
        try:
            with open_regular(path) as file:
                graphs += read_graphs(file, Trust())
        except (OSError, GraphFileError) as error:
            say(f"{path.name}: {error}")
            missing += 1
    if options.store:
        store = open_store(options.store)
        found, absent = _read_from(store, [entry.name for entry in store.entries()], say)
        graphs, missing = [*graphs, *found], missing + absent
    _write(_named(options.target), graphs, options.where, say)
    return 1 if missing else 0


def _read_from(store: FolderStore | UrlStore, names: Iterable[str], say: Say) -> tuple[list[StoredGraph], int]:
    """Return the graphs of a store's files, and how many of them cannot be read. Each of those is named."""
    graphs, missing = [], 0
    for name in names:
        try:
            graphs.append(store.read_graph(name))
        except (OSError, GraphFileError) as error:
            say(f"  not in the bundle: {name[:16]}: {error}")
            missing += 1
    return graphs, missing


def _named(path: Path) -> Path:
    return path if path.name.endswith(SUFFIX) else path.with_name(path.name + SUFFIX)


def _write(path: Path, graphs: Iterable[StoredGraph], where: str, say: Say) -> None:
    """Write a bundle, with what it has already. Raises GraphFileError for a file of others that is not trusted."""
    earlier: list[StoredGraph] = []
    if path.exists():
        with open_regular(path) as file:
            earlier, where = read_graphs(file, Trust()), where or read_where(file)
    together = list({graph.key: graph for graph in [*earlier, *graphs]}.values())
    if not together:
        raise GraphFileError("there is no graph to put into it")
    write_whole(path, write_graphs(together, Trust(), where))
    _say_file(path, say)


def _show(options: argparse.Namespace, say: Say) -> int:
    _say_file(options.target, say)
    return 0


def _say_file(path: Path, say: Say) -> None:
    with open_regular(path) as file:
        entries, where = read_manifest(file), read_where(file)
        try:
            signature = read_signature(file)
            signer = signature.fingerprint if signature else "this machine's secret only: no other machine runs it"
        except UnusableKey as error:
            signer = f"unknown ({error})"
        digest = sha256(file)
    size = path.stat().st_size / MEGABYTE
    say(f"{path.name}: {len(entries)} graphs, {size:.1f} MB")
    _say_machines(entries, "  ", say)
    say(f"  to run them: {needs_of(entries)}")
    say(f"  signed by: {signer}")
    say(f"  digest: {digest}")
    if where:
        say(f"  where: {where}")


def _say_machines(entries: Iterable[GraphIdentity], before: str, say: Say) -> None:
    """Say how many graphs there are for each kind of machine, and of which blocks."""
    entries = list(entries)
    counts = Counter(machine_of(entry) for entry in entries)
    for machine, count in sorted(counts.items()):
        blocks = sorted({entry.spec.region for entry in entries if machine_of(entry) == machine})
        say(printable(f"{before}{count} graphs for {machine}: {', '.join(blocks)}"))


def machine_of(identity: GraphIdentity) -> str:
    """Return in words which machines a graph is for."""
    fields = identity.environment
    named = [f"{name} {fields[name]}" for name in ("torch", "triton") if name in fields]
    return ", ".join([fields.get("device") or identity.spec.device, *named, identity.backend])


def needs_of(identities: Iterable[GraphIdentity]) -> str:
    """Return in words what a machine must have to run graphs, besides torch."""
    on_gpus = any(identity.spec.device.startswith("cuda") for identity in identities)
    # The library that Triton builds when it first runs is in the file: backends/inductor/triton_library.py.
    return "Triton; on AMD, or with another Python than the maker's, also a C compiler" if on_gpus else "no compiler"
