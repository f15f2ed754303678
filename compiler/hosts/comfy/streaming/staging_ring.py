"""A ring of GPU memory for streamed weights that find no room in their pages.

ComfyUI casts such weights into a buffer for each of its two streams. A region needs all of its weights at once, so each
buffer would hold a whole block, and that memory is taken from weights that could stay. The ring holds what one block
needs and about as much for those after it, so that copies do not wait for the CPU to launch each block. Weights that
only ComfyUI can bring (with LoRAs, or not in pinned memory) still come into such a buffer. They move to the ring at
once.

The ring has a stream of its own, and ComfyUI's streams fill it, too. A copy over any of them waits for whatever used
that memory before: an earlier block's graph, or what had the ring's memory until it was allocated. The CPU waits for
nothing, except where ComfyUI may hand on the pinned memory that is copied (`pins.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ....common.host import Host
from .. import comfy_compat
from .kept_weights import ALIGNMENT, KeptWeights
from .pins import weights_in_pins
from .vbar_places import ARRIVED, PLACE, is_evicted_soon

AHEAD_BYTES = 384 * 2**20
"""Room for the weights of later regions at most: about what PCIe copies while a block of a large model runs."""


Range = tuple[int, int, "Staging"]
"""Where a part of the ring begins and ends, in bytes, and whose weights lie there."""


class StagingRing:
    """The ring of one network. It has memory only while a sampling runs that needs it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: torch.Tensor | None = None
        self._since: torch.cuda.Event | None = None
        """When that memory was allocated: what was launched earlier may still use it."""
        self._stream = torch.cuda.Stream(device) if comfy_compat.has_streams(device) else None
        self._copied: torch.cuda.Event | None = None
        """When the last copy out of pinned memory has ended."""
        self.keeps_pins = True
        """Whether the pinned memory of layers stays theirs during this call. If not, nothing is copied out of it."""
        self._head = 0
        self._lying: list[Range] = []
        """The ranges of the ring that hold weights."""
        self._is_open = False
        self._was_needed = False
        """Whether the last sampling needed the ring at its end."""
        self._needed = 0
        """The bytes that a region needed at most in the last call."""
        self._largest = 0
        """The same of the running call."""

    def open(self) -> None:
        """A sampling begins: weights may be staged.

        If the last one needed the ring, it takes its memory now. Later, pages that were just filled would be emptied.
        """
        self._is_open = True
        if self._was_needed:
            self._allocated()

    def close(self) -> None:
        """The sampling is over: give the memory back."""
        self._is_open, self._was_needed = False, self._memory is not None
        self._free()

    def end_call(self, rest: int | None = None) -> None:
        """Fit the ring to what the call needed. The next one allocates it anew if that differs much.

        `rest` is what a region needs at most once the weights that are to stay have been copied, if that is known.
        """
        largest, self._largest = self._largest, 0
        if largest:
            self._needed = largest if rest is None else min(largest, rest)
        size = self._wanted_size()
        is_fit = self._memory is not None and size <= self._memory.numel() <= size + AHEAD_BYTES // 2
        if not largest or not is_fit:
            self._free()

    def stage(self, staging: Staging, host: Host, kept: KeptWeights, is_next: bool) -> bool:
        """Begin to copy weights that have no room in their pages; return whether no layer waits for room in the ring.

        Left to ComfyUI are layers with room, with LoRAs, in another dtype than the layer's code gets, and not in pinned
        memory. If the region is next, those that the ring has no room for are left as well.
        Weights that are to stay are copied to memory of their own, whether their pages have room or not.
        """
        had = len(staging.origins)
        try:
            self._choose_ways(staging, host, kept, is_next)
        finally:
            # An event recorded anew would wait for other regions' copies, too.
            if len(staging.origins) > had and self._stream is not None:
                self._copied = staging.arrived = self._stream.record_event()
        self._largest = max(self._largest, staging.size)
        return not staging.pending

    def _choose_ways(self, staging: Staging, host: Host, kept: KeptWeights, is_next: bool) -> None:
        """Begin to copy, or leave to ComfyUI, what is pending, up to a layer that waits for room in the ring."""
        while staging.pending:
            layer = staging.pending[0]
            try:
                weights = kept.find(layer)
                if weights is None:
                    weights = self._begin_copy(layer, staging, host, kept)
            except _Busy:
                if not is_next:
                    return
                weights = None
            if weights is None:
                staging.left.append(layer)
            else:
                staging.weights[id(vars(layer))] = weights
            staging.pending.popleft()

    def finish_copies(self) -> None:
        """Have the CPU wait for copies out of pinned memory."""
        if self._copied is not None:
            self._copied.synchronize()

    def take(self, staging: Staging, buffer: torch.Tensor, stream: Any) -> torch.Tensor:
        """Move bytes out of a buffer of ComfyUI's, into which a stream brings them; return where they are.

        They go into the ring, or into memory of their own if it has no room. Their own memory belongs to the stream,
        which must wait for all readers before it is freed.
        """
        memory = None
        with suppress(_Busy):
            memory = self._claim(buffer.numel(), staging, stream) if self._is_open else None
        self._largest = max(self._largest, staging.size)
        with comfy_compat.on_stream(stream), torch.inference_mode(False):
            memory = torch.empty_like(buffer) if memory is None else memory[: buffer.numel()]
            return memory.copy_(buffer)

    def reserve(self, size: int) -> None:
        """Say, before the first call, how much a region needs at most."""
        self._needed = self._needed or size

    def _claim(self, size: int, staging: Staging, stream: Any) -> torch.Tensor | None:
        """Return the next bytes of the ring for a stream to fill, or None if it is too small.

        Raises _Busy if weights that somebody waits for lie there.
        """
        size = -(-size // ALIGNMENT) * ALIGNMENT
        memory = self._allocated()
        if memory is None or size > memory.numel():
            return None
        start = self._head if self._head + size <= memory.numel() else 0
        overwritten = {other for first, end, other in self._lying if first < start + size and start < end}
        if any(other.is_wanted for other in overwritten):
            raise _Busy
        ends = [self._since, *(event for other in overwritten for event in (other.arrived, other.done))]
        for event in (event for event in ends if event is not None):
            stream.wait_event(event)
        self._lying = [*_outside(self._lying, start, start + size), (start, start + size, staging)]
        self._head = start + size
        staging.size += size
        return memory[start : start + size]

    def _begin_copy(self, layer: nn.Module, staging: Staging, host: Host, kept: KeptWeights) -> dict[str, Any] | None:
        """Begin to copy a layer's weights; return them, or None if they come in another way."""
        pinned = weights_in_pins(layer, host) if self._is_open and self.keeps_pins else None
        memory = None if pinned is None else self._place_for(layer, pinned.nbytes, staging, kept, host)
        if memory is None:
            return None
        with self._on_stream():
            memory.copy_(pinned, non_blocking=True)
        staging.origins[id(vars(layer))] = pinned
        return dict(zip(ARRIVED.values(), _as_tensors(layer, memory), strict=True))

    def _place_for(
        self, layer: nn.Module, size: int, staging: Staging, kept: KeptWeights, host: Host
    ) -> torch.Tensor | None:
        """Return memory for a layer's bytes: of their own if they are to stay, and else in the ring, or None."""
        own = kept.memory(layer, size, self._device, lambda other: weights_in_pins(other, host) is not None)
        if own is not None:
            staging.to_keep.append(layer)
            if own.is_new and self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
                own.memory.record_stream(self._stream)
            return own.memory
        memory = None if has_room(layer) else self._claim(size, staging, self._stream)
        staging.lacks_room |= memory is not None
        return memory

    def _allocated(self) -> torch.Tensor | None:
        if self._memory is None:
            try:
                with torch.inference_mode(False):  # calls in any mode fill it
                    self._memory = torch.empty(self._wanted_size(), dtype=torch.uint8, device=self._device)
            except torch.cuda.OutOfMemoryError:  # ComfyUI's own cast gets by with less for small layers
                self._is_open = False
                return None
            if self._stream is not None:  # PyTorch hands out what the current stream still works with
                self._since = _recorded(self._device, times=False)
        return self._memory

    def _wanted_size(self) -> int:
        return self._needed + min(self._needed, AHEAD_BYTES)

    def _free(self) -> None:
        if self._memory is not None and self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._memory, self._since, self._head, self._lying = None, None, 0, []

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


class _Busy(Exception):
    """Weights that somebody waits for lie where a layer's would go."""


class Staging:
    """The weights of one region in the ring. They stay until `end`, and until what was launched by then has run."""

    def __init__(self, layers: Sequence[nn.Module], device: torch.device) -> None:
        self._layers = tuple(layers)
        self.pending = deque(layers)
        """Layers whose way has not been chosen yet."""
        self.weights: dict[int, dict[str, Any]] = {}
        """For each layer, by the identity of its attributes."""
        self.origins: dict[int, torch.Tensor] = {}
        """The bytes in pinned memory that were copied, for each layer that was."""
        self.left: list[nn.Module] = []
        """Layers whose weights come in another way."""
        self.to_keep: list[nn.Module] = []
        """Layers whose weights lie in memory of their own, in which they are to stay."""
        self.lacks_room = False
        """Whether weights are in the ring, because there was no room elsewhere."""
        self.size = 0
        self.is_wanted = True
        self.arrived: torch.cuda.Event | None = None
        self.timing: Timing | None = None
        self._began: torch.cuda.Event | None = None
        self.done: torch.cuda.Event | None = None
        self._device = device

    def holds(self, layers: Sequence[nn.Module], host: Host, kept: KeptWeights) -> bool:
        """Whether what was staged in an earlier call still is what these layers' code gets."""
        if list(map(id, layers)) != list(map(id, self._layers)):
            return False
        for layer in layers:
            weights = self.weights.get(id(vars(layer)))
            if (origin := self.origins.get(id(vars(layer)))) is not None:
                if weights_in_pins(layer, host) is not origin:
                    return False
            elif weights is not None and kept.find(layer) is not weights:
                return False
        return True

    def wait(self) -> None:
        """Have what is launched from now on wait for the weights."""
        if self.arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(self.arrived)

    def begin_timing(self) -> None:
        """Have `timing` say how long the GPU runs what is launched from now until `end`."""
        if comfy_compat.has_streams(self._device):
            self._began = _recorded(self._device, times=True)

    def end(self) -> None:
        """Let others have the memory."""
        self.is_wanted = False
        is_lying = self.size > 0 and comfy_compat.has_streams(self._device)
        if is_lying or self.arrived is not None or self._began is not None:
            self.done = _recorded(self._device, times=self._began is not None)
        if self._began is not None:
            self.timing = Timing(self._began, self.done)


@dataclass(frozen=True)
class Timing:
    """A region's run on the GPU."""

    began: torch.cuda.Event
    done: torch.cuda.Event

    def seconds(self) -> float | None:
        """Return how long the run took, or None while it goes on."""
        return self.began.elapsed_time(self.done) / 1e3 if self.done.query() else None


def _recorded(device: torch.device, times: bool) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=times)
    event.record(torch.cuda.current_stream(device))
    return event


def _outside(ranges: Sequence[Range], start: int, end: int) -> list[Range]:
    """Return what lies before `start` or from `end` on. A graph may still read the rest of a range that is cut."""
    before = [(first, min(last, start), staging) for first, last, staging in ranges if first < start]
    after = [(max(first, end), last, staging) for first, last, staging in ranges if last > end]
    return before + after


def has_room(layer: nn.Module) -> bool:
    """Whether the pages of a layer can be had. None stays pinned."""
    return not is_evicted_soon(vars(layer)[PLACE])


def _as_tensors(layer: nn.Module, memory: torch.Tensor) -> tuple[Any, Any]:
    """Return a layer's tensors as they lie in memory, by ComfyUI's own layout."""
    tensors = [layer._parameters.get(name) for name in ARRIVED]
    weight, bias = comfy_compat.find(f"{comfy_compat.MEMORY}.interpret_gathered_like")(tensors, memory)
    return weight, bias
