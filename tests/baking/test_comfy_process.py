"""The server that `bake` starts: where it finds the store, and that it ends with whoever started it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from compiled_graphs.baking import command
from compiled_graphs.baking.comfy_process import ComfyError, ComfyProcess

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
BAKER = """
import sys, time
from pathlib import Path
from compiled_graphs.baking.comfy_process import ComfyProcess
with ComfyProcess(Path(sys.argv[1]), ["--cpu"], Path(sys.argv[2]), [], {}) as server:
    print(server.port, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def comfyui(tmp_path):
    """What looks like a ComfyUI from outside."""
    (tmp_path / "comfyui" / "comfy").mkdir(parents=True)
    (tmp_path / "comfyui" / "comfy" / "cli_args.py").write_text("")
    (tmp_path / "comfyui" / "main.py").write_text(SERVER)
    return tmp_path / "comfyui"


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signal")
def test_a_server_ends_with_a_baker_that_is_killed(comfyui, tmp_path):
    (tmp_path / "own").mkdir()
    arguments = [sys.executable, "-c", BAKER, str(comfyui), str(tmp_path / "own")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as baker:
        port = int(baker.stdout.readline())
        assert listens(port)
        baker.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while listens(port) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not listens(port)


def test_a_server_ends_with_its_block(comfyui, tmp_path):
    with ComfyProcess(comfyui, ["--cpu"], tmp_path, [], {}) as server:
        assert server.get("/queue") == {}
    assert not server.is_alive
    assert not listens(server.port)


def test_a_server_that_does_not_start_is_said_line_by_line(comfyui, tmp_path, monkeypatch, capsys):
    (comfyui / "main.py").write_text("raise SystemExit('no such\\nmodule')")
    with pytest.raises(ComfyError), ComfyProcess(comfyui, ["--cpu"], tmp_path, [], {}):
        pass
    (tmp_path / "workflow.json").write_text("{}")
    said = []
    options = command_line(["--comfyui", str(comfyui), str(tmp_path / "workflow.json")])
    assert command.run(options, said.append) == 2
    assert said[-2:] == ["no such", "module"]


def command_line(arguments):
    import argparse

    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    options = parser.parse_args(arguments)
    options.comfyui_options = ["--cpu"]
    return options


@pytest.mark.parametrize("way", ["option", "variable"])
def test_comfyui_is_given_the_store_that_the_person_means(way, comfyui, tmp_path, monkeypatch):
    """ComfyUI runs in its own folder, where a relative path would be another one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COMPILED_GRAPHS_STORE", raising=False)
    given = {"option": ["--store", "graphs"], "variable": []}[way]
    if way == "variable":
        monkeypatch.setenv("COMPILED_GRAPHS_STORE", "graphs")
    seen = []
    monkeypatch.setattr(command, "ComfyProcess", lambda *arguments: seen.append(arguments[-1]) or 1 / 0)
    options = command_line(["--comfyui", str(comfyui), *given, "workflow.json"])
    with pytest.raises(ZeroDivisionError):
        command.run(options, print)
    assert seen == [{"COMPILED_GRAPHS_STORE": str(tmp_path / "graphs")}]
    assert command._absolute("s3://bucket/graphs") == "s3://bucket/graphs"
    assert command._absolute("") == ""
