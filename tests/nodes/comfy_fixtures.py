"""Fixtures: a real ComfyUI server on loopback with this extension installed, and prompts for it."""

from __future__ import annotations

import copy
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import comfy_browser  # noqa: E402
import tiny_models  # noqa: E402
import workflow_pictures  # noqa: E402
from comfy_server import ComfyServer  # noqa: E402


def choices_of(form: list) -> list[str]:
    """Return what can be chosen at an input, as a server describes it in the V1 or the V3 schema."""
    return form[1]["options"] if form[0] == "COMBO" else form[0]


COMFYUI = os.environ.get("COMFYUI_PATH", "")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for servers: at these sizes, threads mostly wait for one another


@pytest.fixture(scope="session")
def make_home(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a base folder for servers. It links to the named tiny models, which are kept beside the environment."""
    kept = (
        Path(os.environ.get("COMPILED_GRAPHS_HOME", ROOT / ".quickstart")) / f"models-{Path(COMFYUI).name or 'index'}"
    )

    def make(*names: str) -> Path:
        models = tmp_path_factory.mktemp("comfyui") / "models"
        places = [Path(tiny_models.FOLDERS.get(name, "checkpoints"), f"{name}.ckpt") for name in names]
        if not all((kept / place).exists() for place in places):
            command = [sys.executable, str(ROOT / "scripts" / "tiny_models.py"), "--comfyui", COMFYUI]
            subprocess.run([*command, "--out", str(kept), *names], check=True, capture_output=True)
        for place in places:
            (models / place).parent.mkdir(parents=True, exist_ok=True)
            (models / place).symlink_to(kept / place)
        return models.parent

    return make


@pytest.fixture(scope="session")
def home(make_home: Callable[..., Path]) -> Path:
    """A base folder with two checkpoints of the tiny model, shared by the servers of one test run."""
    return make_home("tiny_sd15", "tiny_sd15_other")


@pytest.fixture(scope="session")
def start_server(home: Path) -> Callable[..., ComfyServer]:
    """Make a server with the shared base folder or another one. It runs inside a `with` block.

    Named arguments are variables of its environment.
    """
    return lambda folder=home, *arguments, **variables: ComfyServer(COMFYUI, folder, arguments, variables)


@pytest.fixture(scope="session")
def server(start_server: Callable[..., ComfyServer]) -> Iterator[ComfyServer]:
    with start_server() as server:
        yield server


@pytest.fixture(scope="module")
def listing_server(
    start_server: Callable[..., ComfyServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ComfyServer]:
    """A server for a browser, that has every file that the workflows name."""
    if reason := comfy_browser.missing():
        pytest.skip(reason)
    home = tmp_path_factory.mktemp("workflows")
    workflow_pictures.place_files(home)
    with start_server(home) as server:
        yield server


@pytest.fixture
def fresh(start_server: Callable[..., ComfyServer], home: Path, tmp_path: Path) -> Iterator[ComfyServer]:
    """A server that has no graphs yet."""
    (tmp_path / "models").symlink_to(home / "models", target_is_directory=True)
    with start_server(tmp_path) as server:
        yield server


@pytest.fixture
def workflow() -> Callable[..., dict[str, Any]]:
    """The text-to-image workflow on the tiny model, with the reference backend."""
    original = json.loads((ROOT / "workflows" / "api" / "text_to_image.json").read_text())

    def make(
        width: int = 128, height: int = 128, batch: int = 1, compiled: bool = True, **sampler: Any
    ) -> dict[str, Any]:
        prompt = copy.deepcopy(original)
        prompt["1"]["inputs"]["ckpt_name"] = "tiny_sd15.ckpt"
        prompt["2"]["inputs"]["backend"] = "eager"
        prompt["5"]["inputs"] = {"width": width, "height": height, "batch_size": batch}
        prompt["6"]["inputs"] |= {"steps": 2, **sampler}
        if not compiled:
            del prompt["2"]
            prompt["6"]["inputs"]["model"] = ["1", 0]
        return prompt

    return make


@pytest.fixture
def pixels() -> Callable[[ComfyServer, dict[str, Any]], list[numpy.ndarray]]:
    """Return the images of a prompt's outputs as integer arrays [height, width, 3]."""

    def read(server: ComfyServer, outputs: dict[str, Any]) -> list[numpy.ndarray]:
        references = next(output["images"] for output in outputs.values() if "images" in output)
        images = [Image.open(io.BytesIO(server.image(reference))).convert("RGB") for reference in references]
        return [numpy.asarray(image, dtype=int) for image in images]

    return read
