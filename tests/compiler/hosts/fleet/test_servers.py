"""Workflows over real ComfyUI servers: what one refuses or loses another does, and it is said."""

from __future__ import annotations

import io
import json
import runpy
import socket
import subprocess
import sys
import textwrap
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from compiled_graphs.compiler.hosts.fleet import watched
from compiled_graphs.compiler.hosts.fleet.ray_workers import ServerActor
from compiled_graphs.compiler.hosts.fleet.servers import Server, Started
from compiled_graphs.fleet import Launch, Lost, map_workflows
from PIL import Image

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def told():
    return []


def closed_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def saved(workflow, **sampler):
    """The workflow with Save Image at its end."""
    prompt = workflow(64, 64, **{"steps": 1, **sampler})
    for node in prompt.values():
        if node["class_type"] == "PreviewImage":
            node["class_type"], node["inputs"]["filename_prefix"] = "SaveImage", "fleet"
    return prompt


def test_what_a_server_refuses_or_loses_another_does(start_server, make_home, workflow, told):
    wrong = saved(workflow)
    wrong["6"]["inputs"]["sampler_name"] = "no such sampler"
    items = [*(saved(workflow, seed=seed) for seed in range(6)), wrong]
    away = closed_port()
    with start_server() as whole, start_server(make_home()) as without_models:

        def tell(progress):
            told.append(progress)
            if f"{without_models.address} refuses" in str(progress):
                without_models.stop()  # and loses what it takes next

        outcomes = list(map_workflows(items, [whole.address, without_models.address, away], on_progress=tell))
    *done, failed = outcomes
    for outcome in done:
        assert not outcome.error
        assert outcome.worker == whole.address
        (image,) = outcome.result.images
        assert Image.open(io.BytesIO(image.data)).size == (64, 64)
    assert "no such sampler" in failed.error
    said = "\n".join(str(progress) for progress in told)
    assert f"{away} is not used: it does not answer" in said
    assert f"{without_models.address} refuses item" in said
    assert "tiny_sd15.ckpt" in said
    assert f"{without_models.address} is lost: it does not answer" in said


def test_the_pages_program_runs(start_server, workflow, tmp_path, monkeypatch):
    (tmp_path / "workflow_api.json").write_text(json.dumps(saved(workflow)))
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "fleet.md").read_text(encoding="utf-8")
    lines = page.partition("<!-- tested: workflows -->\n")[2].partition("\n\n`map_workflows")[0]
    with start_server() as server:
        program = textwrap.dedent(lines)
        assert program.count('"http://10.0.0.5:8188", "http://10.0.0.6:8188"') == 1
        program = program.replace('"http://10.0.0.5:8188", "http://10.0.0.6:8188"', f'"{server.address}"')
        (tmp_path / "page.py").write_text(program)
        runpy.run_path(str(tmp_path / "page.py"))
    assert sorted(path.name[0] for path in tmp_path.glob("*.png")) == ["0", "1", "2", "3"]


def test_servers_that_cannot_be_used_are_named():
    with pytest.raises(Lost, match="it does not answer"):
        map_workflows([{}], [closed_port()])
    with pytest.raises(ValueError, match="pass addresses"):
        map_workflows([{}])


def test_a_server_that_is_started_does_workflows_and_ends(start_server, workflow):
    like = start_server()  # for its command: this one is started by what is tested
    actor = ServerActor(launch_of(like), limit=600.0)
    actor.open()
    try:
        assert actor.run(saved(workflow)).images
    finally:
        actor.close()
    assert actor._started.process.poll() is not None
    with pytest.raises(Lost):
        Server(actor._started.server.name, patience=0.0).check()


def test_a_program_that_is_no_server_is_said_to_have_ended():
    with pytest.raises(Lost, match=r"(?s)ComfyUI did not start.*no such file of models"):
        Started(Launch([sys.executable, "-c", "raise SystemExit('no such file of models')"]))


def test_what_is_started_ends_with_the_process_that_started_it():
    child = "import time; print('up', flush=True); time.sleep(600)"
    process = subprocess.Popen(
        [sys.executable, watched.__file__, sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline().strip() == b"up"
    process.stdin.close()  # as the operating system does when that process dies
    process.wait(60)
    assert process.stdout.read() == b""  # nobody holds it open any more


def launch_of(server):
    """How `scripts/comfy_server.py` starts a server, but for where it listens."""
    command = server._command()
    for name in ("--listen", "--port"):
        place = command.index(name)
        del command[place : place + 2]
    folders = {
        "COMPILED_GRAPHS_STORE": str(server.home / "graphs"),
        "COMPILED_GRAPHS_TRUST": str(server.home / "trust"),
    }
    environment = {"OTEL_SDK_DISABLED": "true", "HF_HUB_OFFLINE": "1", **folders}
    return Launch(command, server._comfyui or str(server.home), environment)


class Answering(BaseHTTPRequestHandler):
    """A server whose answers a test sets: a path's beginning, and what is written to the socket or returned as JSON."""

    def do_GET(self):
        self.answer()

    def do_POST(self):
        self.body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posted.append((self.path, json.loads(self.body or b"null")))
        self.answer()

    def answer(self):
        content = next(content for path, content in self.server.answers.items() if self.path.startswith(path))
        if isinstance(content, int):
            self.send_error(content)
        elif isinstance(content, bytes):
            self.wfile.write(content)
        else:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

    def log_message(self, *args): ...


@pytest.fixture
def answering():
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as http_server:
        http_server.posted, http_server.answers = [], {"/compiled_graphs/registry": {}}
        http_server.address = f"http://127.0.0.1:{http_server.server_port}"
        threading.Thread(target=http_server.serve_forever, daemon=True).start()
        yield http_server
        http_server.shutdown()


@pytest.mark.parametrize("runs", [True, False])
def test_a_workflow_that_takes_too_long_is_cancelled_and_no_other(answering, runs):
    ours, theirs = [0, "ours", {}, {}, []], [1, "theirs", {}, {}, []]
    queue = {"queue_running": [ours if runs else theirs], "queue_pending": [theirs if runs else ours]}
    answering.answers |= {"/prompt": {"prompt_id": "ours"}, "/history": {}, "/queue": queue, "/interrupt": {}}
    with pytest.raises(Lost, match=r"more than 0\.2 s"):
        Server(answering.address, limit=0.2).run({})
    posted = answering.posted[1:]
    assert posted == [("/queue", {"delete": ["ours"]}), *([("/interrupt", {"prompt_id": "ours"})] if runs else ())]


def test_a_server_that_ends_within_an_answer_is_lost(answering):
    image = {"filename": "a.png", "type": "output"}
    history = {"p": {"outputs": {"9": {"images": [image]}}}}
    half = b"HTTP/1.0 200 OK\r\nContent-Length: 100\r\n\r\nhalf"
    answering.answers |= {"/prompt": {"prompt_id": "p"}, "/history": history, "/view": half}
    with pytest.raises(Lost, match="it does not answer"):
        Server(answering.address).run({})


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(404, "does not have the extension"), (502, "HTTP error 502, Bad Gateway"), (b"SSH-2.0\r\n", "not answer")],
)
def test_what_is_at_an_address_is_said(answering, answer, reason):
    answering.answers["/compiled_graphs/registry"] = answer
    with pytest.raises(Lost, match=reason):
        map_workflows([{}], [answering.address])


def test_what_ends_by_itself_is_passed_on():
    command = [sys.executable, watched.__file__, sys.executable, "-c", "raise SystemExit(7)"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.wait(60) == 7  # while its standard input is open
        assert process.stderr.read() == b""
