"""The parts of a graph's key besides its region and its call: versions, the device, and the code that makes graphs.

The key includes digests of whole folders of that code, so nobody maintains a list of files. Any change to a file that
decides what a graph is also changes the key. So an update that corrects a graph never loads the old graph.
"""

from __future__ import annotations

import hashlib
import inspect
from functools import lru_cache
from pathlib import Path

import torch

from ..backends.base import Backend
from ..common.host import Host
from ..storage.graph_file import FORMAT

_COMPILER = Path(__file__).resolve().parents[1]
RULES = "rules"
"""The subfolder of a host's folder whose code decides what a graph is."""


def environment(backend: Backend, device: torch.device, host: Host) -> dict[str, str]:
    """Return the backend's environment and the versions of the code that makes graphs. Part of a graph's key."""
    return backend.environment(device) | {
        "identity": code_version(_COMPILER / "identity"),
        "tracing": code_version(_COMPILER / "tracing"),
        "torch_compat": code_version(_COMPILER / "common" / "torch_compat"),
        "compiling": code_version(Path(inspect.getfile(type(backend))).parent),
        "host": code_version(host.folder / RULES) if host.folder else "",
        "format": str(FORMAT),  # of files: otherwise two versions that share a store would overwrite each other's
    }


def request_version(host: Host) -> str:
    """Return a version of the code that finds out which graphs a model needs."""
    ours = [_COMPILER / "identity", _COMPILER / "tracing", _COMPILER / "common" / "torch_compat"]
    return " ".join(map(code_version, [*ours, *([host.folder] if host.folder else [])]))


@lru_cache
def code_version(folder: Path) -> str:
    """Return a digest of the Python files in a folder and in its subfolders, with their names."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).as_posix()):
        source = path.read_text(encoding="utf-8")  # reading turns all line ends into one
        digest.update(f"{path.relative_to(folder).as_posix()}\0{source}\0".encode())
    return digest.hexdigest()[:16]
