"""Graphs as bytes: a safetensors container with a signed JSON manifest and compressed blobs.

Reading the manifest executes nothing. A blob holds native code, so it is handed out only from a file that
this machine signed or its owner trusts, and only after its digest has been compared; what anybody else
wrote is at most a list of graphs that a model may want.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy
from safetensors import SafetensorError
from safetensors.numpy import load as read_container
from safetensors.numpy import save as write_container

from .backends.base import Backend
from .graph import CompiledGraph, GraphIdentity, GraphSpec, InputSpec, WeightSpec
from .trust import Trust

FORMAT = 1
SUFFIX = ".graph.safetensors"
A = TypeVar("A")
B = TypeVar("B")

MAX_HEADER = 8 * 2**20
"""Bytes."""
MAX_DEPTH = 16
MAX_EXECUTABLE = 2**30
"""Bytes of one graph, uncompressed; SDXL's have 6 MB on average."""


class GraphFileError(Exception):
    """A file that cannot be used; the message is one sentence for people."""


class UntrustedFile(GraphFileError):
    """A sound file whose blobs this machine has no reason to run."""


@dataclass(frozen=True)
class StoredGraph(GraphIdentity):
    """A graph as it lies on disk."""

    executable: bytes

    @classmethod
    def of(cls, graph: CompiledGraph) -> StoredGraph:
        """Return a compiled graph as it is stored. Raises what the backend raises if it cannot be."""
        return cls(**graph.identity(), executable=graph.executable.to_bytes())

    def load(self, backend: Backend) -> CompiledGraph:
        """Return the graph ready to run. Runs native code from `executable`, and raises what torch makes of it."""
        return CompiledGraph(**self.identity(), executable=backend.load(self.executable, self.spec))


@dataclass(frozen=True)
class Entry(GraphIdentity):
    """One graph of a manifest."""

    digest: str
    """SHA-256 of the compressed blob."""
    size: int
    """Bytes of the executable."""


def write_graphs(graphs: Sequence[StoredGraph], trust: Trust) -> bytes:
    """Return a file with these graphs, each key once, signed by this machine. Raises OSError without a key."""
    unique = list({graph.key: graph for graph in graphs}.values())
    blobs = _side_by_side(lambda graph: zlib.compress(graph.executable), unique)
    entries = [
        {
            **graph.identity(),
            "environment": dict(graph.environment),
            "spec": asdict(graph.spec),
            "digest": hashlib.sha256(blob).hexdigest(),
            "size": len(graph.executable),
        }
        for graph, blob in zip(unique, blobs, strict=True)
    ]
    manifest = json.dumps({"format": FORMAT, "graphs": entries}, sort_keys=True)
    tensors = {graph.key: numpy.frombuffer(blob, dtype=numpy.uint8) for graph, blob in zip(unique, blobs, strict=True)}
    return write_container(tensors, {"compiled_graphs": manifest, "signature": trust.sign(manifest.encode())})


def read_manifest(data: bytes) -> list[Entry]:
    """Return what a file says it holds, whoever wrote it. Executes nothing. Raises GraphFileError."""
    return _entries(_metadata(data)["compiled_graphs"])


def read_graphs(data: bytes, trust: Trust) -> list[StoredGraph]:
    """Return the graphs of a file that this machine signed or its owner trusts.

    Raises UntrustedFile if neither is so, before any blob is looked at, and GraphFileError on damage.
    """
    metadata = _metadata(data)
    manifest = metadata["compiled_graphs"]
    if not trust.covers(manifest.encode(), metadata.get("signature", ""), data):
        raise UntrustedFile("the file was not made on this machine, and its owner has not trusted it")
    entries = _entries(manifest)
    try:
        blobs = {name: array.tobytes() for name, array in read_container(data).items()}
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise GraphFileError(f"the file is damaged ({error})") from None
    return _side_by_side(lambda entry: _open(entry, blobs), entries)


def read_or_list(data: bytes, trust: Trust) -> tuple[list[StoredGraph], list[Entry]]:
    """Return the graphs of a file, or if this machine may not run them, what they are. Raises GraphFileError."""
    try:
        return read_graphs(data, trust), []
    except UntrustedFile:
        return [], read_manifest(data)


def _side_by_side(work: Callable[[A], B], items: Iterable[A]) -> list[B]:
    """Hashing and compression let other threads run; one after another, SDXL's graphs take 4 s to write."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(work, items))


def _open(entry: Entry, blobs: Mapping[str, bytes]) -> StoredGraph:
    blob = blobs.get(entry.key, b"")
    if hashlib.sha256(blob).hexdigest() != entry.digest:
        raise GraphFileError(
            f"the file is damaged (the graph of {entry.spec.region} is not the one it was signed with)"
        )
    unpacker = zlib.decompressobj()
    executable = unpacker.decompress(blob, entry.size + 1)
    if len(executable) != entry.size or not unpacker.eof:
        raise GraphFileError(f"the file is damaged (the graph of {entry.spec.region} has another size)")
    return StoredGraph(**entry.identity(), executable=executable)


def _metadata(data: bytes) -> dict[str, str]:
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise GraphFileError("the file is not a graph file, or it was cut off")
    if size > MAX_HEADER:
        raise GraphFileError(f"the file's header has {size} bytes, more than any graph file's")
    metadata = _parse(data[8 : 8 + size]).get("__metadata__")
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise GraphFileError("the file is not a graph file")
    if "compiled_graphs" not in metadata:
        raise GraphFileError("the file is a safetensors file without graphs")
    return metadata


def _entries(manifest: str) -> list[Entry]:
    fields = _parse(manifest.encode())
    if fields.get("format") != FORMAT:
        raise GraphFileError(f"the file has format {fields.get('format')!r}, and this version reads {FORMAT}")
    try:
        return [_entry(graph) for graph in fields["graphs"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise GraphFileError(f"the file's manifest is damaged ({type(error).__name__}: {error})") from None


def _entry(fields: Mapping[str, Any]) -> Entry:
    spec = dict(fields["spec"])
    weights = tuple(WeightSpec(**_tuples(weight)) for weight in spec.pop("weights"))
    inputs = tuple(InputSpec(**_tuples(item)) for item in spec.pop("inputs"))
    size = fields["size"]
    if not isinstance(size, int) or not 0 <= size <= MAX_EXECUTABLE:
        raise ValueError(f"a graph of {size!r} bytes")
    return Entry(
        key=str(fields["key"]),
        fingerprint=str(fields["fingerprint"]),
        structure=str(fields["structure"]),
        backend=str(fields["backend"]),
        environment={str(name): str(value) for name, value in fields["environment"].items()},
        spec=GraphSpec(weights=weights, inputs=inputs, **_tuples(spec)),
        digest=str(fields["digest"]),
        size=size,
    )


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def _parse(text: bytes) -> dict[str, Any]:
    """Parse JSON whose nesting has been measured first: the parser itself recurses."""
    depth = deepest = 0
    for bracket in re.findall(rb"[\[{\]}]", re.sub(rb'"(?:[^"\\]|\\.)*"', b"", text)):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise GraphFileError("the file's header is nested deeper than any graph file's")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        raise GraphFileError("the file's header is not JSON") from None
    if not isinstance(fields, dict):
        raise GraphFileError("the file's header is not a JSON object")
    return fields
