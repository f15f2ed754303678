from __future__ import annotations

import os
import subprocess
import sys

import pytest
from compiled_graphs.__main__ import main
from compiled_graphs.compiler.graph_file import UntrustedFile, read_graphs, write_graphs
from compiled_graphs.compiler.trust import Trust


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """A file that another machine signed."""
    monkeypatch.setenv("COMPILED_GRAPHS_TRUST", str(tmp_path / "mine"))
    path = tmp_path / "foreign.graph.safetensors"
    path.write_bytes(write_graphs([], Trust(tmp_path / "theirs")))
    return path


def test_the_owner_can_trust_a_file(foreign, capsys):
    with pytest.raises(UntrustedFile):
        read_graphs(foreign.read_bytes(), Trust())
    assert main(["trust", str(foreign)]) == 0
    assert "is trusted" in capsys.readouterr().out
    assert read_graphs(foreign.read_bytes(), Trust()) == []


@pytest.mark.parametrize("content", [None, b"no graphs"])
def test_what_is_no_graph_file_is_not_trusted(tmp_path, monkeypatch, capsys, content):
    monkeypatch.setenv("COMPILED_GRAPHS_TRUST", str(tmp_path / "mine"))
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    assert main(["trust", str(path)]) == 1
    assert "cannot be trusted" in capsys.readouterr().err
    assert not Trust().trusted_digests()


def test_it_runs_as_a_module(foreign):
    command = [sys.executable, "-m", "compiled_graphs", "trust", str(foreign)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0
