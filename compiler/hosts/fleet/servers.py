"""ComfyUI servers that do workflows in API format: given by address, or started on this machine."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import watched
from .spread import Lost, Refused

ANSWER_LIMIT = 60.0
"""Seconds that a server may take to answer a request."""
START_LIMIT = 300.0
"""Seconds that a server may take to start."""
RETURN_LIMIT = 120.0
"""Seconds that a server by address may be away before it is given up."""
POLL = 0.1
_NO_ANSWER = (OSError, ValueError, http.client.HTTPException)
"""What Python raises for a server that is not there, answers nonsense, or ends within an answer."""
MOST_SAID = 500
"""Characters of a server's own reason that are passed on."""


@dataclass(frozen=True)
class Image:
    """A file that a workflow saved."""

    node: str
    name: str
    data: bytes


@dataclass(frozen=True)
class WorkflowResult:
    """What a workflow gave."""

    outputs: Mapping[str, Any]
    """By node, as ComfyUI's history has them."""
    images: tuple[Image, ...]
    """The saved ones among them; previews stay on the server."""


class Server:
    """A ComfyUI server at an address. Satisfies `spread.Worker`."""

    def __init__(self, address: str, limit: float | None = None, patience: float = RETURN_LIMIT) -> None:
        """`limit` is how many seconds a workflow may take, and `patience` how many the server may be away."""
        self.name = address.rstrip("/")
        self._limit = limit
        self._patience = patience

    def check(self) -> None:
        """Raises Lost if nobody answers, or if the server does not have this extension."""
        try:
            self._get("/compiled_graphs/registry")
        except urllib.error.HTTPError as error:
            if error.code != http.HTTPStatus.NOT_FOUND:
                raise Lost(f"it answers with HTTP error {error.code}, {error.reason}") from None
            raise Lost("it does not have the extension Compiled Graphs: install it there") from None
        except _NO_ANSWER as error:
            raise Lost(f"it does not answer ({_reason(error)})") from None

    def run(self, item: Mapping[str, Any]) -> WorkflowResult:
        """Run a workflow in API format. Raises Lost or Refused."""
        try:
            entry = self._wait(self._queue(item))
            outputs = entry["outputs"]
            return WorkflowResult(outputs, tuple(self._images(outputs)))
        except urllib.error.HTTPError as error:
            raise Refused(_said(error)) from None
        except (*_NO_ANSWER, KeyError) as error:
            raise Lost(f"it does not answer ({_reason(error)})") from None

    def replaced(self) -> Server | None:
        """Return this server again if it comes back in time. Raises Lost if it does not."""
        deadline = time.monotonic() + self._patience
        while True:
            try:
                self.check()
                return self
            except Lost:
                if time.monotonic() > deadline:
                    raise
                time.sleep(min(1.0, self._patience))

    def close(self) -> None:
        """Nothing is held."""

    def _queue(self, workflow: Mapping[str, Any]) -> str:
        with self._post("/prompt", {"prompt": workflow, "client_id": f"compiled-graphs-{uuid.uuid4()}"}) as answer:
            return json.load(answer)["prompt_id"]

    def _wait(self, prompt: str) -> dict[str, Any]:
        """Return a prompt's entry in the history. Raises Refused if a node raised, and Lost if it is nowhere."""
        start = time.monotonic()
        while self._limit is None or time.monotonic() - start < self._limit:
            entry = self._get(f"/history/{prompt}").get(prompt)
            if entry is not None:
                if (status := entry.get("status") or {}).get("status_str") == "error":
                    raise Refused(_node_error(status.get("messages", ())))
                return entry
            is_queued = self._is_in(prompt, "queue_running", "queue_pending")
            if not is_queued and prompt not in self._get(f"/history/{prompt}"):
                raise Lost("it no longer knows the workflow that it was given")
            time.sleep(POLL)
        self._cancel(prompt)
        raise Lost(f"a workflow took more than {self._limit:g} s")

    def _is_in(self, prompt: str, *parts: str) -> bool:
        queue = self._get("/queue")
        return any(entry[1] == prompt for part in parts for entry in queue[part])

    def _cancel(self, prompt: str) -> None:
        """Take a prompt out of the queue, or stop it if it runs. The prompts of others go on."""
        with contextlib.suppress(*_NO_ANSWER, KeyError):
            self._post("/queue", {"delete": [prompt]}).close()
            if self._is_in(prompt, "queue_running"):  # an older ComfyUI stops whatever runs
                self._post("/interrupt", {"prompt_id": prompt}).close()

    def _images(self, outputs: Mapping[str, Any]) -> list[Image]:
        return [
            Image(node, reference["filename"], self._file(reference))
            for node, output in outputs.items()
            for reference in output.get("images", ())
            if reference.get("type") == "output"
        ]

    def _file(self, reference: Mapping[str, str]) -> bytes:
        query = urllib.parse.urlencode({key: reference.get(key, "") for key in ("filename", "subfolder", "type")})
        with urllib.request.urlopen(f"{self.name}/view?{query}", timeout=ANSWER_LIMIT) as answer:
            return answer.read()

    def _post(self, path: str, content: Mapping[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.name + path, json.dumps(content).encode(), headers, method="POST")
        return urllib.request.urlopen(request, timeout=ANSWER_LIMIT)

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(self.name + path, timeout=ANSWER_LIMIT) as answer:
            return json.load(answer)


@dataclass(frozen=True)
class Launch:
    """How a headless ComfyUI is started. The machine that starts it must have it, with this extension."""

    command: Sequence[str]
    """What starts ComfyUI, such as ("python", "main.py"); `--listen` and `--port` are added."""
    folder: str = ""
    """Where the command runs, such as ComfyUI's own folder."""
    environment: Mapping[str, str] = field(default_factory=dict)


class Started:
    """A ComfyUI server that this process has started, on loopback."""

    def __init__(self, launch: Launch, limit: float | None = None) -> None:
        """Start it and wait until it answers. Raises Lost if it does not."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [*launch.command, "--listen", "127.0.0.1", "--port", str(port)]
        handle, name = tempfile.mkstemp(prefix="compiled_graphs-server-", suffix=".log")
        self._log = Path(name)
        self._said: str | None = None
        with os.fdopen(handle, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, watched.__file__, *command],
                stdin=subprocess.PIPE,
                cwd=launch.folder or None,
                env={**os.environ, **launch.environment},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.server = Server(f"http://127.0.0.1:{port}", limit)
        self._wait(time.monotonic() + START_LIMIT)

    def run(self, workflow: Mapping[str, Any]) -> WorkflowResult:
        """Run a workflow in API format. Raises Lost or Refused."""
        try:
            return self.server.run(workflow)
        except Lost as error:
            ended = "" if self.process.poll() is None else f"; it ended: {self._end_of_log()}"
            raise Lost(f"{error}{ended}") from None

    def close(self) -> None:
        """End the server."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.wait()
        self._said = self._end_of_log()
        self._log.unlink(missing_ok=True)

    def _wait(self, deadline: float) -> None:
        reason = Lost("it does not answer")
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                self.server.check()
                return
            except Lost as error:
                reason = error
                if "extension" in str(error):
                    break
                time.sleep(0.25)
        self.close()
        raise Lost(f"ComfyUI did not start: {reason}; the end of its log: {self._end_of_log()}")

    def _end_of_log(self) -> str:
        return self._log.read_text("utf-8", "replace")[-MOST_SAID:] if self._said is None else self._said


def _said(error: urllib.error.HTTPError) -> str:
    """Return ComfyUI's reason for not taking a workflow."""
    text = error.read().decode("utf-8", "replace")
    with contextlib.suppress(ValueError, AttributeError):
        answer = json.loads(text)
        reasons = [answer.get("error", {}).get("message", "")]
        for node in (answer.get("node_errors") or {}).values():
            reasons += [f"{each.get('message')}: {each.get('details')}" for each in node.get("errors", ())]
        text = "; ".join(filter(None, reasons)) or text
    return text[:MOST_SAID]


def _node_error(messages: Sequence[Any]) -> str:
    """Return what a node raised, or that somebody stopped it."""
    for kind, content in messages:
        if kind == "execution_error":
            node = f"{content.get('node_type')} (node {content.get('node_id')})"
            return f"{node} raised {content.get('exception_type')}: {content.get('exception_message')}"[:MOST_SAID]
    return "the workflow was interrupted"


def _reason(error: BaseException) -> Any:
    return getattr(error, "reason", None) or error


def servers_at(addresses: Sequence[str], limit: float | None, tell: Callable[[str], None]) -> list[Server]:
    """Return the servers that can be used, and tell of each that cannot. Raises Lost if none can."""
    found, reasons = [], []
    for server in (Server(address, limit) for address in dict.fromkeys(addresses)):
        try:
            server.check()
            found.append(server)
        except Lost as error:
            reasons.append(f"{server.name} is not used: {error}.")
            tell(reasons[-1])
    if addresses and not found:
        raise Lost(" ".join(reasons))
    return found
