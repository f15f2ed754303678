"""What a graph depends on besides its region and its call."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .backends import Backend

_TRACING = (
    "attention",
    "backends/float8",
    "backends/inductor",
    "backends/repeats",
    "layout",
    "patches",
    "scaled_weights",
    "signature",
    "skeleton",
    "trace",
)
"""Modules here that decide what graph a region becomes, and what of it is compiled."""


_PROBING = ("hosts/comfy_calls", "hosts/diffusers_calls", "probe", "region", "signature", "skeleton")
"""Modules that decide which graphs a model wants."""


def environment(backend: Backend, device: torch.device) -> dict[str, str]:
    """Return the backend's environment and the version of our own tracing. Part of a graph's key."""
    return backend.environment(device) | {"tracing": tracing_version()}


@lru_cache(maxsize=1)
def tracing_version() -> str:
    """Return a digest of the code that traces: an update that corrects it must not load what it made before."""
    return _digest(_TRACING)


@lru_cache(maxsize=1)
def probing_version() -> str:
    """Return a digest of the code that finds out which graphs a model wants."""
    return _digest(_PROBING)


def _digest(names: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for name in names:
        source = Path(__file__).parent.joinpath(f"{name}.py").read_text(encoding="utf-8")  # line ends are one here
        digest.update(source.encode())
    return digest.hexdigest()[:16]
