"""The fixtures of a ComfyUI server, for workflows over several."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "nodes"))

from comfy_fixtures import home, make_home, start_server, workflow  # noqa: F401
