"""A ComfyUI server of our own, on loopback, that lives as long as the baking."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ..compiler.common.boot import environment
from ..compiler.hosts.fleet import watched

BAKING = "COMPILED_GRAPHS_BAKING"
"""Environment variable: this server has the nodes that `bake` uses."""
PACKAGE = Path(__file__).absolute().parent.parent
START_LIMIT = 600.0
"""Seconds. Other extensions may take long to import."""
END_LIMIT = 60.0
SHOWN = 1500
"""Characters of a server's log that a message repeats."""


class ComfyError(Exception):
    """ComfyUI is missing, did not start, or ended. The message is for people."""


def find_comfyui(named: Path | None) -> Path | None:
    """Return the folder of ComfyUI's main.py, or None for the package that is installed. Raises ComfyError."""
    given = named or (Path(os.environ["COMFYUI_PATH"]) if os.environ.get("COMFYUI_PATH") else None)
    around = [PACKAGE.parents[1], PACKAGE.resolve().parents[1]] if PACKAGE.parent.name == "custom_nodes" else []
    for folder in [given] if given else around:
        if (folder / "main.py").is_file():
            return folder.absolute()
    if given is None and importlib.util.find_spec("comfy") and importlib.util.find_spec("comfy.cmd"):
        return None
    raise ComfyError(f"There is no ComfyUI in {given or PACKAGE.parent}: name its folder with --comfyui FOLDER.")


class ComfyProcess:
    """A ComfyUI process with this extension in it. It runs inside a `with` block."""

    def __init__(
        self, comfyui: Path | None, options: Sequence[str], folder: Path, models: Sequence[str], variables: Mapping
    ) -> None:
        """`options` are those for ComfyUI. `folder` is for files of this process, with stand-ins for `models` in it."""
        self._comfyui, self._options, self._models = comfyui, list(options), models
        self._folder, self._variables = folder, dict(variables)
        self._process: subprocess.Popen | None = None
        self.log = folder / "comfyui.log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    def __enter__(self) -> ComfyProcess:
        command = self._command()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, watched.__file__, *command],  # which ends with this process, however that ends
                cwd=self._comfyui or self._folder,
                env=environment(**{BAKING: "1", "PYTHONUNBUFFERED": "1", **self._variables}),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + START_LIMIT
        while time.monotonic() < deadline and self.is_alive:
            try:
                self.get("/queue")
                return self
            except OSError:
                time.sleep(0.2)
        self.__exit__(None, None, None)
        raise ComfyError(f"ComfyUI did not start. {self.end_of_log()}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None or not self.is_alive:
            return
        self._process.stdin.close()
        try:
            self._process.wait(END_LIMIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def address(self) -> str:
        """The server's URL."""
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> Any:
        """Return the JSON answer of a GET request. Raises OSError."""
        with urllib.request.urlopen(self.address + path, timeout=60) as answer:
            return json.load(answer)

    def free_memory(self) -> None:
        """Have the models of the last prompt forgotten."""
        body = json.dumps({"unload_models": True, "free_memory": True}).encode()
        request = urllib.request.Request(f"{self.address}/free", body, {"Content-Type": "application/json"})
        try:
            urllib.request.urlopen(request, timeout=60).close()
        except OSError:  # a ComfyUI without this path keeps them, and one that has ended has none
            return

    def end_of_log(self) -> str:
        """Return the end of what ComfyUI said."""
        return f"The end of its log:\n{self.log.read_text('utf-8', 'replace')[-SHOWN:]}"

    def _command(self) -> list[str]:
        common = ["--listen", "127.0.0.1", "--port", str(self.port), *self._options]
        if "--cpu" not in common and not _has_accelerator():
            common.append("--cpu")
        common += self._own_paths()
        if self._comfyui is None:
            return [sys.executable, "-m", "comfy.cmd.main", *common]
        known = (self._comfyui / "comfy" / "cli_args.py").read_text(encoding="utf-8")
        if "--database-url" in known and "--database-url" not in common:  # that of the person may be in use
            common += ["--database-url", "sqlite:///:memory:"]
        return [sys.executable, str(self._comfyui / "main.py"), *common]

    def _own_paths(self) -> list[str]:
        """Return options with which ComfyUI finds stand-ins, and this extension if it is not among its own."""
        lines = [f"  {kind}: models/{kind}" for kind in self._models]
        if not self._is_installed():
            _link(PACKAGE, self._folder / "custom_nodes" / "compiled-graphs")
            lines.append("  custom_nodes: custom_nodes")
        if not lines:
            return []
        config = self._folder / "extra_model_paths.yaml"
        text = "\n".join(["baking:", f"  base_path: {json.dumps(str(self._folder))}", *lines])
        config.write_text(text + "\n", encoding="utf-8")
        return ["--extra-model-paths-config", str(config)]

    def _is_installed(self) -> bool:
        base = next((b for a, b in zip(self._options, self._options[1:]) if a == "--base-directory"), self._comfyui)
        places = Path(base, "custom_nodes").glob("*") if base else ()
        return any(place.exists() and place.samefile(PACKAGE) for place in places)


def _has_accelerator() -> bool:
    import torch

    others = (getattr(torch, "xpu", None), torch.backends.mps)
    return torch.cuda.is_available() or any(each is not None and each.is_available() for each in others)


def _link(source: Path, place: Path) -> None:
    import shutil

    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        place.symlink_to(source, target_is_directory=True)
    except OSError:
        shutil.copytree(source, place, ignore=shutil.ignore_patterns(".*"))
