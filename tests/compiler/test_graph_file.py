from __future__ import annotations

import dataclasses
import json
import random
import zlib

import numpy
import pytest
from compiled_graphs.compiler import graph_file
from compiled_graphs.compiler.graph import GraphSpec, InputSpec, WeightSpec
from compiled_graphs.compiler.graph_file import (
    GraphFileError,
    StoredGraph,
    UntrustedFile,
    read_graphs,
    read_manifest,
    write_graphs,
)
from compiled_graphs.compiler.trust import Trust
from safetensors.numpy import save

SPEC = GraphSpec(
    region="Block",
    device="cpu",
    weights=(WeightSpec("linear.weight", (4, 3), (3, 1), "torch.float32"), WeightSpec("scale", (), (), "torch.half")),
    inputs=(InputSpec(("s0", "s1*2", 16), "torch.float32", "contiguous"),),
    guards=("s0 % 2 == 0",),
    mutated=(0,),
    outputs=(True, False),
    tree="[1, {}]",
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
    """The file with an edited manifest and the old signature, as a stranger could make it."""
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


def test_the_manifest_of_anybodys_file_can_be_read(data):
    entries = read_manifest(data)
    assert [entry.key for entry in entries] == [graph.key for graph in GRAPHS]
    assert {entry.spec for entry in entries} == {SPEC}


def test_a_file_from_another_machine_is_refused_before_its_blobs_are_looked_at(data, tmp_path, monkeypatch):
    monkeypatch.setattr(graph_file, "read_container", None)
    with pytest.raises(UntrustedFile, match="not made on this machine"):
        read_graphs(data, Trust(tmp_path / "another"))


def test_a_file_its_owner_trusted_is_read(data, tmp_path):
    owner = Trust(tmp_path / "another")
    owner.add(data)
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
        lambda m: m.update(format=2),
        lambda m: m["graphs"].clear(),
    ],
)
def test_an_edited_manifest_is_not_this_machines(data, trust, edit):
    with pytest.raises(UntrustedFile):
        read_graphs(rewrite(data, edit), trust)


def test_a_signed_manifest_with_another_files_blob_is_damaged(data, trust):
    swapped = {GRAPHS[0].key: zlib.compress(GRAPHS[1].executable)}
    with pytest.raises(GraphFileError, match="damaged"):
        read_graphs(rewrite(data, lambda m: None, swapped), trust)


def test_a_blob_that_unpacks_to_more_than_it_says_is_stopped(trust, monkeypatch):
    bomb = zlib.compress(bytes(50_000_000))
    monkeypatch.setattr(graph_file.zlib, "compress", lambda executable: bomb)
    data = write_graphs([GRAPHS[0]], trust)
    monkeypatch.undo()
    with pytest.raises(GraphFileError, match="another size"):
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
        (save({}, {"compiled_graphs": '{"format": 2}'}), "this version reads 1"),
        (save({}, {"compiled_graphs": '{"format": 1, "graphs": [{}]}'}), "manifest is damaged"),
        (save({}, {"compiled_graphs": '{"format": 1, "graphs": ' + "[" * 40 + "]" * 40 + "}"}), "nested"),
    ],
)
def test_what_is_no_graph_file_is_said_in_one_sentence(data, words):
    with pytest.raises(GraphFileError, match=words) as error:
        read_manifest(data)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("size", [-1, 2**40, "12", None])
def test_an_impossible_size_is_refused(data, size):
    with pytest.raises(GraphFileError, match="manifest is damaged"):
        read_manifest(rewrite(data, lambda m: m["graphs"][0].update(size=size)))


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


def test_no_mutation_of_a_file_yields_anything_but_the_graphs_or_one_sentence(data, trust):
    chance = random.Random(5)
    outcomes = [outcome(mutate(data, chance), trust) for _ in range(10_000)]
    refused = [result for result in outcomes if isinstance(result, str)]
    assert all(result == GRAPHS for result in outcomes if not isinstance(result, str))
    assert not any("\n" in sentence for sentence in refused)
    assert len(refused) > 9_500
