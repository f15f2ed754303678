"""The fixtures of a ComfyUI server, for the tests of its answers."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "nodes"))

from comfy_fixtures import fresh, home, make_home, pixels, server, start_server, workflow  # noqa: F401
