"""What the four steps of `install` hand on: a network in its patcher, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...backends.base import Backend
from ...common.words import Words
from ...identity.regions import Region
from ...runtime.compiled_model import CompiledModel
from ...runtime.network_wrapper import NetworkWrapper
from ...runtime.region_forward import RegionForward
from ...tracing.shape_discovery import ModelCall
from .low_rank import LowRankBranches
from .status import Status


@dataclass(frozen=True)
class PatchedNetwork:
    """A network, and the patcher of ours that its graphs go into."""

    patcher: Any
    network: nn.Module
    prefix: str
    """What the patcher puts before the names of the network's parts; empty for one that does not sample by itself."""
    calls: Mapping[str, ModelCall]
    """The methods by which ComfyUI enters the network, and how it would call them."""
    device: torch.device
    kind: str
    """What people call the network in a workflow."""
    for_copy: Callable[[Any], PatchedNetwork] | None = None
    """Returns the same of a copy of the patcher, which runs another network on another device."""


@dataclass(frozen=True)
class NotCompiled:
    """Why a network is not compiled, with the remedy."""

    reason: str


@dataclass(frozen=True)
class CompilePlan:
    """What is compiled of a target, and by what."""

    regions: Sequence[Region]
    backend: Backend
    notices: Sequence[Words]
    """What a person is told of what is left alone."""
    only_loads: str = ""
    """Why graphs can be loaded here and not compiled, if that is so."""


@dataclass(frozen=True)
class UnattachedModel:
    """A compiled model that is not in its patcher yet."""

    compiled: CompiledModel
    wrappers: Sequence[NetworkWrapper]
    status: Status


@dataclass(frozen=True)
class CompiledNetwork:
    """What is compiled for one network, to be put into each patcher that runs it."""

    chosen: CompilePlan
    built: UnattachedModel
    forwards: Mapping[str, RegionForward]
    branches: LowRankBranches | None
