"""What is gained: a region by its graph against eager, and what whole calls of a network take.

A region is timed once per graph and process, right after the check against eager, when both ways have run and
what they do the first time is done. Calls of a network are timed as they come, at next to no cost.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch

RUNS = 3
ENOUGH = 0.05
"""Seconds after which a region is not run again: what takes longer needs no second figure."""
MAX_KEPT = 20
"""Calls of a size that its figure is taken from: the latest."""
MAX_SIZES = 8
"""Sizes that have a figure: those called last."""
STEPS_PER_DOUBLING = 4
"""Sizes of tensors beside the first are told apart in steps of which so many double the size."""


@dataclass(frozen=True)
class Timing:
    """Seconds that one call of a region takes, the fastest of a few. Both ways had the same inputs."""

    eager: float
    graph: float
    shape: tuple[int, ...] = ()
    """The `call_size` of the network's call that the region was timed in."""


@dataclass(frozen=True)
class Gain:
    """How much faster a network is with its graphs."""

    factor: float
    """Below 1 it is slower."""
    is_whole: bool
    """Whether this is said of whole calls of the network, or else of its compiled blocks alone."""


def compare(
    graph: Callable[[], Any], eager: Callable[[], Any], device: torch.device, shape: tuple[int, ...] = ()
) -> Timing | None:
    """Time a graph and the eager region that have both run before, or return None where that cannot be done.

    The clock is the host's and the device is waited for. So each figure has in it what Python takes to issue the
    work, as far as the device does not take longer.
    """
    wait = partial(torch.accelerator.synchronize, device) if device.type != "cpu" else _nothing
    try:
        return Timing(_fastest(eager, wait), _fastest(graph, wait), shape)
    except Exception:  # memory that is short, a device that cannot be waited for: a figure is not worth a picture
        return None


def speed_up(timed: Iterable[tuple[int, Timing]]) -> float | None:
    """Return eager time over graph time of regions, each counted this many times; None for no regions."""
    timed = list(timed)
    graphs = sum(count * timing.graph for count, timing in timed)
    return sum(count * timing.eager for count, timing in timed) / graphs if graphs else None


def gain(
    kinds: Sequence[tuple[int, Sequence[Timing | None]]], call: CallTime | None, replays: bool = False
) -> Gain | None:
    """Return what a network gains, or None if nothing was timed.

    `kinds` has for each kind of region the number of its blocks and the timings of its graphs. `call` is the size that
    was called last; `replays` says that such calls are replayed without Python. An uncompiled call takes what the
    compiled one takes, with the blocks' own time exchanged. If blocks were timed at another size, or one kind has
    several graphs, the result speaks of the blocks only.
    """
    timed = [(blocks, timing) for blocks, timings in kinds for timing in timings if timing]
    own = speed_up(timed)
    if own is None:
        return None
    if call is None or any(len(timings) != 1 or not timings[0] for _, timings in kinds):
        return Gain(own, False)
    if any(timing.shape != call.shape for _, timing in timed):
        return Gain(own, False)
    graphs, eager = (sum(n * getattr(timing, way) for n, timing in timed) for way in ("graph", "eager"))
    if graphs > call.seconds and not replays:  # the machine was busier when blocks were timed
        return Gain(own, True)
    rest = max(call.seconds - graphs, 0.0)  # a replayed call can take less than its blocks one by one
    return Gain((rest + eager) / call.seconds, True)


def _fastest(call: Callable[[], Any], wait: Callable[[], None]) -> float:
    taken: list[float] = []
    while len(taken) < RUNS and sum(taken) < ENOUGH:
        wait()
        start = time.perf_counter()
        call()
        wait()
        taken.append(time.perf_counter() - start)
    return min(taken)


def _nothing() -> None: ...


@dataclass(frozen=True)
class CallTime:
    """What the latest calls of a network took, at one size."""

    method: str
    shape: tuple[int, ...]
    """The call's `call_size`."""
    seconds: float
    """The median."""
    calls: int
    brings_weights: bool = False
    """Whether these calls had weights brought to the device, which can take longer than all they compute."""


@dataclass
class _Size:
    seconds: deque[float] = field(default_factory=partial(deque, maxlen=MAX_KEPT))
    on_gpu: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=partial(deque, maxlen=MAX_KEPT))
    """Events at both ends of calls that the GPU may not have come to yet."""

    def drain_events(self) -> None:
        """Read what the GPU has done. Only on a thread that runs models: asking can spoil another one's capture."""
        while self.on_gpu and self.on_gpu[0][1].query():
            start, end = self.on_gpu.popleft()
            self.seconds.append(start.elapsed_time(end) / 1000)


class LatencyTracker:
    """Times the calls of a network, but for those in which something is compiled, loaded, checked or captured.

    On a GPU the time is the GPU's own, between two events: the host runs ahead of it, and nobody waits here.
    """

    def __init__(self) -> None:
        self._sizes: OrderedDict[tuple[str, tuple[int, ...], bool], _Size] = OrderedDict()
        self._lock = threading.Lock()

    @contextmanager
    def timed(
        self,
        method: str,
        args: tuple,
        kwargs: Mapping[str, Any],
        is_left_out: Callable[[], bool] = lambda: False,
        device: torch.device | None = None,
        brings_weights: bool = False,
    ) -> Iterator[None]:
        """Time the call inside the block, unless `is_left_out` says at the end that others of its size are not like it.

        `device` is where a call without tensors does its work. Calls that bring weights have figures of their own.
        """
        first = next(_tensors_in((*args, *kwargs.values())), None)
        device = device if first is None else first.device
        shape = call_size(args, kwargs)  # a UNet empties lists of residuals
        start = None if device is None else _record_event(device)
        if start is None:
            yield
            return
        yield
        end = _record_event(device)
        if end is None or is_left_out():
            return
        with self._lock:
            size = self._size(method, shape, brings_weights)
            if isinstance(start, float):
                size.seconds.append(end - start)
            else:
                size.on_gpu.append((start, end))
                size.drain_events()

    def figures(self) -> list[CallTime]:
        """Return the figures of each size, the one called last at the end."""
        with self._lock:
            return [
                CallTime(method, shape, statistics.median(size.seconds), len(size.seconds), brings_weights)
                for (method, shape, brings_weights), size in self._sizes.items()
                if size.seconds
            ]

    def _size(self, *key: Any) -> _Size:
        size = self._sizes.setdefault(key, _Size())
        self._sizes.move_to_end(key)
        while len(self._sizes) > MAX_SIZES:
            self._sizes.popitem(last=False)
        return size


def call_size(args: tuple, kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return what the figures of a call are kept by: the shape of its first tensor, and about how large the others are.

    A reference image or the residuals of a ControlNet are much more work, a few words more are not.

    A text encoder is called without tensors: with rows of tokens for each of its networks. Its work depends on their
    number and lengths, on whether words have weights (ComfyUI then encodes an empty text as well), on images among the
    tokens, and on numbers that come with them, such as how many tokens to generate.
    """
    tensors = list(_tensors_in((*args, *kwargs.values())))
    if tensors:
        first, *others = tensors
        return (*first.shape, *(round(STEPS_PER_DOUBLING * math.log2(max(1, other.numel()))) for other in others))
    given = (value.values() for value in (*args, *kwargs.values()) if isinstance(value, Mapping))
    return tuple(chain.from_iterable(map(_size_of_prompt, chain.from_iterable(given))))


def _size_of_prompt(value: Any) -> Iterator[int]:
    """Yield what tells rows of tokens from others, or the whole numbers of a mapping."""
    if isinstance(value, Mapping):
        yield from (number for number in value.values() if isinstance(number, int))
    elif isinstance(value, list):
        rows = [row for row in value if isinstance(row, list)]
        tokens = [token for row in rows for token in row if isinstance(token, tuple) and len(token) > 1]
        yield from (len(value), max(map(len, rows), default=0), any(weight != 1.0 for _, weight, *_ in tokens))
        seen = (part for token, *_ in tokens if isinstance(token, Mapping) for part in token.values())
        yield from chain.from_iterable(part.shape for part in seen if isinstance(part, torch.Tensor))


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield tensors, those of lists, and those of lists in a mapping, such as a ControlNet's residuals."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors_in(each for each in value.values() if isinstance(each, (list, tuple)))
        elif isinstance(value, (list, tuple)):
            yield from (each for each in value if isinstance(each, torch.Tensor))


def _record_event(device: torch.device) -> float | torch.cuda.Event | None:
    """Return the moment that a device has come to, or None if there is no telling."""
    if device.type == "cpu":
        return time.perf_counter()
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
