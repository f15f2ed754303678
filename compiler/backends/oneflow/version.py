"""What a Python is asked about its OneFlow. No torch in here (see `operators`)."""

from __future__ import annotations

import json

from .operators import flow


def main() -> None:
    """Write the version and the compute capability of the GPU that it sees, or null, as one line of JSON."""
    capability = flow.cuda.get_device_capability() if flow.cuda.is_available() else None
    print(json.dumps([flow.__version__, capability]))
