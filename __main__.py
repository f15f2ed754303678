"""The command line: `python -m compiled_graphs doctor`, `... trust FILE`, `... store list` and `... backends`.

Where the extension is not installed as a package, run `python -m FOLDER trust FILE` in `custom_nodes`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from .compiler.common.errors import printable
from .compiler.common.files import open_regular
from .compiler.hosts.comfy.settings import store_limit
from .compiler.storage.graph_file import SUFFIX, GraphFileError, UntrustedFile, read_manifest
from .compiler.storage.store import FolderStore, StoreEntry, StoreError, UrlStore, gigabytes, open_store
from .compiler.storage.trust import Trust

KEY_SHOWN = 16
"""Characters of a key that a person is shown."""
MEGABYTE = 10**6


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Return its exit status."""
    options = _parser().parse_args(arguments)
    return options.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="compiled_graphs")
    commands = parser.add_subparsers(required=True, dest="command")
    doctor = commands.add_parser(
        "doctor",
        help="check what compiling needs here, and say what to do about the rest",
        description="Each line begins with ok, with -- for what is not there and not needed, or with !! for a fault.",
    )
    doctor.set_defaults(run=_doctor)
    doctor.add_argument("--comfyui", metavar="FOLDER", type=Path, help="ComfyUI's code, if it is not found")
    for name in ("base", "user"):
        given = f"what ComfyUI is given as --{name}-directory, if anything"
        doctor.add_argument(f"--{name}-directory", metavar="FOLDER", type=Path, help=given)
    trust = commands.add_parser("trust", help="let this machine run the graphs of a file that another machine made")
    trust.add_argument("file", type=Path)
    trust.set_defaults(run=_trust)
    store = commands.add_parser("store", help="list, check and remove the compiled graphs that this machine keeps")
    store.set_defaults(run=_store)
    actions = store.add_subparsers(required=True, dest="action")
    place = argparse.ArgumentParser(add_help=False)
    place.add_argument(
        "--store", metavar="PLACE", help="folder or URL; by default COMPILED_GRAPHS_STORE, or ComfyUI's user folder"
    )
    for action, text in (
        (_list, "list the graphs"),
        (_verify, "read every graph and report the bad ones"),
        (_prune, "remove damaged graphs, and the least recently used ones above the limit"),
        (_clear, "remove all graphs"),
    ):
        command = actions.add_parser(action.__name__.strip("_"), help=text, parents=[place])
        command.set_defaults(act=action)
        if action is _prune:
            default = "by default COMPILED_GRAPHS_STORE_LIMIT, or the limit in ComfyUI's settings"
            command.add_argument("--limit", metavar="GB", type=gigabytes, help=default)
    backends = commands.add_parser("backends", help="list the compilers that can be used here, and why others cannot")
    backends.set_defaults(run=_backends)
    return parser


def _doctor(options: argparse.Namespace) -> int:
    from .compiler.hosts.comfy.doctor_facts import on_disk
    from .compiler.registry.doctor import examine

    package = Path(__file__).absolute().parent
    facts = examine(on_disk(package, options.comfyui, options.base_directory, options.user_directory))
    for fact in facts:
        mark = "!!" if not fact.ok else "ok" if fact.present else "--"
        _say(f"{mark}  {fact.name}: {fact.text}{'' if fact.ok else f'. {fact.remedy}'}")
    return 0 if all(fact.ok for fact in facts) else 1


def _backends(options: argparse.Namespace) -> int:
    import torch

    from .compiler.backends import BACKENDS
    from .compiler.backends.oneflow import onediff_text

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name, backend in BACKENDS.items():
        reason = backend.available(device)
        fields = {} if reason else backend.environment(device)
        versions = ", ".join(f"{key} {fields[key]}" for key in ("torch", "triton", "oneflow") if key in fields)
        _say(f"{name}: {reason or f'can be used on {device.type} ({versions})'}")
    if text := onediff_text():
        _say(text)
    return 0


def _trust(options: argparse.Namespace) -> int:
    try:
        with open_regular(options.file) as file:
            count = len(read_manifest(file))
            digest = Trust().add(file)
    except (OSError, GraphFileError) as error:
        _say(f"{options.file} cannot be trusted: {error}", sys.stderr)
        return 1
    _say(f"{options.file.name}, {count} graphs, is trusted by its SHA-256 {digest}")
    return 0


def _store(options: argparse.Namespace) -> int:
    try:
        store = _open(options.store)
        return options.act(store, store.entries(), options)
    except (StoreError, OSError) as error:
        _say(f"compiled_graphs store: {error}", sys.stderr)
        return 2


def _open(place: str | None) -> FolderStore | UrlStore:
    place = place or os.environ.get("COMPILED_GRAPHS_STORE")
    user_folder = Path(__file__).absolute().parent.parent.parent / "user"
    if not place:
        folder = user_folder / "compiled_graphs"
        if not folder.is_dir():
            raise StoreError("Where are the graphs? Name the folder or URL with --store PLACE.")
        place = str(folder)
    store = open_store(place)
    if isinstance(store, FolderStore) and not store.folder.is_dir():
        raise StoreError(f"The store {place} does not exist, or it is not a folder.")
    limit = store_limit(user_folder)
    if limit is not None:
        store.limit = limit
    return store


def _list(store: FolderStore | UrlStore, entries: list[StoreEntry], options: argparse.Namespace) -> int:
    for entry in sorted(entries, key=lambda entry: entry.used, reverse=True):
        _say(f"{_key(entry):{KEY_SHOWN}}  {_contents(store, entry)}")
    _say(f"{_amount(entries)} of {store.limit / MEGABYTE:.1f} MB in {store.place}")
    return 0


def _verify(store: FolderStore | UrlStore, entries: list[StoreEntry], options: argparse.Namespace) -> int:
    bad = 0
    for entry in entries:
        if error := _fault(store, entry):
            _say(f"{entry.name}: {error}")
            bad += 1
    _say(f"{_amount(entries)} in {store.place}; {bad} bad")
    return 1 if bad else 0


def _prune(store: FolderStore | UrlStore, entries: list[StoreEntry], options: argparse.Namespace) -> int:
    for entry in entries:
        error = _fault(store, entry)
        if isinstance(error, GraphFileError) and not isinstance(error, UntrustedFile) and store.remove(entry.name):
            _say(f"removed {entry.name}: {error}")
    for entry in store.sweep():
        _say(f"removed {entry.name}: a partial file")
    for entry in store.shrink(store.limit if options.limit is None else options.limit):
        _say(f"removed {entry.name}: last used {_date(entry)}")
    _say(f"{_amount(store.entries())} left in {store.place}")
    return 0


def _clear(store: FolderStore | UrlStore, entries: list[StoreEntry], options: argparse.Namespace) -> int:
    _say(f"{_amount(store.clear())} removed from {store.place}")
    if left := store.entries():
        _say(f"{_amount(left)} left: they are in use, or cannot be removed")
    return 1 if left else 0


def _fault(store: FolderStore | UrlStore, entry: StoreEntry) -> OSError | GraphFileError | None:
    """Return what is wrong with a file, or None. It may be unreadable, foreign, damaged, or hold another graph."""
    try:
        store.read_graph(entry.name)
    except (OSError, GraphFileError) as error:
        return error
    return None


def _contents(store: FolderStore | UrlStore, entry: StoreEntry) -> str:
    size = f"{entry.size / MEGABYTE:8.1f} MB"
    try:
        with store.open(entry.name) as file:
            graphs = read_manifest(file)
    except (OSError, GraphFileError) as error:
        return f"{error}  {size}  {_date(entry)}"
    regions = _names(graph.spec.region for graph in graphs)
    backends = _names(graph.backend for graph in graphs)
    return f"{regions:32}  {backends:10}  {size}  {_date(entry)}"


def _names(names: Iterable[object]) -> str:
    return ", ".join(sorted({str(name) for name in names}))


def _key(entry: StoreEntry) -> str:
    return entry.name.removesuffix(SUFFIX)[:KEY_SHOWN]


def _date(entry: StoreEntry) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))


def _amount(entries: Iterable[StoreEntry]) -> str:
    sizes = [entry.size for entry in entries]
    return f"{len(sizes)} graphs, {sum(sizes) / MEGABYTE:.1f} MB,"


def _say(text: str, stream: TextIO | None = None) -> None:
    stream = stream or sys.stdout
    encoding = stream.encoding or "utf-8"
    print(printable(text).encode(encoding, "replace").decode(encoding), file=stream)


if __name__ == "__main__":
    sys.exit(main())
