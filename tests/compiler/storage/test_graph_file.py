from __future__ import annotations

import dataclasses
import io
import json
import os
import random
import struct
import zlib

import numpy
import pytest
from compiled_graphs.compiler.identity.graph_spec import GraphSpec, InputSpec, WeightSpec
from compiled_graphs.compiler.storage import graph_file
from compiled_graphs.compiler.storage.graph_file import (
    GraphFileError,
    StoredGraph,
    UntrustedFile,
    read_contents,
    read_graphs,
    read_manifest,
    write_graphs,
)
from compiled_graphs.compiler.storage.trust import Trust
from safetensors.numpy import save

SPEC = GraphSpec(
    region="Block",
    device="cpu",
    weights=(
        WeightSpec("linear.weight", (4, 3), (3, 1), "torch.float32"),
        WeightSpec("scale", (), (), "torch.half"),
        WeightSpec("linear.compiled_graphs_down", ("s2", 3), (3, 1), "torch.half"),
    ),
    inputs=(InputSpec(("s0", "s1*2", 16), "torch.float32", "contiguous"),),
    guards=("s0 % 2 == 0",),
    mutated=(0,),
    outputs=(True, False),
    tree="[1, {}]",
    frames='[1, [["kept", 0]]]',
)


def graph(number):
    executable = bytes(50) + random.Random(number).randbytes(200)
    return StoredGraph(f"{number:064x}", "ab", "[]", "eager", {"torch": "2.13"}, SPEC, executable)


GRAPHS = [graph(number) for number in range(3)]


@pytest.fixture
def trust(tmp_path):
    return Trust(tmp_path / "trust")


@pytest.fixture
def data(trust):
    return write_graphs(GRAPHS, trust)


def rewrite(data, edit, tensors=None):
    """Return the file with an edited manifest and the old signature, as a stranger could make it."""
    size = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + size])["__metadata__"]
    manifest = json.loads(metadata["compiled_graphs"])
    edit(manifest)
    blobs = {graph.key: zlib.compress(graph.executable) for graph in GRAPHS} | (tensors or {})
    packed = {key: numpy.frombuffer(blob, dtype=numpy.uint8) for key, blob in blobs.items()}
    return save(packed, metadata | {"compiled_graphs": json.dumps(manifest, sort_keys=True)})


def test_graphs_come_back_as_they_were_written(data, trust):
    assert read_graphs(data, trust) == GRAPHS


def test_each_key_is_written_once(data, trust):
    assert len(write_graphs(GRAPHS * 3, trust)) == len(data)


def test_blobs_are_compressed(trust):
    graph = dataclasses.replace(GRAPHS[0], executable=b"kernel source " * 10_000)
    assert len(write_graphs([graph], trust)) < 5_000


def test_manifest_of_a_foreign_file_can_be_read(data):
    entries = read_manifest(data)
    assert [entry.key for entry in entries] == [graph.key for graph in GRAPHS]
    assert {entry.spec for entry in entries} == {SPEC}


def test_foreign_file_is_refused_before_blobs_are_read(data, tmp_path, monkeypatch):
    monkeypatch.setattr(graph_file, "_read_blob", None)
    with pytest.raises(UntrustedFile, match="not made on this machine"):
        read_graphs(data, Trust(tmp_path / "another"))


def test_a_file_its_owner_trusted_is_read(data, tmp_path):
    owner = Trust(tmp_path / "another")
    owner.add(io.BytesIO(data))
    assert read_graphs(data, owner) == GRAPHS
    with pytest.raises(GraphFileError):
        read_graphs(data + b" ", owner)


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m["graphs"].reverse(),
        lambda m: m["graphs"][0].update(key=m["graphs"][1]["key"]),
        lambda m: m["graphs"][0]["spec"].update(guards=[]),
        lambda m: m["graphs"][0]["environment"].update(torch="2.14"),
        lambda m: m.update(format=9),
        lambda m: m["graphs"].clear(),
    ],
)
def test_edited_manifest_is_untrusted(data, trust, edit):
    with pytest.raises(UntrustedFile):
        read_graphs(rewrite(data, edit), trust)


def test_swapped_blob_is_damage(data, trust):
    swapped = {GRAPHS[0].key: zlib.compress(GRAPHS[1].executable)}
    with pytest.raises(GraphFileError, match="damaged"):
        read_graphs(rewrite(data, lambda m: None, swapped), trust)


def test_blob_larger_than_signed_is_not_unpacked(trust, monkeypatch):
    bomb = zlib.compress(bytes(50_000_000))
    monkeypatch.setattr(graph_file.zlib, "compress", lambda executable: bomb)
    data = write_graphs([GRAPHS[0]], trust)
    monkeypatch.undo()
    with pytest.raises(GraphFileError, match="wrong size"):
        read_graphs(data, trust)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "cut off"),
        (b"\xff" * 64, "cut off"),
        ((2**23 + 1).to_bytes(8, "little") + b" " * (2**23 + 1), "more than any"),
        ((60).to_bytes(8, "little") + b"[" * 30 + b"]" * 30, "nested deeper"),
        ((4).to_bytes(8, "little") + b"nope", "not JSON"),
        ((2).to_bytes(8, "little") + b"[]", "not a JSON object"),
        ((2).to_bytes(8, "little") + b"{}", "not a graph file"),
        (save({}, {"other": "x"}), "without graphs"),
        (save({}, {"compiled_graphs": '{"format": 1}'}), f"this version reads {graph_file.FORMAT}"),
        (
            save({}, {"compiled_graphs": json.dumps({"format": graph_file.FORMAT, "graphs": [{}]})}),
            "manifest is damaged",
        ),
        (
            save({}, {"compiled_graphs": f'{{"format": {graph_file.FORMAT}, "graphs": ' + "[" * 40 + "]" * 40 + "}"}),
            "nested",
        ),
    ],
)
def test_invalid_graph_file_is_one_sentence(data, words):
    with pytest.raises(GraphFileError, match=words) as error:
        read_manifest(data)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("size", [-1, 2**40, "12", None])
def test_an_impossible_size_is_refused(data, size):
    with pytest.raises(GraphFileError, match="manifest is damaged"):
        read_manifest(rewrite(data, lambda m: m["graphs"][0].update(size=size)))


def edit_metadata(data, **texts):
    """Return the file with other texts in its header, written with JSON's escapes."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"] |= texts
    return packed(json.dumps(header).encode(), data[8 + size :])


def packed(header, rest=b""):
    return struct.pack("<Q", len(header)) + header + rest


@pytest.mark.parametrize("name", ["signature", "compiled_graphs"])
@pytest.mark.parametrize("read", [read_graphs, lambda data, trust: read_manifest(data), read_contents])
def test_lone_surrogate_in_the_header_is_one_sentence(data, trust, name, read):
    with pytest.raises(GraphFileError, match="not text"):
        read(edit_metadata(data, **{name: "\ud800"}), trust)


WRONG = [None, 5, 1.5, True, "text", "\ud800", [], [None], ["\ud800"], [[]], [-1], {}, {"a": 1}, {"\udfff": "a"}]


def places_in(value, path=()):
    """Yield the path of each value inside of a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places_in(item, (*path, key))


def replaced(value, path, other):
    if not path:
        return other
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], other)
    return copy


def test_manifest_with_a_wrong_type_loads_or_fails(data):
    """A value of another type anywhere gives a list of sound graphs or one sentence."""
    manifest = json.loads(manifest_of(data))
    first = manifest["graphs"][0]
    outcomes = []
    for path in places_in(first):
        for wrong in WRONG:
            text = json.dumps(manifest | {"graphs": [replaced(first, path, wrong)]})
            try:
                (entry,) = read_manifest(edit_metadata(data, compiled_graphs=text))
            except GraphFileError as error:
                outcomes.append("refused" if "\n" not in str(error) else str(error))
                continue
            assert all(isinstance(each.hints, tuple) for each in entry.spec.inputs)
            assert all(type(size) in (int, str) for weight in entry.spec.weights for size in weight.shape)
            json.dumps(dataclasses.asdict(entry), ensure_ascii=False).encode()
            hash(entry.spec)
            outcomes.append("read")
    assert outcomes.count("refused") > 10 * outcomes.count("read") > 0


def manifest_of(data):
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size])["__metadata__"]["compiled_graphs"]


@pytest.mark.parametrize("graphs", [None, 5, "text", {}, [5], [[]], ["text"]])
def test_invalid_graph_list_is_one_sentence(data, graphs):
    with pytest.raises(GraphFileError, match="manifest is damaged"):
        read_manifest(edit_metadata(data, compiled_graphs=json.dumps({"format": graph_file.FORMAT, "graphs": graphs})))


@pytest.mark.parametrize("place", [None, 5, [], {}, {"data_offsets": 5}, {"data_offsets": [0, 10**9]}])
def test_missing_blob_is_damage(data, trust, place):
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size]) | {GRAPHS[0].key: place}
    with pytest.raises(GraphFileError, match="not in it"):
        read_graphs(packed(json.dumps(header).encode(), data[8 + size :]), trust)


def test_message_quotes_a_file_briefly_and_safely(data):
    for text in ("x" * 10**6, "\x1b[2J\n"):
        with pytest.raises(GraphFileError) as error:
            read_manifest(edit_metadata(data, compiled_graphs=json.dumps({"format": text})))
        assert len(str(error.value)) < 400
        assert str(error.value).isprintable()


@pytest.fixture
def giant(tmp_path):
    """Return a function that makes a sparse file of a given size, with nothing after a header."""

    def make(size, header=b""):
        path = tmp_path / "giant"
        with path.open("wb") as file:
            file.write(header)
            file.truncate(size)
        return path.open("rb")

    return make


class Counted(io.BufferedReader):
    """A file that counts the bytes that are read from it."""

    count = 0

    def read(self, size=-1):
        found = super().read(size)
        self.count += len(found)
        return found


def test_oversized_file_is_refused_by_its_header(giant, data, trust):
    with giant(6 * 2**30) as file, pytest.raises(GraphFileError, match="more than any graph file"):
        read_graphs(file, trust)
    with Counted(giant(2**30, data).detach()) as file:
        assert read_graphs(file, trust) == GRAPHS
        assert file.count == len(data)


def test_oversized_blob_is_not_read(giant, data, trust):
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size]) | {GRAPHS[0].key: {"data_offsets": [0, 2**30]}}
    text = json.dumps(header).encode()
    with Counted(giant(2**30 + 8 + len(text), packed(text)).detach()) as file:
        with pytest.raises(GraphFileError, match="wrong size"):
            read_graphs(file, trust)
        assert file.count == 8 + len(text)


def test_foreign_file_is_read_up_to_its_header(giant, data, tmp_path):
    with Counted(giant(2**30, data).detach()) as file:
        contents = read_contents(file, Trust(tmp_path / "another"))
        assert (contents.graphs, len(contents.listed)) == ([], 3)
        assert file.count < 2 * len(data)


def test_file_too_large_to_read_is_not_written(trust, monkeypatch):
    monkeypatch.setattr(graph_file, "MAX_HEADER", 1000)
    with pytest.raises(GraphFileError, match="too many for one file"):
        write_graphs(GRAPHS, trust)


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps permissions elsewhere")
def test_unusable_key_is_the_reason_given(data, trust, tmp_path):
    (trust.folder / "key").chmod(0o644)
    with pytest.raises(UntrustedFile, match="can be read by other users"):
        read_graphs(data, Trust(trust.folder))
    Trust(trust.folder).add(io.BytesIO(data))
    assert read_graphs(data, Trust(trust.folder)) == GRAPHS


def mutate(data, chance):
    kind = chance.randrange(5)
    at = chance.randrange(len(data))
    if kind == 0:
        return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
    if kind == 1:
        return data[:at]
    if kind == 2:
        return data[:at] + chance.randbytes(chance.randrange(1, 64)) + data[at:]
    if kind == 3:
        other = chance.randrange(len(data))
        length = chance.randrange(1, 256)
        return data[:at] + data[other : other + length] + data[at + length :]
    return chance.randbytes(8) + data[8:]


def outcome(data, trust):
    try:
        return read_graphs(data, trust)
    except GraphFileError as error:
        return str(error)


def test_mutated_file_gives_its_graphs_or_one_sentence(data, trust):
    chance = random.Random(5)
    outcomes = [outcome(mutate(data, chance), trust) for _ in range(10_000)]
    refused = [result for result in outcomes if isinstance(result, str)]
    assert all(result == GRAPHS for result in outcomes if not isinstance(result, str))
    assert not any("\n" in sentence for sentence in refused)
    assert len(refused) > 9_000


class Swapped(io.BytesIO):
    """A file that somebody changes after it was hashed: it shows its bytes once, and then others."""

    def __init__(self, shown, later):
        super().__init__(shown)
        self.later, self.reads = later, 0

    def seek(self, place, whence=0):
        if place == 0 and whence == 0:
            self.reads += 1
            if self.reads == 3:  # the header, the digest, and now what runs
                super().seek(0)
                self.truncate()
                self.write(self.later)
        return super().seek(place, whence)


def test_a_file_that_changes_after_the_look_at_its_digest_does_not_run(tmp_path):
    theirs, mine = Trust(tmp_path / "theirs"), Trust(tmp_path / "mine")
    trusted = write_graphs(GRAPHS[:1], theirs)
    mine.add(io.BytesIO(trusted))
    assert read_graphs(io.BytesIO(trusted), mine) == GRAPHS[:1]
    evil = write_graphs([dataclasses.replace(GRAPHS[0], executable=b"evil")], theirs)
    with pytest.raises(UntrustedFile):
        read_graphs(Swapped(trusted, evil), mine)
