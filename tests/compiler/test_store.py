from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys

import pytest
import torch
from compiled_graphs.compiler.files import write_whole
from compiled_graphs.compiler.graph import GraphSpec, InputSpec, WeightSpec
from compiled_graphs.compiler.graph_file import StoredGraph, read_graphs, write_graphs
from compiled_graphs.compiler.registry import Registry
from compiled_graphs.compiler.store import FolderStore
from compiled_graphs.compiler.trust import Trust
from networks import ConvolutionNetwork, StreamNetwork, call, compile_network, said, sizes, transformer
from safetensors.torch import save

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
GRAPH = StoredGraph("0123abcd", "ab", "[]", "eager", {"torch": "2.13"}, SPEC, bytes(range(256)) * 3)


@pytest.fixture
def store(tmp_path):
    return FolderStore(tmp_path / "graphs")


def files(store):
    return sorted(path.name for path in store.folder.iterdir())


def only_file(store):
    (path,) = store.folder.iterdir()
    return path


def fail_with(error):
    def fail(*args, **kwargs):
        raise error

    return fail


def test_a_graph_comes_back_as_it_was_put(store):
    assert store.put(GRAPH) is True
    assert store.get(GRAPH.key) == GRAPH


def test_a_graph_that_was_never_put_is_absent_without_a_word(store, caplog):
    assert store.get("absent") is None
    assert said(caplog) == []


def test_graphs_do_not_get_in_each_others_way(store):
    other = dataclasses.replace(GRAPH, key="other", executable=b"other")
    store.put(GRAPH)
    store.put(other)
    assert (store.get(GRAPH.key), store.get("other")) == (GRAPH, other)


def test_a_graph_put_again_replaces_the_old_one(store):
    store.put(GRAPH)
    newer = dataclasses.replace(GRAPH, executable=b"newer")
    store.put(newer)
    assert store.get(GRAPH.key) == newer
    assert len(files(store)) == 1


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_counts_as_absent_and_is_said_to_be_unreadable(store, caplog, part):
    store.put(GRAPH)
    path = only_file(store)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])
    assert store.get(GRAPH.key) is None
    assert len(said(caplog)) == 1


@pytest.mark.parametrize("data", [b"not a graph at all", b"\x00" * 4096, save({"weight": torch.zeros(3)})], ids=len)
def test_a_file_that_is_no_graph_counts_as_absent(store, caplog, data):
    store.put(GRAPH)
    only_file(store).write_bytes(data)
    assert store.get(GRAPH.key) is None
    assert len(said(caplog)) == 1


def test_a_graph_that_another_machine_signed_counts_as_absent(store, tmp_path, caplog):
    FolderStore(store.folder, Trust(tmp_path / "elsewhere")).put(GRAPH)
    assert store.get(GRAPH.key) is None
    assert "not made on this machine" in said(caplog)[0]


def test_a_folder_in_the_place_of_a_file_counts_as_absent(store):
    store.put(GRAPH)
    path = only_file(store)
    path.unlink()
    path.mkdir()
    assert store.get(GRAPH.key) is None


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_is_said_once_and_leaves_no_partial_file(store, monkeypatch, caplog, step):
    monkeypatch.setattr(os, step, fail_with(OSError(errno.ENOSPC, "No space left on device")))
    assert store.put(GRAPH) is False
    assert files(store) == []
    (message,) = said(caplog)
    assert "No space left on device" in message
    assert "COMPILED_GRAPHS_STORE" in message


def test_a_folder_that_cannot_be_made_is_said_once(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    assert FolderStore(tmp_path / "file" / "graphs").put(GRAPH) is False
    assert len(said(caplog)) == 1


def test_an_interrupted_write_leaves_the_old_graph(store, monkeypatch):
    store.put(GRAPH)
    monkeypatch.setattr(os, "replace", fail_with(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        store.put(dataclasses.replace(GRAPH, executable=b"newer"))
    assert store.get(GRAPH.key) == GRAPH
    assert len(files(store)) == 1


KILLED = """
import os, sys
os.fsync = lambda handle: os._exit(9)
from compiled_graphs.compiler.files import write_whole
from pathlib import Path
write_whole(Path(sys.argv[1]), b"newer" * 100)
"""


def test_a_process_killed_while_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "graph"
    write_whole(path, b"old")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", KILLED, str(path)], env=environment, check=False).returncode == 9
    assert path.read_bytes() == b"old"


def test_a_restart_with_the_same_store_compiles_nothing(store):
    for network, reference in ((ConvolutionNetwork(), None), (StreamNetwork(), None)):
        inputs = network.inputs(sizes())
        reference = network(*[t.clone() for t in inputs])
        first = compile_network(network, Registry(store))
        assert (first.counters.compiles, first.counters.from_disk) == (1, 0)
        again = compile_network(network, Registry(store))
        assert (again.counters.compiles, again.counters.from_disk) == (0, 1)
        torch.testing.assert_close(network(*inputs), reference)
        assert not again.counters.eager_calls


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: b"garbage"], ids=["cut", "garbage"]
)
def test_a_damaged_file_is_compiled_again_and_mended(store, damage):
    network = transformer()
    compile_network(network, Registry(store))
    path = only_file(store)
    path.write_bytes(damage(path.read_bytes()))
    again = compile_network(network, Registry(store))
    assert (again.counters.compiles, again.counters.from_disk) == (1, 0)
    assert compile_network(network, Registry(store)).counters.from_disk == 1


def test_an_executable_that_cannot_be_loaded_is_compiled_again(store):
    network = transformer()
    compile_network(network, Registry(store))
    stored = read_graphs(only_file(store).read_bytes(), Trust())[0]
    store.put(dataclasses.replace(stored, executable=b"no program"))
    again = compile_network(network, Registry(store))
    assert (again.counters.compiles, again.counters.from_disk) == (1, 0)


@pytest.mark.parametrize("change", [{"key": "another"}, {"backend": "inductor"}])
def test_a_file_that_holds_another_graph_than_its_name_says_is_not_used(store, change):
    network = transformer()
    compile_network(network, Registry(store))
    path = only_file(store)
    (graph,) = read_graphs(path.read_bytes(), Trust())
    path.write_bytes(write_graphs([dataclasses.replace(graph, **change)], Trust()))
    assert compile_network(network, Registry(store)).counters.compiles == 1


def test_with_a_full_disk_the_graph_still_serves_this_session(store, monkeypatch, caplog):
    network = transformer()
    x = network.inputs(sizes())
    expected = network(*x)
    monkeypatch.setattr(os, "fsync", fail_with(OSError(errno.ENOSPC, "No space left on device")))
    compiled = compile_network(network, Registry(store))
    torch.testing.assert_close(network(*x), expected)
    assert compiled.summary().compiled == 1
    assert not compiled.counters.eager_calls
    assert len(said(caplog)) == 1
    assert files(store) == []


def test_without_a_store_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compile_network(transformer(), Registry(), probe=call)
    assert not list(tmp_path.iterdir())
