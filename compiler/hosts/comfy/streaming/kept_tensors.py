"""Small weights and buffers, which each load moves. They are copied to where they were before, and stay there."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ....common.tensor_slots import Slot, owned_tensor_slots
from ....identity.low_rank import is_factor
from .vbar_places import ARRIVED, PLACE


class KeptTensors:
    """The tensors of one network that its modules hold themselves."""

    def __init__(self) -> None:
        self._slots: list[Slot] = []
        self._kept: dict[tuple[int, str], torch.Tensor] = {}
        self._seen: list[int] = []

    def follow(self, network: nn.Module, device: torch.device) -> None:
        """See which tensors the modules hold themselves."""
        self._slots = [
            (group, name)
            for _, layer, (group, name) in owned_tensor_slots(network)
            if group[name].device == device and not (PLACE in vars(layer) and name in ARRIVED)
        ]
        keys = {(id(group), name) for group, name in self._slots}
        self._kept = {key: tensor for key, tensor in self._kept.items() if key in keys}
        self._seen = []

    def tensors(self) -> list[torch.Tensor]:
        """Return all of them."""
        return [group[name] for group, name in self._slots]

    def restore(self) -> bool:
        """Copy tensors that have moved to where they were; return whether there were any."""
        if list(map(id, self.tensors())) == self._seen:
            return False
        self._seen = [id(self._restored(group, name)) for group, name in self._slots]
        return True

    def _restored(self, group: dict[str, Any], name: str) -> torch.Tensor:
        tensor = group[name]
        if is_factor(name):  # stays in place by itself, and its memory is given back with the model's
            return tensor
        kept = self._kept.setdefault((id(group), name), tensor)
        if kept is tensor:
            return tensor
        if (kept.shape, kept.dtype, kept.device, type(kept)) != (
            tensor.shape,
            tensor.dtype,
            tensor.device,
            type(tensor),
        ):
            self._kept[id(group), name] = tensor
            return tensor
        with torch.inference_mode():  # only this mode can write to both inference tensors and normal ones
            kept.copy_(tensor)
        group[name] = kept
        return kept
