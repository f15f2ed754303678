"""A graph file is a safetensors container with a signed JSON manifest and compressed blobs.

Reading the manifest executes nothing. A blob holds native code. It is returned only from a file that this machine
signed or its owner trusts, and only after its digest has been compared. From any other file this module reads only
the manifest: a list of graphs that a model may want.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any, BinaryIO, TypeVar

import numpy
import torch
from safetensors.numpy import save as write_container

from ..backends.base import Backend
from ..common import bounded_json
from ..common.errors import printable
from ..identity.graph_spec import CompiledGraph, GraphIdentity, GraphSpec, InputSpec, WeightSpec
from .private_files import UnusableKey
from .signers import Signature
from .trust import Trust

FORMAT = 5
SUFFIX = ".graph.safetensors"
A = TypeVar("A")
B = TypeVar("B")

MAX_FILE = 2 * 2**30
"""Bytes of a whole file."""
MAX_HEADER = 8 * 2**20
"""Bytes of the safetensors header, which contains the manifest."""
MAX_EXECUTABLE = 2**30
"""Bytes of one graph, uncompressed. SDXL's graphs have 6 MB on average."""
MAX_QUOTED = 200
"""Characters of a foreign file that a message may quote."""
NOT_MADE_HERE = "the file was not made on this machine, and its owner has not trusted it"


class GraphFileError(Exception):
    """This file cannot be used. The message is one sentence for people."""


class OtherFormat(GraphFileError):
    """Another version of this extension wrote the file, and can read it."""


class UntrustedFile(GraphFileError):
    """The file is sound, but this machine did not sign it and its owner does not trust it."""

    def __init__(self, reason: str, signer: str = "") -> None:
        """`signer` is the fingerprint of whoever signed the file, if trusting them would let it run."""
        super().__init__(reason)
        self.signer = signer


@dataclass(frozen=True)
class StoredGraph(GraphIdentity):
    """A graph in the form that is written to disk."""

    executable: bytes
    is_foreign: bool = field(default=False, compare=False)
    """As in `CompiledGraph`."""

    @classmethod
    def of(cls, graph: CompiledGraph) -> StoredGraph:
        """Return the stored form of a compiled graph. Raises what the backend raises if it cannot be stored."""
        return cls(**graph.identity(), executable=graph.executable.to_bytes(), is_foreign=graph.is_foreign)

    def load(self, backend: Backend, device: torch.device | None = None) -> CompiledGraph:
        """Return the graph ready to run, on another device of the kind that it was made on if one is named.

        This runs native code from `executable`. Raises what torch raises.
        """
        spec = self.spec if device is None else replace(self.spec, device=str(device))
        fields = self.identity() | {"spec": spec}
        return CompiledGraph(**fields, executable=backend.load(self.executable, spec), is_foreign=self.is_foreign)


@dataclass(frozen=True)
class Entry(GraphIdentity):
    """One graph of a manifest."""

    digest: str
    """SHA-256 of the compressed blob."""
    size: int
    """Bytes of the executable."""


@dataclass(frozen=True)
class Contents:
    """What a file has for those who ask."""

    graphs: Sequence[StoredGraph]
    """The graphs that are wanted and may run here."""
    listed: Sequence[Entry]
    """What cannot be used: all of a file that is not trusted, otherwise the graphs that are not wanted."""
    untrusted: UntrustedFile | None = None
    """Why nothing of the file may run here."""


def write_graphs(graphs: Sequence[StoredGraph], trust: Trust, where: str = "") -> bytes:
    """Return the bytes of a file with these graphs, each key once, signed by this machine.

    `where` says in words where people get the file; it is signed, too.
    Raises UnusableKey without a key, and GraphFileError if the file would be too large to be read again.
    """
    unique = list({graph.key: graph for graph in graphs}.values())
    blobs = _map_in_threads(lambda graph: zlib.compress(graph.executable), unique)
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
    said = {"where": where} if where else {}
    manifest = json.dumps({"format": FORMAT, "graphs": entries, **said}, sort_keys=True)
    tensors = {graph.key: numpy.frombuffer(blob, dtype=numpy.uint8) for graph, blob in zip(unique, blobs, strict=True)}
    metadata = {"compiled_graphs": manifest, "signature": trust.sign(manifest.encode())}
    if made := trust.countersign(manifest.encode()):
        metadata |= {"signer": made.key, "signature_of_signer": made.value}
    data = write_container(tensors, metadata)
    if len(data) > MAX_FILE or int.from_bytes(data[:8], "little") > MAX_HEADER:
        raise GraphFileError(f"{len(unique)} graphs are too many for one file: save parts of the model separately")
    return data


def read_manifest(source: bytes | BinaryIO) -> list[Entry]:
    """Return the graphs that a file claims to hold, whoever wrote it. Executes nothing.

    `source` is the bytes of a file, or an open file. Of an open file only the header is read. Raises GraphFileError,
    and OSError if the file cannot be read.
    """
    return _entries(_read_header(_as_file(source)).manifest)


def read_where(source: bytes | BinaryIO) -> str:
    """Return where a file says that people get it; nothing if it does not say. Raises as `read_manifest` does."""
    where = _parse(_read_header(_as_file(source)).manifest.encode()).get("where", "")
    return _quoted(where) if isinstance(where, str) else ""


def read_signature(source: bytes | BinaryIO) -> Signature | None:
    """Return who a file says has signed it, if it is so; None for a file without a public signature.

    Raises GraphFileError, UnusableKey without the library for signatures, and OSError if the file cannot be read.
    """
    header = _read_header(_as_file(source))
    if header.maker and not header.maker.is_valid(header.manifest.encode()):
        raise GraphFileError("the file names a signer, and the signature is not valid")
    return header.maker


def is_signed_by(source: bytes | BinaryIO, trust: Trust) -> bool:
    """Whether a file was signed with a machine's own key. Raises as `read_signature` does."""
    header = _read_header(_as_file(source))
    return trust.signed(header.manifest.encode(), header.signature)


def read_graphs(
    source: bytes | BinaryIO, trust: Trust, is_wanted: Callable[[Entry], bool] = lambda entry: True
) -> list[StoredGraph]:
    """Return the graphs of a file that this machine signed or its owner trusts. `source` is as in `read_manifest`.

    Only the graphs that are wanted are read: a bundle has graphs for other models and other machines, too.

    Raises UntrustedFile for any other file, before any blob is read. Raises GraphFileError on damage, and OSError if
    the file cannot be read.
    """
    file = _as_file(source)
    header = _read_header(file)
    if problem := _distrust(trust, header):
        file = _trusted_copy(trust, file)
        if file is None:
            raise problem
        header = _read_header(file)
    entries = [entry for entry in _entries(header.manifest) if is_wanted(entry)]
    blobs = [_read_blob(file, header, entry) for entry in entries]
    unpacked = _map_in_threads(lambda pair: _unpack(*pair), zip(entries, blobs, strict=True))
    is_foreign = not trust.is_own(header.manifest.encode(), header.signature)
    return [StoredGraph(**entry.identity(), executable=code, is_foreign=is_foreign)
            for entry, code in zip(entries, unpacked, strict=True)]  # fmt: skip


def read_contents(
    source: bytes | BinaryIO, trust: Trust, is_wanted: Callable[[Entry], bool] = lambda entry: True
) -> Contents:
    """Return what a file has, whoever wrote it. Raises GraphFileError on damage, and OSError if it cannot be read."""
    file = _as_file(source)
    try:
        graphs, untrusted = read_graphs(file, trust, is_wanted), None
    except UntrustedFile as reason:
        graphs, untrusted = [], reason
    entries = read_manifest(file)
    if untrusted is not None:
        return Contents([], entries, untrusted)
    return Contents(graphs, [entry for entry in entries if not is_wanted(entry)])


def _map_in_threads(work: Callable[[A], B], items: Iterable[A]) -> list[B]:
    """Apply `work` in several threads: hashing and compression release Python's lock. In one thread, writing SDXL's
    graphs takes 4 s."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(work, items))


@dataclass(frozen=True)
class _Header:
    manifest: str
    signature: str
    """This machine's own, by its secret."""
    maker: Signature | None
    """The public one, if the file has it."""
    places: Mapping[str, Any]
    """The container's fields of each blob. They are not signed."""
    start: int
    """Offset in the file at which the blobs begin."""
    size: int
    """Bytes of all blobs together."""


def _as_file(source: bytes | BinaryIO) -> BinaryIO:
    return io.BytesIO(source) if isinstance(source, bytes) else source


def _read_header(file: BinaryIO) -> _Header:
    total = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(8)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > total - 8:
        raise GraphFileError("the file is not a graph file, or it was cut off")
    if total > MAX_FILE:
        raise GraphFileError(f"the file has {total} bytes, more than any graph file")
    if length > MAX_HEADER:
        raise GraphFileError(f"the file's header has {length} bytes, more than any graph file's")
    fields = _parse(file.read(length))
    metadata = fields.pop("__metadata__", None)
    if not isinstance(metadata, dict):
        raise GraphFileError("the file is not a graph file")
    if "compiled_graphs" not in metadata:
        raise GraphFileError("the file is a safetensors file without graphs")
    try:
        manifest, signature = _text(metadata["compiled_graphs"]), _text(metadata.get("signature", ""))
        public = Signature(_text(metadata.get("signer", "")), _text(metadata.get("signature_of_signer", "")))
    except (TypeError, ValueError):
        raise GraphFileError("the file's header holds something that is not text") from None
    return _Header(manifest, signature, public if public.key else None, fields, 8 + length, total - 8 - length)


def _distrust(trust: Trust, header: _Header) -> UntrustedFile | None:
    """Return why this machine must not run a file's graphs by who signed it, or None if it may."""
    problem: UntrustedFile | None = UntrustedFile(NOT_MADE_HERE)
    try:
        if trust.signed(header.manifest.encode(), header.signature):
            return None
    except UnusableKey as error:
        problem = UntrustedFile(str(error))
    if header.maker:
        distrust = trust.distrust_of(header.manifest.encode(), header.maker)
        problem = distrust and UntrustedFile(distrust.reason, distrust.signer)
    return problem


def _trusted_copy(trust: Trust, file: BinaryIO) -> BinaryIO | None:
    """Return a file that the owner trusts as it is, in memory: nobody can change it after the look. None for others."""
    if not trust.trusts(file):
        return None
    file.seek(0)
    copy = io.BytesIO(file.read(MAX_FILE))
    return copy if trust.trusts(copy) else None


def _read_blob(file: BinaryIO, header: _Header, entry: Entry) -> bytes:
    """Read a graph's blob. The signed size bounds it: zlib adds less than a thousandth to data it cannot compress."""
    begin, end = _place(header.places.get(entry.key), header.size)
    if end - begin > entry.size + entry.size // 1000 + 64:
        raise GraphFileError(f"the file is damaged (the graph of {_quoted(entry.spec.region)} has the wrong size)")
    file.seek(header.start + begin)
    blob = file.read(end - begin)
    if hashlib.sha256(blob).hexdigest() != entry.digest:
        raise GraphFileError(
            f"the file is damaged (the graph of {_quoted(entry.spec.region)} is not the one it was signed with)"
        )
    return blob


def _place(fields: Any, size: int) -> tuple[int, int]:
    match fields:
        case {"data_offsets": [int(begin), int(end)]} if 0 <= begin <= end <= size:
            return begin, end
    raise GraphFileError("the file is damaged (a graph that it lists is not in it)")


def _unpack(entry: Entry, blob: bytes) -> bytes:
    unpacker = zlib.decompressobj()
    try:
        executable = unpacker.decompress(blob, entry.size + 1)
    except zlib.error as error:
        raise GraphFileError(f"the file is damaged ({error})") from None
    if len(executable) != entry.size or not unpacker.eof:
        raise GraphFileError(f"the file is damaged (the graph of {_quoted(entry.spec.region)} has the wrong size)")
    return executable


def _entries(manifest: str) -> list[Entry]:
    fields = _parse(manifest.encode())
    if fields.get("format") != FORMAT:
        found = _quoted(repr(fields.get("format")))
        raise OtherFormat(f"the file has format {found}, and this version reads {FORMAT}")
    try:
        return [_entry(graph) for graph in _list(fields["graphs"])]
    except (KeyError, TypeError, ValueError) as error:
        found = f"{type(error).__name__}: {_quoted(str(error))}"
        raise GraphFileError(f"the file's manifest is damaged ({found})") from None


def _entry(fields: Any) -> Entry:
    """Return one graph of a manifest. Raises KeyError, TypeError or ValueError if the fields do not describe one."""
    fields = _dict(fields)
    size = _count(fields["size"])
    if size > MAX_EXECUTABLE:
        raise ValueError(f"a graph of {size} bytes")
    return Entry(
        key=_text(fields["key"]),
        fingerprint=_text(fields["fingerprint"]),
        signature=_text(fields["signature"]),
        backend=_text(fields["backend"]),
        environment={_text(name): _text(value) for name, value in _dict(fields["environment"]).items()},
        spec=_spec(_dict(fields["spec"])),
        digest=_text(fields["digest"]),
        size=size,
    )


def _spec(fields: Mapping[str, Any]) -> GraphSpec:
    return GraphSpec(
        region=_text(fields["region"]),
        device=_text(fields["device"]),
        weights=tuple(_weight(_dict(weight)) for weight in _list(fields["weights"])),
        inputs=tuple(_input(_dict(each)) for each in _list(fields["inputs"])),
        guards=_each(_text, fields["guards"]),
        mutated=_each(_count, fields["mutated"]),
        outputs=_each(_flag, fields["outputs"]),
        tree=_text(fields["tree"]),
        reads=_each(_text, fields["reads"]),
        writes=_text(fields["writes"]),
        frames=_text(fields["frames"]),
    )


def _weight(fields: Mapping[str, Any]) -> WeightSpec:
    name, dtype = _text(fields["name"]), _text(fields["dtype"])
    return WeightSpec(name, _each(_size, fields["shape"]), _each(_count, fields["stride"]), dtype)


def _input(fields: Mapping[str, Any]) -> InputSpec:
    return InputSpec(
        sizes=_each(_size, fields["sizes"]),
        dtype=_text(fields["dtype"]),
        memory_format=_text(fields["memory_format"]),
        hints=_each(_count, fields["hints"]),
        symbolic=_each(_flag, fields["symbolic"]),
    )


def _each(read: Callable[[Any], A], values: Any) -> tuple[A, ...]:
    return tuple(read(value) for value in _list(values))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} in place of a text")
    value.encode()  # JSON can hold half a surrogate pair, which no file, digest or terminal takes
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{type(value).__name__} in place of a size")
    return value


def _size(value: Any) -> int | str:
    return _text(value) if isinstance(value, str) else _count(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{type(value).__name__} in place of true or false")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{type(value).__name__} in place of a list")
    return value


def _dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{type(value).__name__} in place of an object")
    return value


def _quoted(text: str) -> str:
    return printable(text[:MAX_QUOTED])


def _parse(text: bytes) -> dict[str, Any]:
    try:
        fields = bounded_json.parse(text)
    except ValueError as error:
        raise GraphFileError(f"the file's header {error}") from None
    if not isinstance(fields, dict):
        raise GraphFileError("the file's header is not a JSON object")
    return fields
