"""ComfyUI in a worker process: its blocks can be imported and traced, and no model is loaded."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import torch

from ...common.host import Host
from ...compile_cache.worker_main import Setup
from . import comfy_compat


def setup(backend: str, device: torch.device) -> Setup:
    """Return what a worker process needs to be like this ComfyUI: its modules, and the options it was started with."""
    values = comfy_compat.start_options()
    return Setup(
        tuple(sys.path),
        "hosts.comfy.worker_setup:make_host",
        pickle.dumps({name: value for name, value in values.items() if _travels(value)}),
        backend,
        str(device),
    )


def make_host(values: dict[str, Any]) -> Host:
    """Import ComfyUI with these options: they decide which functions its blocks call."""
    comfy_compat.set_start_options(values)
    from .rules.host import HOST

    return HOST


def _travels(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True
