"""When Save Graph writes a new file."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import folder_paths
import pytest
from compiled_graphs.compiler.hosts.comfy import graph_folder
from compiled_graphs.compiler.identity.graph_spec import CompiledGraph, GraphSpec
from compiled_graphs.compiler.storage.graph_file import GraphFileError, read_graphs
from compiled_graphs.compiler.storage.trust import Trust

SPEC = GraphSpec(
    region="Block", device="cpu", weights=(), inputs=(), guards=(), mutated=(), outputs=(True,), tree="[1, {}]"
)


def test_a_graph_that_has_learned_something_is_saved_again_once(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_paths, "get_folder_paths", lambda name: [str(tmp_path)])
    code = [b"code"]
    executable = SimpleNamespace(to_bytes=lambda: code[0], has_grown=lambda data: data != code[0])
    graph = CompiledGraph("ab" * 32, "ab", "[]", "inductor", {}, SPEC, executable)
    counts = []
    for learned in (b"code", b"code", b"code and choices", b"code and choices"):
        code[0] = learned
        graph_folder.write([graph], "graphs")
        counts.append(len(list(tmp_path.glob("*.safetensors"))))
    assert counts == [1, 1, 2, 2]


def graph(number):
    executable = SimpleNamespace(to_bytes=lambda: b"code", has_grown=lambda data: False)
    return CompiledGraph(f"{number:064x}", "ab", "[]", "inductor", {}, SPEC, executable)


@pytest.mark.parametrize(
    ("prefix", "names"),
    [
        ("", ["graphs_00001_", "graphs_00002_"]),
        (".", ["graphs_00001_", "graphs_00002_"]),
        ("sub/..", ["graphs_00001_", "graphs_00002_"]),
        ("sub/.", ["sub/graphs_00001_", "sub/graphs_00002_"]),
        ("sub/", ["sub/graphs_00001_", "sub/graphs_00002_"]),
        ("sub\\sdxl", ["sub/sdxl_00001_", "sub/sdxl_00002_"]),
        ("./sub//../flux", ["flux_00001_", "flux_00002_"]),
    ],
)
def test_no_prefix_writes_over_a_file(tmp_path, monkeypatch, prefix, names):
    monkeypatch.setattr(folder_paths, "get_folder_paths", lambda name: [str(tmp_path)])
    for number in range(2):
        graph_folder.write([graph(number)], prefix)
    found = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.safetensors"))
    assert found == [f"{name}.graph.safetensors" for name in names]


@pytest.mark.parametrize("prefix", ["../elsewhere", "sub/../../x", "/elsewhere/x", ".."])
def test_a_prefix_that_leads_out_is_refused(tmp_path, monkeypatch, prefix):
    monkeypatch.setattr(folder_paths, "get_folder_paths", lambda name: [str(tmp_path / "graphs")])
    with pytest.raises(GraphFileError, match="outside of the folder of graphs"):
        graph_folder.write([graph(0)], prefix)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_two_servers_that_share_the_folder_each_get_a_number(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_paths, "get_folder_paths", lambda name: [str(tmp_path)])
    write_graphs, other = graph_folder.write_graphs, tmp_path / "sdxl_00001_.graph.safetensors"

    def while_another_writes(*args):
        other.write_bytes(b"another server's")
        return write_graphs(*args)

    monkeypatch.setattr(graph_folder, "write_graphs", while_another_writes)
    assert "sdxl_00002_" in graph_folder.write([graph(0)], "sdxl")
    assert other.read_bytes() == b"another server's"


def test_between_the_choice_of_a_number_and_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_paths, "get_folder_paths", lambda name: [str(tmp_path)])
    create, other = graph_folder.create_whole, tmp_path / "sdxl_00001_.graph.safetensors"

    def late(path, data):
        if not other.exists():
            other.write_bytes(b"another server's")
        create(path, data)

    monkeypatch.setattr(graph_folder, "create_whole", late)
    assert graph_folder.write([graph(0)], "sdxl").startswith("1 graph saved to sdxl_00002_")
    assert other.read_bytes() == b"another server's"


def test_graphs_that_somebody_else_signed_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_paths, "get_folder_paths", lambda name: [str(tmp_path)])
    foreign = replace(graph(1), is_foreign=True)
    text = graph_folder.write([graph(0), foreign], "sdxl")
    assert re.fullmatch(
        r"1 graph saved to sdxl_00001_\S+, \d\.\d MB\. 1 graph that somebody else signed is left out", text
    )
    (path,) = tmp_path.iterdir()
    with path.open("rb") as file:
        assert [stored.key for stored in read_graphs(file, Trust())] == [graph(0).key]
    with pytest.raises(GraphFileError, match="1 graph that somebody else signed is left out"):
        graph_folder.write([foreign], "sdxl")


def test_a_graph_whose_bytes_cannot_be_had_is_one_sentence(tmp_path, monkeypatch):
    def fail():
        raise RuntimeError("the artifact is gone\nand so on")

    monkeypatch.setattr(folder_paths, "get_folder_paths", lambda name: [str(tmp_path)])
    executable = SimpleNamespace(to_bytes=fail, has_grown=lambda data: False)
    broken = CompiledGraph("ab" * 32, "ab", "[]", "inductor", {}, SPEC, executable)
    with pytest.raises(GraphFileError, match="graphs could not be written: RuntimeError: the artifact is gone"):
        graph_folder.write([broken], "graphs")
