"""Keeps the weights of a network's convolutions in channels_last while it samples.

A GPU's convolutions read weights in channels_last, and transpose contiguous ones at each step. Hosts, LoRAs and eager
runs of the network need contiguous weights. So each weight is arranged within its own memory when a sampling begins,
and restored when it ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import nn

from ..common.inner_tensors import TENSOR_TYPES
from ..common.torch_compat import storage_users
from ..identity.memory_format import has_layouts, stride_in

_UNSHARED_USES = 2
"""Use count of an unshared storage: the tensor, and the handle that is asked for the count."""


class ChannelsLastWeights:
    """Brings the weights of one network into channels_last, and restores them."""

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        """Weights on another device than `device` stay unchanged."""
        self._network = weakref.ref(network)
        self._device = device
        self._arranged: list[weakref.ref[torch.Tensor]] = []

    def begin(self) -> None:
        """Bring the contiguous weights of convolutions into channels_last, as far as memory allows."""
        network = self._network()
        for weight in () if network is None else _weights(network, self._device):
            try:
                if weight.is_contiguous() and _lay_out(weight, torch.channels_last):
                    self._arranged.append(weakref.ref(weight))
            except torch.cuda.OutOfMemoryError:  # graphs accept the remaining weights as they are
                return

    def end(self) -> None:
        """Make those weights contiguous again that `begin` has arranged and nobody has replaced."""
        arranged, self._arranged = self._arranged, []
        for reference in arranged:
            weight = reference()
            if weight is not None and has_layouts(weight) and not weight.is_contiguous():
                _lay_out(weight, torch.contiguous_format)


def _weights(network: nn.Module, device: torch.device) -> Iterator[torch.Tensor]:
    for weight in network.parameters():
        if type(weight) in TENSOR_TYPES and weight.device == device and has_layouts(weight):
            yield weight


def _lay_out(weight: torch.Tensor, memory_format: torch.memory_format) -> bool:
    """Reorder a weight's values within its memory. Returns False, and does nothing, if others may read that memory."""
    if not _is_unshared(weight):
        return False
    stride = stride_in(weight, memory_format)
    with torch.inference_mode():  # only this mode can write to both inference tensors and normal ones
        values = weight.detach()
        values.as_strided(weight.shape, stride).copy_(values.clone())
    weight.data = weight.data.as_strided(weight.shape, stride)
    return True


def _is_unshared(weight: torch.Tensor) -> bool:
    """Whether no other tensor shares this one's memory. False if this torch does not report use counts."""
    users = storage_users(weight)
    return users is not None and users <= _UNSHARED_USES
