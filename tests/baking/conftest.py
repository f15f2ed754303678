"""The fixtures of a ComfyUI server, which are those of the nodes' tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "nodes"))

from comfy_fixtures import home, make_home, server, start_server, workflow  # noqa: F401
