"""The command line: `python -m compiled_graphs doctor`, `... bake`, `... bundle`, `... key`, `... trust`, `... store`
and others.

Where the extension is not installed as a package, run `python -m FOLDER trust add FILE` in `custom_nodes`, or
`python PATH/FOLDER trust add FILE`: the Python of ComfyUI's portable build looks for no module in the current folder.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, TextIO

if not __package__:  # run by the folder's path, whatever its name is
    _folder = sys.path.pop(0)  # Python has put it there, and it has a module `diffusers`
    _spec = importlib.util.spec_from_file_location("compiled_graphs", Path(_folder, "__init__.py"))
    sys.modules["compiled_graphs"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["compiled_graphs"])
    runpy.run_module("compiled_graphs", run_name="__main__", alter_sys=True)
    sys.exit()

from .baking import bundle
from .baking import command as bake_command
from .compiler.common.errors import printable
from .compiler.common.files import open_regular
from .compiler.hosts.comfy.settings import store_limit
from .compiler.storage.graph_file import (
    SUFFIX,
    GraphFileError,
    OtherFormat,
    UntrustedFile,
    read_manifest,
    read_signature,
)
from .compiler.storage.signers import FINGERPRINT, MAX_NAME, Signer
from .compiler.storage.signers import fingerprint as fingerprint_of
from .compiler.storage.store import FolderStore, StoreEntry, StoreError, UrlStore, gigabytes, open_store
from .compiler.storage.trust import Trust

KEY_SHOWN = 16
"""Characters of a key that a person is shown."""
MEGABYTE = 10**6


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Return its exit status."""
    ours, rest = _split(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(ours)
    if rest and options.command != "bake":
        _parser().error("only bake takes options after --")
    options.comfyui_options = rest
    return options.run(options)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before and after `--`: argparse would give those after it to the first list it knows."""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:place], arguments[place + 1 :]


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
    bake = commands.add_parser(
        "bake",
        help="compile graphs of workflows, or of networks by name, before anybody asks for them",
        description="Starts a ComfyUI of its own. Graphs go to the store as they are made: a second run goes on.",
    )
    bake_command.add_arguments(bake)
    bake.set_defaults(run=lambda options: bake_command.run(options, _say))
    headers = commands.add_parser("headers", help="write the headers of models, for bake without weights")
    headers.add_argument("models", metavar="MODELS", type=Path, help="ComfyUI's folder models")
    headers.add_argument("target", metavar="FOLDER", type=Path, help="where the headers go")
    headers.set_defaults(run=lambda options: bake_command.write_headers(options, _say))
    bundled = commands.add_parser("bundle", help="one file with graphs of several models, GPUs and versions")
    bundle.add_arguments(bundled)
    bundled.set_defaults(run=lambda options: bundle.run(options, _say))
    _add_key_commands(commands.add_parser("key", help="the key with which this machine signs graphs for others"))
    _add_trust_commands(commands.add_parser("trust", help="whose graphs this machine runs, besides its own"))
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
        (_add, "take the graphs of files and bundles that fit this machine"),
    ):
        command = actions.add_parser(action.__name__.strip("_"), help=text, parents=[place])
        command.set_defaults(act=action)
        if action is _prune:
            default = "by default COMPILED_GRAPHS_STORE_LIMIT, or the limit in ComfyUI's settings"
            command.add_argument("--limit", metavar="GB", type=gigabytes, help=default)
        if action is _add:
            command.add_argument("files", metavar="FILE", nargs="+", type=Path)
            command.add_argument("--all", action="store_true", help="take those for other machines, too")
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


def _add_key_commands(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, dest="action")
    new = actions.add_parser("new", help="make a key; an earlier one is kept under another name")
    new.set_defaults(run=_key_new)
    show = actions.add_parser("show", help="print the fingerprint that others trust")
    show.set_defaults(run=_key_show)


def _add_trust_commands(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, dest="action")
    add = actions.add_parser("add", help="trust a signer, or a single file")
    add.add_argument("what", metavar="FINGERPRINT|FILE", help="a signed file stands for its signer")
    add.add_argument("--name", default="", help="what you call the signer")
    add.add_argument("--file-only", action="store_true", help="trust this file, and not its signer")
    add.add_argument("--yes", action="store_true", help="do not ask")
    add.set_defaults(run=_trust_add)
    listed = actions.add_parser("list", help="list signers and files")
    listed.set_defaults(run=_trust_list)
    remove = actions.add_parser("remove", help="no longer trust a signer or a file")
    remove.add_argument("what", metavar="FINGERPRINT|DIGEST")
    remove.set_defaults(run=_trust_remove)


def _key_new(options: argparse.Namespace) -> int:
    maker = Trust().maker
    try:
        fingerprint = maker.make()
    except OSError as error:
        _say(f"No key was made: {error}", sys.stderr)
        return 1
    _say(f"From now on graphs are also signed by {fingerprint}.")
    _say("Give this fingerprint to those who want to run them, by a way that they trust.")
    return 0


def _key_show(options: argparse.Namespace) -> int:
    try:
        _say(fingerprint_of(Trust().maker.public()))
    except FileNotFoundError:
        _say("This machine has no key to sign for others. `key new` makes one.", sys.stderr)
        return 1
    except OSError as error:
        _say(str(error), sys.stderr)
        return 1
    return 0


def _trust_add(options: argparse.Namespace) -> int:
    try:
        if FINGERPRINT.fullmatch(options.what):
            return _trust_signer(options.what, options)
        with open_regular(Path(options.what)) as file:
            count, signature = len(read_manifest(file)), None if options.file_only else read_signature(file)
            if signature is not None:
                return _trust_signer(signature.fingerprint, options)
            return _trust_file(file, count, options)
    except (OSError, GraphFileError) as error:
        _say(f"{options.what} cannot be trusted: {error}", sys.stderr)
        return 1


def _trust_signer(fingerprint: str, options: argparse.Namespace) -> int:
    question = (
        f"Graphs are native code. If you trust {fingerprint}, every graph that this signer has made or will make can "
        "do on this machine what you can do, until you remove the trust. Compare the fingerprint with the one that the "
        "signer gave you."
    )
    if not _agreed(question, options):
        return 1
    is_new = Trust().signers.add(Signer(fingerprint, " ".join(printable(options.name).split())[:MAX_NAME]))
    _say(f"{fingerprint} is trusted{'' if is_new else ' already'}.")
    return 0


def _trust_file(file: BinaryIO, count: int, options: argparse.Namespace) -> int:
    question = f"Graphs are native code. If you trust this file, its {count} graphs can do here what you can do."
    if not _agreed(question, options):
        return 1
    digest = Trust().add(file)
    _say(f"{Path(options.what).name}, {count} graphs, is trusted by its SHA-256 {digest}")
    return 0


def _agreed(question: str, options: argparse.Namespace) -> bool:
    """Ask the owner, who types at a terminal or has said --yes."""
    if options.yes:
        return True
    _say(question)
    if sys.stdin is None or not sys.stdin.isatty():
        _say("Nobody can answer here. Run it in a terminal, or with --yes.", sys.stderr)
        return False
    if input("Type yes to trust: ").strip().lower() == "yes":
        return True
    _say("Nothing was changed.")
    return False


def _trust_list(options: argparse.Namespace) -> int:
    try:
        signers, digests = Trust().signers.read(), Trust().trusted_digests()
    except OSError as error:
        _say(str(error), sys.stderr)
        return 1
    for signer in signers:
        _say(f"signer  {signer.fingerprint}  {printable(signer.name)}".rstrip())
    for digest in sorted(digests):
        _say(f"file    {digest}")
    if not signers and not digests:
        _say("Only graphs of this machine's own key run here.")
    return 0


def _trust_remove(options: argparse.Namespace) -> int:
    try:
        trust = Trust()
        gone = trust.signers.remove(options.what) or trust.remove(options.what)
    except OSError as error:
        _say(str(error), sys.stderr)
        return 1
    if not gone:
        _say(f"{options.what} is not trusted: `trust list` shows who is.", sys.stderr)
        return 1
    _say(f"{options.what} is no longer trusted. ComfyUI keeps what it has loaded until it restarts.")
    return 0


def _store(options: argparse.Namespace) -> int:
    try:
        store = _open(options.store)
        return options.act(store, store.entries(), options)
    except (StoreError, OSError) as error:
        _say(f"compiled_graphs store: {error}", sys.stderr)
        return 2


def _open(place: str | None) -> FolderStore | UrlStore:
    if place := place or os.environ.get("COMPILED_GRAPHS_STORE"):
        store = open_store(place)
        if isinstance(store, FolderStore) and not store.folder.is_dir():
            raise StoreError(f"The store {place} does not exist, or it is not a folder.")
        return store
    user_folder = Path(__file__).absolute().parent.parent.parent / "user"
    folder = user_folder / "compiled_graphs"
    if not folder.is_dir():
        raise StoreError("Where are the graphs? Name the folder or URL with --store PLACE.")
    return FolderStore(folder, limit=store_limit(user_folder))


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
            bad += not isinstance(error, OtherFormat)
    _say(f"{_amount(entries)} in {store.place}; {bad} bad")
    return 1 if bad else 0


def _prune(store: FolderStore | UrlStore, entries: list[StoreEntry], options: argparse.Namespace) -> int:
    for entry in entries:
        error = _fault(store, entry)
        is_damaged = isinstance(error, GraphFileError) and not isinstance(error, UntrustedFile | OtherFormat)
        if is_damaged and store.remove(entry.name):
            _say(f"removed {entry.name}: {error}")
    for entry in store.sweep():
        _say(f"removed {entry.name}: left by a process that ended")
    for entry in store.shrink(store.limit if options.limit is None else options.limit):
        _say(f"removed {entry.name}: last used {_date(entry)}")
    _say(f"{_amount(store.entries())} left in {store.place}")
    return 0


def _clear(store: FolderStore | UrlStore, entries: list[StoreEntry], options: argparse.Namespace) -> int:
    _say(f"{_amount(store.clear())} removed from {store.place}")
    if left := store.entries():
        _say(f"{_amount(left)} left: they are in use, or cannot be removed")
    return 1 if left else 0


def _add(store: FolderStore | UrlStore, entries: list[StoreEntry], options: argparse.Namespace) -> int:
    from .compiler.hosts.comfy.fitting import fits_here

    return bundle.add_to_store(store, options.files, (lambda entry: True) if options.all else fits_here, _say)


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
