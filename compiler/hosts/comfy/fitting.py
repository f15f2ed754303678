"""Which graphs of a file are for this machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache

from ...backends import BACKENDS
from ...identity.graph_spec import GraphIdentity
from ...registry.doctor import usual_device
from . import comfy_compat


def fits_here(identity: GraphIdentity) -> bool:
    """Whether a graph was made for this machine: its versions, and the GPU or the CPU that ComfyUI uses."""
    return identity.environment in _environments(identity.backend)


@lru_cache
def _environments(backend: str) -> Sequence[Mapping[str, str]]:
    import torch

    from ...compile_cache.key import environment
    from .rules.host import HOST

    if backend not in BACKENDS:
        return []
    # On the command line there is no ComfyUI, and importing one would have it read the arguments.
    device = comfy_compat.torch_device() if comfy_compat.MANAGEMENT in sys.modules else usual_device()
    devices = {device, torch.device("cpu")}
    found = []
    for device in devices:
        with suppress(ImportError, RuntimeError):  # a backend without what it needs for this device
            found.append(environment(BACKENDS[backend], device, HOST))
    return found
