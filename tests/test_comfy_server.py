"""How a test, or a benchmark, knows that the server which answers is the one that it started."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import comfy_server
from comfy_server import ComfyServer

# It binds its port and says so as ComfyUI does, without the seconds that ComfyUI's imports take.
SERVER = """
import http.server, sys

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer.allow_reuse_address = False
server = http.server.HTTPServer(("127.0.0.1", port), Answer)
print("To see the GUI go to: http://127.0.0.1:%d" % port, flush=True)
server.serve_forever()
"""


@pytest.fixture
def comfyui(tmp_path):
    """A checkout whose server starts at once."""
    folder = tmp_path / "comfyui"
    (folder / "comfy").mkdir(parents=True)
    (folder / "comfy" / "cli_args.py").write_text("")
    (folder / "main.py").write_text(SERVER)
    return folder


@pytest.fixture
def server(comfyui, tmp_path):
    return ComfyServer(str(comfyui), tmp_path / "home")


@pytest.fixture
def other(server):
    """Another program, which has taken the server's port in the meantime."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", server._port))
        other.listen()
        yield other


def test_a_port_that_another_program_took_is_left_to_it(server, other):
    taken, log = server.address, server.log
    with server:
        assert server.address != taken
        assert server.get("/queue") == {}
    assert "in use" in log.read_text() or "10048" in log.read_text()
    other.setblocking(False)
    with pytest.raises(BlockingIOError):  # nobody has asked it anything
        other.accept()


def test_a_server_that_ends_is_started_once_and_its_log_is_shown(server, comfyui, monkeypatch):
    (comfyui / "main.py").write_text("raise SystemExit('out of luck')")
    monkeypatch.setattr(server, "_take_a_port", lambda: pytest.fail("its port was free"))
    with pytest.raises(RuntimeError, match=r"ComfyUI did not start; the end of .+:\nout of luck"):
        server.start()


def test_a_server_that_never_listens_is_ended(server, comfyui, monkeypatch):
    (comfyui / "main.py").write_text("import time\ntime.sleep(600)")
    monkeypatch.setattr(comfy_server, "BOOT_LIMIT", 0.5)
    with pytest.raises(RuntimeError, match="ComfyUI did not start"):
        server.start()
    assert server._process.poll() is not None


def test_a_failed_prompt_says_what_was_raised_and_not_what_its_inputs_were():
    told = {"node_type": "KSampler", "exception_type": "ValueError", "exception_message": "no such size"}
    rest = {"traceback": ["line 1\n", "line 2\n"], "current_inputs": {"latent": ["0." * 5000]}}
    messages = [["execution_start", {}], ["execution_error", told | rest]]
    assert comfy_server.reason_of(messages) == "line 1\nline 2\nKSampler: ValueError: no such size"
    assert "interrupted" in comfy_server.reason_of([["execution_interrupted", {}]])
