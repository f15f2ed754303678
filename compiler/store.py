"""Graphs on disk, by key: what this machine has compiled before."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as read_container
from safetensors.torch import save as write_container

from .graph import GraphSpec, InputSpec, WeightSpec

log = logging.getLogger(__name__)

FORMAT = 1
SUFFIX = ".graph.safetensors"


@dataclass(frozen=True)
class StoredGraph:
    """A graph as it lies on disk."""

    key: str
    backend: str
    spec: GraphSpec
    executable: bytes


class FolderStore:
    """One file per graph in a folder. A file is written whole or not at all."""

    def __init__(self, folder: str | os.PathLike) -> None:
        self.folder = Path(folder)

    def get(self, key: str) -> StoredGraph | None:
        """Return a graph, or None if it is not there or not whole."""
        path = self._path(key)
        try:
            return unpack(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, AttributeError, KeyError, ValueError, TypeError) as error:
            log.warning("Stored graph %s cannot be read (%s); it is compiled again.", path.name, error)
            return None

    def put(self, graph: StoredGraph) -> bool:
        """Write a graph and return True, or say why it could not be kept and return False."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._path(graph.key), pack(graph))
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


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file by these bytes: a reader, or a crash at any moment, meets the old file or the new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def pack(graph: StoredGraph) -> bytes:
    """Return a graph as a safetensors container: a JSON header that executes nothing, and one blob."""
    header = {"format": FORMAT, "key": graph.key, "backend": graph.backend, "spec": asdict(graph.spec)}
    blob = torch.frombuffer(bytearray(graph.executable), dtype=torch.uint8)
    return write_container({"executable": blob}, metadata={"compiled_graphs": json.dumps(header)})


def unpack(data: bytes) -> StoredGraph:
    """Read what `pack` wrote. Raises what `FolderStore.get` catches on anything else."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["compiled_graphs"])
    if header["format"] != FORMAT:
        raise ValueError(f"format {header['format']}, this version reads {FORMAT}")
    blob = read_container(data)["executable"]
    return StoredGraph(header["key"], header["backend"], _spec(header["spec"]), blob.numpy().tobytes())


def _spec(fields: Mapping[str, Any]) -> GraphSpec:
    def tuples(value: Any) -> Any:
        return tuple(tuples(item) for item in value) if isinstance(value, list) else value

    weights = tuple(WeightSpec(**{k: tuples(v) for k, v in weight.items()}) for weight in fields["weights"])
    inputs = tuple(InputSpec(**{k: tuples(v) for k, v in item.items()}) for item in fields["inputs"])
    rest = {k: tuples(v) for k, v in fields.items() if k not in ("weights", "inputs")}
    return GraphSpec(weights=weights, inputs=inputs, **rest)
