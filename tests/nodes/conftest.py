"""The fixtures of a ComfyUI server, for the tests of the nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from comfy_fixtures import (  # noqa: F401
    fresh,
    home,
    listing_server,
    make_home,
    pixels,
    server,
    start_server,
    workflow,
)


@pytest.fixture(scope="session")
def described_nodes() -> dict[str, Any]:
    """The data that `describe_nodes.py` prints."""
    command = [sys.executable, str(Path(__file__).with_name("describe_nodes.py"))]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)
