"""A GPU that is late, without a GPU: what is launched over streams runs later, in any order that they and events allow.

Code that forgets to wait for another stream is right most of the time on a real GPU. Here each seed stands for one
order, and a few of them suffice to make it wrong. Memory is not handed out again while something launched may use it,
so a missing `record_stream` stays unseen.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from vbar import VBAR, Stream

READ_BY_CPU = ("tolist", "numpy", "__array__")
"""Methods that read a tensor without an operator."""
SIZES_FROM_VALUES = ("nonzero", "masked_select", "unique", "_unique2", "repeat_interleave")
"""Operators whose result has a size that depends on values."""


class LateEvent:
    """Stands for `torch.cuda.Event`."""

    def __init__(self, gpu: LateGpu, enable_timing: bool = False) -> None:
        self._gpu = gpu
        self.mark: Mark | None = None

    def record(self, stream: LateStream | None = None) -> None:
        self.mark = (stream or self._gpu.current).mark()

    def query(self) -> bool:
        return self.mark is None or self.mark.is_passed

    def synchronize(self) -> None:
        self._gpu.run_until(self.query)

    def elapsed_time(self, _: LateEvent) -> float:
        return 1.0


class Mark:
    """A place in a stream."""

    def __init__(self) -> None:
        self.is_passed = False


class LateStream(Stream):
    """Stands for `torch.cuda.Stream`, and has the buffer of a stream of ComfyUI's."""

    __module__ = "torch.cuda"
    """Keys name what is torch's, and do not read it."""

    def __init__(self, gpu: LateGpu, device: torch.device | None = None) -> None:
        super().__init__()
        self.gpu = gpu
        self.launched: deque[Callable[[], None] | Mark] = deque()
        """What is to be done; a mark of another stream waits for that."""
        self.gpu.streams.append(self)

    def mark(self) -> Mark:
        mark = Mark()
        self.launched.append(lambda: setattr(mark, "is_passed", True))
        return mark

    def wait_stream(self, other: LateStream) -> None:
        if other is not self:
            self.launched.append(other.mark())

    def wait_event(self, event: LateEvent) -> None:
        if event.mark is not None:
            self.launched.append(event.mark)

    def record_event(self, event: LateEvent | None = None) -> LateEvent:
        event = event or LateEvent(self.gpu)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.gpu.run_until(lambda: not self.launched)

    def as_context(self, _: Stream) -> Any:
        return self.gpu.launching(self)

    @property
    def can_go_on(self) -> bool:
        return bool(self.launched) and (not isinstance(self.launched[0], Mark) or self.launched[0].is_passed)

    def step(self) -> None:
        task = self.launched.popleft()
        if not isinstance(task, Mark):
            task()


class LateGpu(TorchDispatchMode):
    """Runs operators when the CPU wants a value, and then in a random order of streams."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.streams: list[LateStream] = []
        self._chosen = random.Random(seed)
        self._pace: dict[int, float] = {}
        self.current = LateStream(self)
        self.failing: set[int] = set()
        """Which of the next allocations fail, among those within `short_of_memory`."""
        self._allocations = 0
        self._is_short = False
        self.before_allocation: Callable[[], None] | None = None

    @contextmanager
    def launching(self, stream: LateStream) -> Iterator[None]:
        outer, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = outer

    def short_of_memory(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, and in which operators find no memory."""

        def call(*args: Any, **kwargs: Any) -> Any:
            outer, self._is_short = self._is_short, True
            try:
                return function(*args, **kwargs)
            finally:
                self._is_short = outer

        return call

    def fail(self, allocations: Iterable[int]) -> None:
        """Have some of the next allocations fail, by their number from now."""
        self._allocations, self.failing = 0, set(allocations)

    def _allocate(self, function: Any) -> None:
        if not self._is_short or any(result.alias_info is not None for result in function._schema.returns):
            return
        if self.before_allocation is not None:
            self.before_allocation()
        self._allocations += 1
        if self._allocations in self.failing:
            self.failing.discard(self._allocations)
            raise torch.cuda.OutOfMemoryError("no room")

    def current_stream(self, _: torch.device | None = None) -> LateStream:
        return self.current

    def keeps_memory(self, _: LateStream) -> None:
        """What is launched keeps its tensors until it has run."""

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Run what was launched. Some streams are much slower than others for a while."""
        left = 0
        while not is_done():
            if not left:
                self._pace = {id(stream): self._chosen.choice((0.001, 0.1, 1.0)) for stream in self.streams}
                left = self._chosen.randrange(1, 200)
            left -= 1
            able = [stream for stream in self.streams if stream.can_go_on]
            assert able, "streams wait for each other"
            paces = [self._pace.get(id(stream), 1.0) for stream in able]
            with _disable_current_modes(), torch.inference_mode():
                self._chosen.choices(able, paces)[0].step()

    def synchronize(self) -> None:
        self.run_until(lambda: not any(stream.launched for stream in self.streams))

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        self._allocate(function)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        name = function.name().partition("::")[2].partition(".")[0]
        if not given or name == "set_" or "empty" in name:
            return function(*args, **kwargs)
        if _is_read(function, name, given):
            self.current.synchronize()
            return function(*args, **kwargs)
        if written := _written(function, args, kwargs):
            self.current.launched.append(lambda: function(*args, **kwargs))
            return _returned(function, written)
        made = function(*args, **kwargs)
        memory = {tensor.untyped_storage().data_ptr() for tensor in given}
        targets = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        if any(target.untyped_storage().data_ptr() in memory for target in targets if target.numel()):
            return made  # a view

        def make() -> None:
            again = [leaf for leaf in tree_leaves(function(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
            for target, value in zip(targets, again, strict=True):
                target.copy_(value)

        for target in targets:
            if target.is_floating_point():
                target.zero_()  # nobody may read it yet; as an index, zero is valid
        self.current.launched.append(make)
        return made


class _Reads(TorchFunctionMode):
    """Has the GPU finish before Python reads a tensor without an operator."""

    def __init__(self, gpu: LateGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if getattr(function, "__name__", "") in READ_BY_CPU:
            self._gpu.current.synchronize()
        return function(*args, **(kwargs or {}))


def _is_read(function: Any, name: str, given: list[torch.Tensor]) -> bool:
    has_other_results = any(
        str(result.type) in ("bool", "number", "int", "float") for result in function._schema.returns
    )
    has_mask = name == "index" and any(tensor.dtype is torch.bool for tensor in given[1:])
    return has_other_results or has_mask or name in SIZES_FROM_VALUES


def _written(function: Any, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Return the arguments that an operator writes to, by the names of their aliases."""
    found = {}
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            if value is not None:
                found[next(iter(argument.alias_info.before_set))] = value
    return found


def _returned(function: Any, written: dict[str, Any]) -> Any:
    results = function._schema.returns
    found = [written[next(iter(result.alias_info.before_set))] for result in results]
    return found[0] if len(found) == 1 else tuple(found) or None


@contextmanager
def late(gpu: LateGpu) -> Iterator[None]:
    """Have everything inside the block done by a late GPU; it is done at the end."""
    with gpu, _Reads(gpu):
        try:
            yield
        finally:
            gpu.synchronize()


def _current_stream(device: torch.device) -> Any:
    """Stands for ComfyUI's function, which knows no streams of a CPU. Keys hold its text, so it names no double."""
    return torch.cuda.current_stream(device)


@pytest.fixture
def late_gpu(vbar: VBAR, monkeypatch: pytest.MonkeyPatch) -> LateGpu:
    """A late GPU with the streams of ComfyUI's casts, whose pages are emptied once it has nothing to do."""
    import comfy.model_management as management
    from compiled_graphs.compiler.hosts.comfy import comfy_compat

    gpu = LateGpu(seed=0)
    device, streams = torch.device("cpu"), [LateStream(gpu), LateStream(gpu)]
    monkeypatch.setattr(comfy_compat, "has_streams", lambda device: True)
    # None of these is a function: keys hold the text of functions that replace torch's, and what they refer to.
    monkeypatch.setattr(torch.cuda, "Stream", partial(LateStream, gpu))
    monkeypatch.setattr(torch.cuda, "Event", partial(LateEvent, gpu))
    monkeypatch.setattr(torch.cuda, "stream", gpu.launching)
    monkeypatch.setattr(torch.cuda, "current_stream", gpu.current_stream)
    monkeypatch.setattr(torch.Tensor, "record_stream", gpu.keeps_memory)
    monkeypatch.setattr(management, "current_stream", _current_stream)
    monkeypatch.setattr(management, "NUM_STREAMS", len(streams))
    monkeypatch.setattr(management, "STREAMS", {device: streams})
    monkeypatch.setattr(management, "stream_counters", {device: 0})
    monkeypatch.setattr(management, "STREAM_AIMDO_CAST_BUFFERS", {stream: stream for stream in streams})
    monkeypatch.setattr(vbar, "wait", gpu.synchronize)
    return gpu
