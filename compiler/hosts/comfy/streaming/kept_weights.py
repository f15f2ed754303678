"""Copies of streamed weights that stay on the GPU for one sampling, chosen so that no block waits longer than another.

ComfyUI fills the pages of the largest layers first, so what does not fit belongs to some blocks more than to others.
Those blocks wait for copies, and during the rest nothing is copied. If each block has as many bytes to bring as are
copied while a block like it runs, copies and graphs run side by side all the time: a step takes as long as the slower
of the two, and no longer as long as their sum. Until blocks have been timed, each has equally many bytes to bring.

The copies take the memory of pages: ComfyUI empties these when the copies are made. At the end of a sampling the copies
are dropped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any

import torch
from torch import nn

from .vbar_places import ARRIVED, FUNCTIONS, LORA_FUNCTIONS, PLACE

ALIGNMENT = 512
"""Of each layer's bytes in memory that layers share."""
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
        self._wanted: dict[int, weakref.ref[nn.Module]] = {}
        """Layers whose weights are to stay, by the identity of their attributes."""
        self._copies: dict[int, Copy] = {}
        self._is_open = self._has_left = False
        self._slab: _Slab | None = None
        self._room = 0
        """The bytes that the plan may keep."""
        self._most: int | None = None
        """More bytes than these left too little memory for a call."""

    def open(self) -> None:
        """A sampling begins."""
        self._is_open, self._has_left = True, False

    def close(self) -> None:
        """The sampling is over."""
        self._is_open = False
        self._let_go()

    def leave_to_pages(self) -> bool:
        """All weights have found room: let the copies go, once a sampling. Return whether none is left."""
        if self._copies and self._has_left:
            return False
        self._has_left = self._has_left or bool(self._copies)
        self._let_go()
        self._wanted.clear()
        self._most = None
        return True

    def plan(self, regions: Sequence[Sequence[nn.Module]], room: int, seconds: Sequence[float]) -> None:
        """Choose which layers stay.

        Args:
            regions: the layers of each region, in the order of calls.
            room: bytes of pages that these layers have now, beside the copies.
            seconds: how long each region runs, in any unit.
        """
        if not self._is_open:
            return
        layers = list({id(layer): layer for region in regions for layer in region if _lasts(layer)}.values())
        total, wanted = _bytes_of(layers), _bytes_of(filter(self.wants, layers))
        room += _bytes_of(layer for layer in layers if id(vars(layer)) in self._copies)
        if self._most is not None:
            room = min(room, self._most)
        if total and room > wanted + GROWTH * total:
            self._room = room
            self._choose(regions, seconds)
            self._copies = {key: copy for key, copy in self._copies.items() if key in self._wanted}
            self._slab = None

    def plan_again(self, regions: Sequence[Sequence[nn.Module]], seconds: Sequence[float]) -> None:
        """Choose anew what stays within the same room, by what is known now of how long each region runs."""
        if self._wanted and not self._copies:
            self._choose(regions, seconds)

    def _choose(self, regions: Sequence[Sequence[nn.Module]], seconds: Sequence[float]) -> None:
        lasting = [[layer for layer in region if _lasts(layer)] for region in regions]
        chosen = evenly(lasting, self._room, seconds)
        self._wanted = {id(vars(layer)): weakref.ref(layer) for layer in chosen}

    def rest(self, regions: Iterable[Sequence[nn.Module]]) -> int | None:
        """Return how many bytes a region has to bring at most beside what is to stay; None if nothing is known."""
        sizes = [_bytes_of(layer for layer in region if not self.wants(layer)) for region in regions]
        return max(sizes) if self._wanted and sizes else None

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

    def memory(
        self, layer: nn.Module, size: int, device: torch.device, is_staged: Callable[[nn.Module], bool]
    ) -> OwnMemory | None:
        """Return memory for a layer's bytes, in which they are to stay; None if they are not, or there is none.

        One allocation serves all layers for which `is_staged`: what fills new memory waits for what the GPU still runs.
        """
        if not self.wants(layer):
            return None
        try:
            is_new = self._slab is None
            if is_new:
                missing = [wanted for key, reference in self._wanted.items() if key not in self._copies
                           and (wanted := reference()) is not None and is_staged(wanted)]  # fmt: skip
                self._slab = _Slab(_bytes_of(missing) + len(missing) * ALIGNMENT, device)
            if (memory := self._slab.take(size)) is not None:
                return OwnMemory(memory, is_new)
            return OwnMemory(_empty(size, device), is_new=True)
        except torch.cuda.OutOfMemoryError:
            self._shrink()
            return None

    def give_way(self) -> bool:
        """After a call has run out of memory, let all copies go; return whether there were any."""
        if not self._copies:
            return False
        self._most = self._all_bytes() // 2
        self._let_go()
        self._wanted.clear()
        return True

    @property
    def is_empty(self) -> bool:
        """Whether there is no copy."""
        return not self._copies

    def _let_go(self) -> None:
        self._copies.clear()
        self._slab = None

    def _shrink(self) -> None:
        """There is no memory for another copy: want no more than there are."""
        self._wanted = {key: layer for key, layer in self._wanted.items() if key in self._copies}
        self._most = self._all_bytes()

    def _all_bytes(self) -> int:
        return sum(_size(copy) for copy in self._copies.values())


@dataclass(frozen=True)
class OwnMemory:
    """Memory for a layer's weights."""

    memory: torch.Tensor
    is_new: bool
    """Whether it was just allocated, so that work that was launched before may still use it."""


class _Slab:
    """One allocation that many layers take parts of. No part is taken twice."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Allocate `size` bytes. Raises torch.cuda.OutOfMemoryError."""
        self._memory = _empty(size, device)
        self._taken = 0

    def take(self, size: int) -> torch.Tensor | None:
        """Return `size` bytes, or None if fewer are left."""
        start, end = self._taken, self._taken + size
        if end > self._memory.numel():
            return None
        self._taken = -(-end // ALIGNMENT) * ALIGNMENT
        return self._memory[start:end]


def evenly(regions: Sequence[Sequence[nn.Module]], room: int, seconds: Sequence[float]) -> list[nn.Module]:
    """Return layers to keep within `room` bytes, so that no region has much more to bring per second of its run.

    Small layers come first: the fewer layers are left to a region, the fewer copies it waits for.
    """
    owner = {id(layer): index for index, region in reversed(list(enumerate(regions))) for layer in region}
    queues = [sorted((layer for layer in region if owner[id(layer)] == index), key=_bytes_in)
              for index, region in enumerate(regions)]  # fmt: skip
    rests = [_bytes_of(queue) for queue in queues]
    heap = [(-rest / seconds[index], index, 0) for index, rest in enumerate(rests) if rest]
    heapify(heap)
    chosen = []
    while heap:
        _, index, place = heappop(heap)
        size = _bytes_in(queues[index][place])
        if size > room:
            continue
        chosen.append(queues[index][place])
        room -= size
        rests[index] -= size
        if place + 1 < len(queues[index]):
            heappush(heap, (-rests[index] / seconds[index], index, place + 1))
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
    return sum(map(_bytes_in, layers))


def _bytes_in(layer: nn.Module) -> int:
    return vars(layer)[PLACE][2]


def _size(copy: Copy) -> int:
    return sum(tensor.nbytes for tensor in copy.weights.values() if tensor is not None)
