"""The weights of a network's convolutions in channels_last, for as long as it samples.

A GPU's convolutions read them so; left contiguous they are transposed at each step. Hosts, LoRAs and whoever runs
the network eagerly want them contiguous: so they are arranged when a sampling begins and put back when it ends,
each within its own memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import nn

from .layout import has_layouts, stride_in
from .signature import TENSOR_TYPES
from .torch_compat import storage_users

_ALONE = 2
"""Who holds the storage of a tensor that shares it with nobody: the tensor, and the object that is asked."""


class Arrangement:
    """Arranges the weights of one network, and puts them back."""

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        """Weights that are elsewhere than on `device` stay as they are."""
        self._network = weakref.ref(network)
        self._device = device
        self._arranged: list[weakref.ref[torch.Tensor]] = []

    def begin(self) -> None:
        """Bring contiguous weights of convolutions into channels_last, as far as memory allows."""
        network = self._network()
        for weight in () if network is None else _weights(network, self._device):
            try:
                if weight.is_contiguous() and _lay_out(weight, torch.channels_last):
                    self._arranged.append(weakref.ref(weight))
            except torch.cuda.OutOfMemoryError:  # graphs take the others as they are
                return

    def end(self) -> None:
        """Make contiguous again what `begin` has arranged and nobody has replaced."""
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
    """Order a weight's values in its memory anew. Does nothing, and says so, if others may be reading that memory."""
    if not _is_alone(weight):
        return False
    stride = stride_in(weight, memory_format)
    with torch.inference_mode():  # the only one in which tensors of both modes can be written to
        values = weight.detach()
        values.as_strided(weight.shape, stride).copy_(values.clone())
    weight.data = weight.data.as_strided(weight.shape, stride)
    return True


def _is_alone(weight: torch.Tensor) -> bool:
    """Whether no other tensor shares this one's memory; not if this torch does not tell."""
    users = storage_users(weight)
    return users is not None and users <= _ALONE
