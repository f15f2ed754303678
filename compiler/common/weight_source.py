"""Where the weights of a network come from. A graph does not care: it is a function of (weights, inputs).

Each call of a region asks a `WeightSource` for the region's weights, and tells it when the graph has been launched.
Weights that lie in the modules need neither. A host that brings weights to the device call by call (ComfyUI's dynamic
VRAM, its low-VRAM modes) has sources of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import nn


class WeightSource(Protocol):
    """The weights of one region."""

    def acquire(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the weights where the model runs. They stay valid until `release`.

        `tensors` are what the region's modules hold, in the order of `tensor_slots`. Returns that very object if
        these are the weights. Raises Unsupported if only the region's own code can get its weights.
        """
        ...

    def release(self) -> None:
        """Say that the graph has been launched, or that the call has failed. Does nothing without an `acquire`."""
        ...


class NetworkWeights(Protocol):
    """The weights of a whole network."""

    def of(self, region: nn.Module) -> WeightSource:
        """Return the source of one region's weights."""
        ...

    def follow(self) -> None:
        """See, before a sampling, where the host keeps the weights now."""
        ...

    def begin_sampling(self) -> None:
        """Say that calls of one sampling follow: memory that weights pass through may be kept between them."""
        ...

    def end_sampling(self) -> None:
        """Give such memory back."""
        ...

    def running(self, size: int) -> AbstractContextManager[None]:
        """Enter around each call of the network. `size` is the number of values in its inputs."""
        ...

    def capturing(self) -> AbstractContextManager[None]:
        """Enter around a capture of a call. No weights move meanwhile: that waits for the GPU, which a capture cannot.

        Raises Unsupported if the call would have to move some.
        """
        ...

    def give_way(self, size: int) -> bool:
        """Leave more memory to calls of this size, one of which had too little. Returns whether that is possible."""
        ...

    @property
    def are_there(self) -> bool:
        """Whether a call finds all weights on the device, as far as can be said without bringing any."""
        ...

    @property
    def places(self) -> object | None:
        """A token for the addresses of all weights in the running call: an equal token means equal addresses.

        `RESIDENT` if the modules hold all weights. None if some have no address that lasts.
        """
        ...


RESIDENT = object()
"""The modules hold the weights: whoever relies on addresses compares those of the modules' tensors."""


class ResidentSource:
    """A region whose modules hold its weights."""

    def acquire(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return these tensors."""
        return tensors

    def release(self) -> None:
        """Do nothing."""


class ResidentWeights:
    """A network whose modules hold its weights."""

    places = RESIDENT
    are_there = True

    def of(self, region: nn.Module) -> ResidentSource:
        """Return the source of one region's weights."""
        return ResidentSource()

    def follow(self) -> None:
        """Do nothing: guards compare the modules' tensors at each call."""

    def begin_sampling(self) -> None:
        """Do nothing."""

    def end_sampling(self) -> None:
        """Do nothing."""

    def running(self, size: int) -> AbstractContextManager[None]:
        """Enter around each call of the network."""
        return nullcontext()

    def capturing(self) -> AbstractContextManager[None]:
        """Enter around a capture of a call."""
        return nullcontext()

    def give_way(self, size: int) -> bool:
        """Return False: the weights are the host's."""
        return False
