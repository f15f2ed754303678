"""When Save Graph writes a new file."""

from __future__ import annotations

from types import SimpleNamespace

import folder_paths
from compiled_graphs.compiler.hosts.comfy import graph_folder
from compiled_graphs.compiler.identity.graph_spec import CompiledGraph, GraphSpec

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
