"""What a graph depends on besides its region and its call."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .backends import Backend

_TRACING = (
    "attention",
    "gpu_functions",
    "layout",
    "patches",
    "hosts/comfy/scaled_fp8",
    "signature",
    "skeleton",
    "torch_compat",
    "trace",
)
"""Modules here that decide what graph a region becomes."""
_INDUCTOR = tuple(f"backends/inductor/{name}" for name in ("artifacts", "backend", "repeated_subgraphs", "tuning"))
_COMPILING = {"inductor": _INDUCTOR, "inductor_fp8": ("backends/inductor/float8", *_INDUCTOR)}
"""Those that change a graph before it is compiled, by backend."""
_PROBING = (
    "hosts/comfy/synthetic_calls",
    "hosts/diffusers/synthetic_calls",
    "probe",
    "region",
    "signature",
    "skeleton",
)
"""Modules that decide which graphs a model wants."""


def environment(backend: Backend, device: torch.device) -> dict[str, str]:
    """Return the backend's environment and the versions of our own code. Part of a graph's key."""
    fields = backend.environment(device) | {"tracing": tracing_version()}
    modules = _COMPILING.get(backend.name)
    return fields | {"compiling": _digest(modules)} if modules else fields


def tracing_version() -> str:
    """Return a digest of the code that traces: an update that corrects it must not load what it made before."""
    return _digest(_TRACING)


def probing_version() -> str:
    """Return a digest of the code that finds out which graphs a model wants."""
    return _digest(_PROBING)


@lru_cache
def _digest(names: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for name in names:
        source = Path(__file__).parent.joinpath(f"{name}.py").read_text(encoding="utf-8")  # line ends are one here
        digest.update(source.encode())
    return digest.hexdigest()[:16]
