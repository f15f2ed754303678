"""Whole calls of a network, recorded on the GPU once per size and replayed.

A step of a diffusion model is a thousand small kernels, and Python issues them more slowly than a fast GPU runs
them. A CUDA graph issues all of them at once. It also freezes what Python decided while it was recorded, and
every address: so a call is replayed only while the network, its weights and everything its code can look up are
what they were. With PyTorch's own allocator a recording lives no longer than one sampling, since memory that it
holds looks free to others. CUDA's asynchronous one, ComfyUI's default, lends it memory only while it runs.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import nn

from .counters import Counters, totals
from .errors import one_line
from .fingerprint import Describer
from .guards import Changed, ModuleGuard, TensorGuard
from .host import Host
from .signature import Unsupported, describe, forward_signature
from .torch_compat import (
    can_see_syncs,
    clear_cublas_workspaces,
    end_allocate_to_pool,
    foreach_copy,
    pytree,
    release_pool,
)
from .verify import disagreement
from .waits import WaitWatch
from .watch import Watch

log = logging.getLogger(__name__)

FEWEST_STEPS = 8
"""Of a sampling that its recordings end with: to make one takes as long as two or three steps."""
MAX_RECORDINGS = 4
"""Sizes that are recorded; where areas bring more to one sampling, those are called. They share their memory."""


class Recording(Protocol):
    """A call that has been recorded."""

    def replay(self) -> None:
        """Do again, to the same addresses, what was recorded."""
        ...


Record = Callable[[Callable[[], None], Any], Recording]
"""Records a call that leaves nothing behind but what it writes, into a pool of memory."""


def recordable(device: torch.device) -> bool:
    """Whether calls on a device can be recorded as CUDA graphs."""
    return device.type == "cuda" and torch.version.hip is None and can_see_syncs()


def is_lent_memory(device: torch.device) -> bool:
    """Whether recordings on a device hold memory only while they run."""
    return device.type == "cuda" and torch.cuda.get_allocator_backend() != "native"


def record_on_gpu(call: Callable[[], None], pool: Any) -> Recording:
    """Record a call as a CUDA graph. Raises what the call raises, or what CUDA says of code that cannot be recorded.

    All that is allocated while recording is freed while recording: with CUDA's asynchronous allocator, ComfyUI's
    default, what is left can be freed only once the graph has run, and to try it earlier ends the process.
    """
    graph, stream = torch.cuda.CUDAGraph(), _stream(torch.cuda.current_device())
    torch.cuda.synchronize()
    _clear_workspaces()
    torch.cuda.empty_cache()  # what lies idle elsewhere cannot be worked in
    collects = gc.isenabled()
    gc.disable()  # freeing other graphs is not allowed meanwhile
    try:
        with torch.cuda.stream(stream):
            # Other threads (previews, loading) may go on allocating.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                call()
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)
                raise
            finally:
                _clear_workspaces()
                graph.capture_end()
    except BaseException:
        _end_failed_capture(pool)
        raise
    finally:
        if collects:
            gc.enable()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


@lru_cache
def _stream(device: int) -> torch.cuda.Stream:
    """Return the stream that calls are recorded on: cuBLAS keeps a workspace for every stream it has seen."""
    return torch.cuda.Stream(device)


def _clear_workspaces() -> None:
    """Have cuBLAS allocate its workspace (32 MiB on an H200) in the recording's memory, or give it back there."""
    clear_cublas_workspaces()


def _end_failed_capture(pool: Any) -> None:
    """Tell the allocator and the random number generator that a capture is over.

    `CUDAGraph.capture_end` leaves both in it where CUDA refuses to end the capture; the generator would then
    refuse to draw numbers. A capture that succeeds sets it right.
    """
    device = torch.cuda.current_device()
    with suppress(RuntimeError, AttributeError):  # the first says so if the capture did end
        end_allocate_to_pool(device, pool)
        release_pool(device, pool)
    number = torch.zeros(1, device="cuda")
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        number.add_(1)
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)


def return_lent_memory(device: torch.device) -> None:
    """Give back what CUDA keeps for the next run of recordings whose memory is lent."""
    torch.cuda.synchronize(device)
    with suppress(OSError, AttributeError):  # a driver that has no such call keeps none either
        driver = ctypes.WinDLL("nvcuda.dll") if os.name == "nt" else ctypes.CDLL("libcuda.so.1")
        handle = ctypes.c_int()
        index = torch.cuda.current_device() if device.index is None else device.index
        driver.cuDeviceGet(ctypes.byref(handle), index)
        driver.cuDeviceGraphMemTrim(handle)


@dataclass(frozen=True)
class _Recorded:
    recording: Recording
    inputs: list[torch.Tensor]
    result: Any

    def replay(self, tensors: Sequence[torch.Tensor]) -> Any:
        foreach_copy(self.inputs, list(tensors))
        self.recording.replay()
        return pytree.tree_map_only(torch.Tensor, torch.clone, self.result)


class Recordings:
    """Serves the calls of one network: as they come, or from a recording."""

    def __init__(
        self,
        network: nn.Module,
        host: Host,
        counters: Counters,
        device: torch.device,
        record: Record = record_on_gpu,
        within: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`within` is what the graphs of the network's blocks have entered while they are recorded."""
        self._network = weakref.ref(network)
        self._host = host
        self._counters = counters
        self._device = device
        self._record = record
        self._within = within
        names = forward_signature(type(network)).parameters
        self._context_places = {i: name for i, name in enumerate(names) if name in host.context_arguments}
        self._strings = Describer(host).describe(network).strings
        self._modules = ModuleGuard(network, host)
        self._tensors: TensorGuard | None = None
        """From the first call on that could be recorded."""
        self._watch: Watch | None = None
        """Of the whole network, likewise: a recording holds what runs between blocks, too."""
        self._calls: dict[Any, _Recorded | str | None] = {}
        """By a call's arguments: a recording, why there is none, or that such a call ran undisturbed once."""
        self._proven: dict[Any, Any] = {}
        """By arguments whose recording gave what the call gave, in this sampling or an earlier one: the result,
        without data."""
        self._used: set[Any] = set()
        """The arguments of this sampling's calls."""
        self._pool: Any = None
        self._retired = 0
        self.reason = ""
        """Why the last call was not replayed; empty if it was, or if nothing is known yet."""

    def serve(self, call: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a call, made or replayed."""
        try:
            key, tensors, steps = self._read(args, kwargs)
            if self._calls and not self._is_unchanged():
                self.forget()
            self._used.add(key)
            known = self._calls.get(key, self)
            result = _replayed(known, tensors) if isinstance(known, _Recorded) else None
            # Only now, while the GPU works: a replay reads tensors that are in place and writes to its own.
            self._modules.check()
        except (Unsupported, Changed) as reason:
            self.forget()
            self.reason = str(reason) or "a module was replaced"
            return call(*args, **kwargs)
        if isinstance(known, _Recorded):
            self._counters.add("replays")
            self.reason = ""
            return result
        if steps < FEWEST_STEPS and not is_lent_memory(self._device):
            self.reason = f"fewer than {FEWEST_STEPS} steps"
            return call(*args, **kwargs)
        if known is self:
            return self._call_first(key, call, args, kwargs)
        if known is None:
            return self._call_recorded(key, call, args, kwargs)
        return call(*args, **kwargs)

    def look(self) -> None:
        """Before a sampling, drop recordings of what the network is no longer."""
        if self._watch is not None and not self._watch.holds():
            self.forget()

    def rest(self) -> None:
        """Give back the memory that recordings work in, at the end of a sampling; without it some cannot go on."""
        self._used.clear()
        if not is_lent_memory(self._device):
            self.forget()
            return
        self._calls = {key: call for key, call in self._calls.items() if not isinstance(call, str)}  # to be tried again
        if self._calls:
            return_lent_memory(self._device)

    def forget(self) -> None:
        """Drop all recordings."""
        has_recorded = self._pool is not None
        if has_recorded:
            self._wait()
        self._calls.clear()
        self._tensors = self._watch = self._pool = None
        if has_recorded and is_lent_memory(self._device):
            return_lent_memory(self._device)

    def _read(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Any, list[torch.Tensor], int]:
        """Return what tells this call from others, its tensors, and how many steps its sampling has.

        Raises Unsupported if it is not to be recorded.
        """
        names = self._host.context_arguments
        context = {name: args[i] for i, name in self._context_places.items() if i < len(args)}
        context |= {name: kwargs[name] for name in names & kwargs.keys()}
        if reason := self._host.unrepeatable(context, self._strings):
            raise Unsupported(reason)
        tensors: list[torch.Tensor] = []
        places = self._context_places
        key = (
            tuple([None if i in places else describe(value, tensors) for i, value in enumerate(args)]),
            tuple([(name, name in names or describe(value, tensors)) for name, value in kwargs.items()]),
            _arithmetic(),
        )
        if any(t.device != self._device for t in tensors):
            raise Unsupported("an input on another device")
        return key, tensors, self._host.steps(context)

    def _is_unchanged(self) -> bool:
        return totals.retired == self._retired and self._tensors is not None and self._tensors.holds()

    def _call_first(self, key: Any, call: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Make a call of a new size, and remember it if nothing in it happened for the first time or eagerly."""
        disturbances = self._disturbances()
        result = call(*args, **kwargs)
        if self._disturbances() == disturbances and self._has_room():
            self._calls[key] = None
            self._tensors = self._tensors or TensorGuard(self._network(), self._device)
            self._watch = self._watch or _watch_of(self._network(), self._host)
            self._retired = totals.retired
            self.reason = "" if self._tensors.is_usable else "weights that are not all on the GPU"
        return result

    def _has_room(self) -> bool:
        """Make room for one more recording, if need be in the place of one that this sampling has not used."""
        unused = next((key for key in self._calls if key not in self._used), None)
        if len(self._calls) >= MAX_RECORDINGS and unused is not None:
            self._wait()
            del self._calls[unused]
        return len(self._calls) < MAX_RECORDINGS

    def _wait(self) -> None:
        """Before memory is taken from what may still run."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _disturbances(self) -> tuple[float, ...]:
        counts = self._counters
        return counts.compiles, counts.verifications, counts.retired, counts.eager_calls.total()

    def _call_recorded(self, key: Any, call: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a call, and keep a recording of it if that gives the same."""
        own = _OwnArguments(args, kwargs, self._is_context)  # first: a call empties lists of residuals that it is given
        form = self._proven.get(key)
        expected, error = (None, None) if form is not None else self._watched(call, args, kwargs)
        try:
            if error is None:
                recorded = self._recorded(call, own, expected if form is None else form)
                result = recorded.replay([t.clone() for t in recorded.inputs])
                error = None if form is not None else disagreement(_tensors(result), _tensors(expected))
        except Exception as raised:  # too little memory, what only CUDA knows: it can still be called
            error = one_line(raised)
        if error is None:
            self._counters.add("recordings")
            self._proven[key] = pytree.tree_map_only(torch.Tensor, _without_data, result)
            self._calls[key] = recorded
            return result
        log.info("Steps of %s run without a CUDA graph: %s", type(self._network()).__name__, error)
        self._calls[key] = self.reason = error
        return expected if form is None else call(*args, **kwargs)

    def _watched(self, call: Callable, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Any, str | None]:
        """Make a call; return its result, and what keeps it from being recorded."""
        with WaitWatch(self._device) as watch:
            result = call(*args, **kwargs)
        return result, f"the model waits for the GPU within a step ({watch.found})" if watch.found else None

    def _recorded(self, call: Callable, own: _OwnArguments, form: Any) -> _Recorded:
        """Return a recording of a call whose result has this form."""
        result = pytree.tree_map_only(torch.Tensor, self._allocate, form)

        def fill() -> None:
            for target, source in zip(_tensors(result), _tensors(own.call(call)), strict=True):
                target.copy_(source)

        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else ()
        device = torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
        with device, self._within():
            return _Recorded(self._record(fill, self._pool), own.tensors, result)

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self._device)

    def _is_context(self, place: int | str) -> bool:
        return place in self._context_places or place in self._host.context_arguments


def _watch_of(network: nn.Module, host: Host) -> Watch:
    describer = Describer(host)
    describer.describe(network)
    return describer.watch


def _replayed(recorded: _Recorded, tensors: Sequence[torch.Tensor]) -> Any:
    """Return what a recording gives for these inputs.

    Raises Unsupported if it finds no memory: others can have taken it since the sampling before.
    """
    try:
        return recorded.replay(tensors)
    except RuntimeError as error:
        raise Unsupported(one_line(error)) from error


class _OwnArguments:
    """A call's arguments with tensors and containers of their own."""

    def __init__(self, args: tuple, kwargs: Mapping[str, Any], is_context: Callable[[int | str], bool]) -> None:
        self.tensors: list[torch.Tensor] = []
        """In the order of `signature.describe`."""
        self._is_context = is_context
        self._args = [self._fill(place, value, self._own) for place, value in enumerate(args)]
        self._kwargs = {name: self._fill(name, value, self._own) for name, value in kwargs.items()}

    def call(self, function: Callable) -> Any:
        """Call with these tensors, in containers that the call may change."""
        args = [self._fill(place, value, lambda t: t) for place, value in enumerate(self._args)]
        kwargs = {name: self._fill(name, value, lambda t: t) for name, value in self._kwargs.items()}
        return function(*args, **kwargs)

    def _fill(self, place: int | str, value: Any, tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        if self._is_context(place):
            return dict(value) if isinstance(value, dict) else value
        return pytree.tree_map_only(torch.Tensor, tensor, value)

    def _own(self, value: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(False):  # so that any mode may fill it
            own = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        self.tensors.append(own.copy_(value))
        return own


def _arithmetic() -> tuple[Any, ...]:
    """Return torch's settings by which the same operator may run another kernel."""
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    return (
        products.allow_tf32,
        products.allow_fp16_reduced_precision_reduction,
        products.allow_bf16_reduced_precision_reduction,
        getattr(products, "allow_fp16_accumulation", None),
        convolutions.allow_tf32,
        convolutions.benchmark,
        convolutions.deterministic,
    )


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
