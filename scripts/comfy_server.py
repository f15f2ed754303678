"""Start a real ComfyUI server on loopback with this extension in it, and queue prompts over HTTP."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

EXTENSION = Path(__file__).resolve().parent.parent
BOOT_LIMIT = 180.0
END_LIMIT = 60.0
PROMPT_LIMIT = 900.0
LISTENS = "To see the GUI go to"
"""What each version of ComfyUI logs once its own socket listens."""
PORT_IS_TAKEN = ("already in use", "only one usage of each socket address")
PORTS_TRIED = 5


def install(place: Path) -> None:
    """Put this extension where ComfyUI looks for it: a link, or a copy where links are not allowed.

    A link that is there already stays: another server of this folder may be starting.
    """
    if place.is_symlink():
        if place.resolve() == EXTENSION:
            return
        place.unlink()
    elif place.exists():
        shutil.rmtree(place)
    try:
        place.symlink_to(EXTENSION, target_is_directory=True)
    except OSError:
        shutil.copytree(EXTENSION, place, ignore=shutil.ignore_patterns(".*"))


class PromptFailed(Exception):
    """ComfyUI refused a prompt or a node of it raised."""


def reason_of(messages: list[tuple[str, dict[str, Any]]]) -> str:
    """Return why a prompt failed, with the place first, of the messages that its history has."""
    for name, told in messages:
        if name == "execution_error":
            where = "".join(told.get("traceback") or ())
            return f"{where}{told.get('node_type')}: {told.get('exception_type')}: {told.get('exception_message')}"
    return json.dumps(messages)  # someone interrupted it


class ComfyServer:
    """A ComfyUI process with a base folder of its own: models, outputs, user data and this extension."""

    def __init__(
        self, comfyui: str, home: Path, arguments: tuple[str, ...] = (), variables: Mapping[str, str] | None = None
    ) -> None:
        """`variables` are of its environment, in place of those that it has here otherwise."""
        self.home = home
        self._comfyui = comfyui
        self._arguments = arguments
        self._variables = dict(variables or {})
        self._process: subprocess.Popen | None = None
        self._take_a_port()
        for folder in ("models/checkpoints", "models/loras", "custom_nodes", "input", "output", "temp", "user"):
            (home / folder).mkdir(parents=True, exist_ok=True)
        if EXTENSION.parent.name != "custom_nodes":
            install(home / "custom_nodes" / "compiled-graphs")

    def start(self) -> ComfyServer:
        """Start the server and wait until it answers. Raises RuntimeError with the end of its log if it does not."""
        for _ in range(PORTS_TRIED):
            if self._listens_after_start():
                self.get("/queue")
                return self
            self.stop()
            if not any(said in self._logged().lower() for said in PORT_IS_TAKEN):
                break
            self._take_a_port()
        raise RuntimeError(f"ComfyUI did not start; {self.end_of_log()}")

    def _take_a_port(self) -> None:
        """Choose a port that is free now. Another program can have it before the server does."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.address = f"http://127.0.0.1:{self._port}"
        self.log = self.home / f"server-{self._port}.log"

    def _listens_after_start(self) -> bool:
        """Start the process, and return whether it listens at its port within the limit.

        Its own log says so. An answer would not: it may be another server's, and a connection to a port of nobody may
        be one to itself.
        """
        environment = os.environ | {
            "OTEL_SDK_DISABLED": "true",
            "HF_HUB_OFFLINE": "1",
            "COMPILED_GRAPHS_STORE": str(self.home / "graphs"),
            "COMPILED_GRAPHS_TRUST": str(self.home / "trust"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.home / "inductor"),
            "PYTHONUNBUFFERED": "1",
            **self._variables,
        }
        with self.log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                self._command(), cwd=self._comfyui or self.home, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + BOOT_LIMIT
        while time.monotonic() < deadline and self._process.poll() is None:
            if LISTENS in self._logged():
                return True
            time.sleep(0.1)
        return False

    def stop(self) -> None:
        """End the server."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(END_LIMIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> ComfyServer:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def get(self, path: str) -> Any:
        """Return the JSON answer of a GET request."""
        with urllib.request.urlopen(self.address + path, timeout=60) as answer:
            return json.load(answer)

    def queue(self, prompt: dict[str, Any], workflow: dict[str, Any] | None = None) -> str:
        """Queue a prompt in API format and return its id. Raises PromptFailed with ComfyUI's reason."""
        extra = {"extra_data": {"extra_pnginfo": {"workflow": workflow}}} if workflow else {}
        body = json.dumps({"prompt": prompt, "client_id": "compiled-graphs", **extra}).encode()
        request = urllib.request.Request(
            self.address + "/prompt", body, {"Content-Type": "application/json"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["prompt_id"]
        except urllib.error.HTTPError as error:
            raise PromptFailed(error.read().decode()[:2000]) from None

    def wait(self, prompt_id: str) -> dict[str, Any]:
        """Wait for a prompt and return its history entry. Raises PromptFailed if a node raised."""
        deadline = time.monotonic() + PROMPT_LIMIT
        while time.monotonic() < deadline:
            history = self.get(f"/history/{prompt_id}")
            if prompt_id in history:
                entry = history[prompt_id]
                if entry.get("status", {}).get("status_str") == "error":
                    raise PromptFailed(reason_of(entry["status"]["messages"])[-2000:])
                return entry
            if self._process is not None and self._process.poll() is not None:
                raise RuntimeError(f"ComfyUI ended; {self.end_of_log()}")
            time.sleep(0.05)
        raise PromptFailed(f"no result after {PROMPT_LIMIT:g} s")

    def run(self, prompt: dict[str, Any], workflow: dict[str, Any] | None = None) -> dict[str, Any]:
        """Queue a prompt, wait, and return its outputs by node."""
        return self.wait(self.queue(prompt, workflow))["outputs"]

    def post(self, path: str) -> None:
        """Send an empty POST request."""
        urllib.request.urlopen(urllib.request.Request(self.address + path, b"", method="POST"), timeout=60).close()

    def image(self, reference: dict[str, str]) -> bytes:
        """Return the bytes of an image that a node's output names."""
        query = urllib.parse.urlencode({key: reference.get(key, "") for key in ("filename", "subfolder", "type")})
        with urllib.request.urlopen(f"{self.address}/view?{query}", timeout=60) as answer:
            return answer.read()

    def end_of_log(self) -> str:
        """Return what the server said last."""
        return f"the end of {self.log}:\n{self._logged()[-2000:]}"

    def lines_with(self, text: str) -> list[str]:
        """Return the lines of its log that contain a text."""
        return [line for line in self._logged().splitlines() if text in line]

    def _logged(self) -> str:
        return self.log.read_text("utf-8", "replace")

    def _command(self) -> list[str]:
        common = [*_device_arguments(), "--listen", "127.0.0.1", "--port", str(self._port), *self._arguments]
        if not self._comfyui:
            common += ["--cwd", str(self.home), "--disable-known-models"]
            return [sys.executable, "-m", "comfy.cmd.main", *common]
        return [sys.executable, str(Path(self._comfyui, "main.py")), *common, *self._folder_arguments()]

    def _folder_arguments(self) -> list[str]:
        known = Path(self._comfyui, "comfy", "cli_args.py").read_text(encoding="utf-8")
        if "--base-directory" in known:
            return ["--base-directory", str(self.home), "--database-url", "sqlite:///:memory:"][
                : 4 if "--database-url" in known else 2
            ]
        config = self.home / "extra_model_paths.yaml"
        config.write_text(
            f"compiled_graphs:\n  base_path: {json.dumps(str(self.home))}\n"
            "  checkpoints: models/checkpoints\n  loras: models/loras\n  custom_nodes: custom_nodes\n"
        )
        folders = [f"--{name}-directory={self.home / name}" for name in ("output", "temp", "input")]
        return ["--extra-model-paths-config", str(config), *folders]


def _device_arguments() -> list[str]:
    import torch

    return [] if torch.cuda.is_available() else ["--cpu"]
