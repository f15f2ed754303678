"""Copies of streamed weights that stay on the GPU for one sampling, spread over a network's blocks.

ComfyUI fills the pages of the largest layers first, so what does not fit belongs to some blocks more than to others.
Those blocks wait for copies, and during the rest nothing is copied. If each block has the same share of its weights on
the GPU, copies and graphs run side by side all the time: a step takes as long as the slower of the two, and no longer
as long as their sum.

The copies take the memory of pages: ComfyUI empties these when the copies are made. They go at the end of a sampling.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .vbar_places import ARRIVED, FUNCTIONS, LORA_FUNCTIONS, PLACE

GROWTH = 0.1
"""A new plan is made if it would keep more by this share of all weights."""


@dataclass(frozen=True)
class Copy:
    """A layer's weights as they arrived, and the objects that they were made of."""

    origin: tuple
    weights: dict[str, Any]


class KeptWeights:
    """The copies of one network's weights. None outlives a sampling; the plan does."""

    def __init__(self) -> None:
        self._wanted: set[int] = set()
        self._copies: dict[int, Copy] = {}
        self._is_open = self._has_left = False
        self._most: int | None = None
        """More bytes than these left too little memory for a call."""

    def open(self) -> None:
        """A sampling begins."""
        self._is_open, self._has_left = True, False

    def close(self) -> None:
        """The sampling is over."""
        self._is_open = False
        self._copies.clear()

    def leave_to_pages(self) -> bool:
        """All weights have found room: let the copies go, once a sampling. Return whether none is left."""
        if self._copies and self._has_left:
            return False
        self._has_left = self._has_left or bool(self._copies)
        self._copies.clear()
        self._wanted.clear()
        self._most = None
        return True

    def plan(self, regions: Iterable[Sequence[nn.Module]], room: int) -> None:
        """Choose which layers stay.

        Args:
            regions: the layers of each region, in the order of calls.
            room: bytes of pages that these layers have now, beside the copies.
        """
        if not self._is_open:
            return
        layers = list({id(layer): layer for region in regions for layer in region if _lasts(layer)}.values())
        total, wanted = _bytes_of(layers), _bytes_of(filter(self.wants, layers))
        room += _bytes_of(layer for layer in layers if id(vars(layer)) in self._copies)
        if self._most is not None:
            room = min(room, self._most)
        if total and room > wanted + GROWTH * total:
            self._wanted = {id(vars(layer)) for layer in spread(layers, room / total)}
            self._copies = {key: copy for key, copy in self._copies.items() if key in self._wanted}

    def wants(self, layer: nn.Module) -> bool:
        """Whether a layer's weights are to stay, once they have arrived."""
        return self._is_open and id(vars(layer)) in self._wanted and _lasts(layer)

    def find(self, layer: nn.Module) -> dict[str, Any] | None:
        """Return the copy of a layer's weights. A layer that has changed since has none."""
        copy = self._copies.get(id(vars(layer)))
        if copy is None:
            return None
        origin = _origin(layer)
        if _lasts(layer) and all(one is other for one, other in zip(copy.origin, origin, strict=True)):
            return copy.weights
        del self._copies[id(vars(layer))]
        return None

    def keep(self, layer: nn.Module, weights: dict[str, Any], is_own: bool = False) -> dict[str, Any]:
        """Have weights stay that have arrived, and return them; with `is_own`, their memory was made by `memory`."""
        if not self.wants(layer):
            return weights
        try:
            made = weights if is_own else {name: _copied(tensor) for name, tensor in weights.items()}
        except torch.cuda.OutOfMemoryError:
            self._shrink()
            return weights
        self._copies[id(vars(layer))] = Copy(_origin(layer), made)
        return made

    def memory(self, layer: nn.Module, size: int, device: torch.device) -> torch.Tensor | None:
        """Return memory for a layer's bytes, in which they are to stay; None if they are not, or there is none."""
        if not self.wants(layer):
            return None
        try:
            return _empty(size, device)
        except torch.cuda.OutOfMemoryError:
            self._shrink()
            return None

    def give_way(self) -> bool:
        """After a call has run out of memory, let all copies go; return whether there were any."""
        if not self._copies:
            return False
        self._most = self._all_bytes() // 2
        self._copies.clear()
        self._wanted.clear()
        return True

    @property
    def is_empty(self) -> bool:
        """Whether there is no copy."""
        return not self._copies

    def _shrink(self) -> None:
        """There is no memory for another copy: want no more than there are."""
        self._wanted = set(self._copies)
        self._most = self._all_bytes()

    def _all_bytes(self) -> int:
        return sum(_size(copy) for copy in self._copies.values())


def spread(layers: Sequence[nn.Module], share: float) -> list[nn.Module]:
    """Return layers that hold this share of the bytes, in every part of the sequence."""
    chosen, due = [], 0.0
    for layer in layers:
        size = vars(layer)[PLACE][2]
        due += size * share
        if size <= due:
            chosen.append(layer)
            due -= size
    return chosen


def _lasts(layer: nn.Module) -> bool:
    """Whether what arrives is the same at each call."""
    return not any(vars(layer).get(name) for name in FUNCTIONS)


def _origin(layer: nn.Module) -> tuple:
    """Return the objects that a layer's arrived weights depend on: each load of a LoRA makes others."""
    attributes = vars(layer)
    return (*(layer._parameters.get(name) for name in ARRIVED), *(attributes.get(name) for name in LORA_FUNCTIONS))


def _empty(size: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # calls in any mode read it
        return torch.empty(size, dtype=torch.uint8, device=device)


def _copied(tensor: Any) -> Any:
    if tensor is None:
        return None
    with torch.inference_mode(False), torch.no_grad():
        return tensor.clone()


def _bytes_of(layers: Iterable[nn.Module]) -> int:
    return sum(vars(layer)[PLACE][2] for layer in layers)


def _size(copy: Copy) -> int:
    return sum(tensor.nbytes for tensor in copy.weights.values() if tensor is not None)
