"""What installing compiled regions has in common in every host: a choice becomes a compiled model and its wrappers."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..backends.base import Backend
from ..entrance import CodingEntrance, Entrance
from ..host import Host
from ..model import CompiledModel, Progress
from ..probe import ModelCall
from ..region import Region
from ..registry import Registry


@dataclass(frozen=True)
class Choice:
    """What of a network is compiled, with which backend, and where it runs."""

    network: nn.Module
    regions: Sequence[Region]
    device: torch.device
    backend: Backend


Repeat = Callable[[Entrance, tuple, dict[str, Any]], ModelCall]
"""Returns what repeats a call of a wrapped method, given its arguments, at other sizes."""


def wrapper(network: nn.Module, method: str, inner: Callable | None, codes: bool) -> Entrance:
    """Return what takes the place of a network's method. `codes` says that it encodes or decodes for a VAE."""
    return (CodingEntrance if codes else Entrance)(network, method, inner)


def build(
    choice: Choice, wrappers: Sequence[Entrance], repeat: Repeat, registry: Registry, host: Host, **options: Any
) -> CompiledModel:
    """Return the compiled model that runs inside these wrappers. `options` are those of CompiledModel by name."""
    compiled = CompiledModel(
        choice.network,
        choice.regions,
        choice.device,
        choice.backend,
        registry,
        host,
        _running_call([weakref.ref(each) for each in wrappers], repeat),
        **options,
    )
    for each in wrappers:
        each.compiled = compiled
    return compiled


def alive(references: Iterable[weakref.ref[Entrance]]) -> list[Entrance]:
    """Return the wrappers that are not gone."""
    return [found for reference in references if (found := reference()) is not None]


def log_progress(log: logging.Logger, progress: Progress) -> None:
    """Write one line for one graph."""
    log.info(
        "[%d/%d] %s: %s, %.1f s", progress.done, progress.total, progress.region, progress.source, progress.seconds
    )


def _running_call(references: Sequence[weakref.ref[Entrance]], repeat: Repeat) -> Callable[[], ModelCall | None]:
    """Return what finds the running call.

    It must not keep the wrappers, which keep the compiled model that it is given to: in ComfyUI they also keep the
    model's forward from being tidied.
    """

    def find() -> ModelCall | None:
        calls = ((each, call) for each in alive(references) if (call := each.running_call()))
        return next((repeat(each, *call) for each, call in calls), None)

    return find
