"""scripts/lib.sh without a network: a fake Python in the environment's place records what pip is asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(not shutil.which("bash") or os.name == "nt", reason="needs bash")

# With $NO_OLD_TORCHVISION it refuses 0.16.2, as pip does on Python 3.12 and newer. It imports any package it accepted.
PYTHON = """#!/usr/bin/env bash
case "$*" in
    "-c from importlib.metadata"*) echo "torch==2.13.0" ;;
    "-c import "*) grep -q "${2#import }" "$CG_HOME/asked" ;;
    *torchvision==0.16.2*) [ -z "${NO_OLD_TORCHVISION:-}" ] && echo "$@" >>"$CG_HOME/asked" ;;
    "-m pip install"*) echo "$@" >>"$CG_HOME/asked" ;;
esac
"""


@pytest.fixture
def installed(tmp_path):
    """Return a function that runs `install_comfyui` on a checkout and returns the arguments that pip got."""
    python, comfyui = tmp_path / "home" / "venv" / "bin" / "python", tmp_path / "ComfyUI"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    comfyui.mkdir()
    (comfyui / "requirements.txt").write_text("torch\ntorchvision\naiohttp>=3.11.8\n")

    def install(**environment: str) -> list[str]:
        home = str(tmp_path / "home")
        environment = {**os.environ, "COMPILED_GRAPHS_HOME": home, "CG_HOME": home, **environment}
        command = f'. "{ROOT}/scripts/lib.sh"; install_comfyui "{comfyui}"'
        subprocess.run(["bash", "-c", command], env=environment, check=True, timeout=60)
        return (tmp_path / "home" / "asked").read_text().split()

    return install


@pytest.mark.parametrize("no_old_torchvision", ["", "1"], ids=["python 3.11", "python 3.12 and newer"])
def test_unnamed_imports_of_comfyui_are_installed(installed, no_old_torchvision):
    """ComfyUI imports packages that its requirements do not name. They are installed on every Python."""
    asked = installed(NO_OLD_TORCHVISION=no_old_torchvision)
    assert {"requests", "torchsde", "spandrel"} <= set(asked)
    assert ("torchvision==0.16.2" in asked) is not bool(no_old_torchvision)


def test_a_second_run_installs_nothing(installed):
    assert installed() == installed()
