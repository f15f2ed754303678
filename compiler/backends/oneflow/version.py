"""A Python runs this to describe its OneFlow. This module imports no torch (see `operators`)."""

from __future__ import annotations

import json

from .operators import flow


def main() -> None:
    """Print one line of JSON: OneFlow's version, and the compute capability of the GPU that it sees, or null."""
    capability = flow.cuda.get_device_capability() if flow.cuda.is_available() else None
    print(json.dumps([flow.__version__, capability]))
