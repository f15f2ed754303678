"""Whole calls of a network (steps), captured once per size as a CUDA graph and replayed.

A step of a diffusion model is a thousand small kernels, and Python issues them more slowly than a fast GPU runs
them. A CUDA graph issues all of them at once. It also freezes what Python decided during the capture, and every
address: so a step is replayed only while the network, its weights and everything its code can look up are what they
were.

A size passes through three states. The first undisturbed call is noted (`_Seen`). The second is compared with a
capture of itself. From then on calls are replayed (`_Captured`), or made as they come (`_NotCaptured`).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..common.compare import disagreement
from ..common.counters import Counters
from ..common.devices import current
from ..common.host import Host
from ..common.reason import Reason, ReasonCode, Unsupported, reason_of
from ..common.tensors import empty_like, tensors_in
from ..common.torch_compat import float32_precisions, foreach_copy, pytree
from ..common.weight_source import NetworkWeights, ResidentWeights
from ..compile_cache.graph_cache import CacheEntry
from ..identity.call_signature import ContextArguments
from ..identity.fingerprint import network_code
from ..identity.watch import Watch
from ..tracing.call_lock import call_lock
from .cuda_graph import Capture, Replayable, capture_on_gpu, captures_borrow_memory, return_lent_memory
from .guards import Changed, ModuleGuard, TensorGuard
from .running_call import RunningCall
from .sync_detector import SyncDetector

log = logging.getLogger(__name__)

MIN_STEPS = 8
"""Shorter samplings are not captured if captures last for one sampling: a capture costs two or three steps."""
MAX_CAPTURES = 4
"""Sizes that are captured, which share their memory. Where areas bring more sizes to a sampling, those are called."""


@dataclass(frozen=True)
class _Seen:
    """One call of this size ran, and nothing in it happened for the first time or eagerly."""


@dataclass(frozen=True)
class _NotCaptured:
    """Calls of this size cannot be captured."""

    reason: Reason


@dataclass(frozen=True)
class _Captured:
    """A call of this size, ready to be replayed."""

    graph: Replayable
    inputs: list[torch.Tensor]
    result: Any

    def replay(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return what the call gives for these inputs.

        Raises RuntimeError if it finds no memory: others can have taken it since the sampling before.
        """
        foreach_copy(self.inputs, list(tensors))
        self.graph.replay()
        return pytree.tree_map_only(torch.Tensor, torch.clone, self.result)


class StepReplay:
    """Serves the calls of one network: as they come, or by replaying a capture."""

    def __init__(
        self,
        network: nn.Module,
        host: Host,
        device: torch.device,
        counters: Counters,
        capture: Capture = capture_on_gpu,
        weights: NetworkWeights | None = None,
    ) -> None:
        """Without `weights`, the network's modules hold them."""
        self._network = weakref.ref(network)
        self._host = host
        self.counters = counters
        """Of the model whose call is served: clones of a patcher share captures."""
        self._device = device
        self._weights = weights or ResidentWeights()
        self._capture = capture
        self._runs_first = False
        """Whether a call must run once on the stream that captures it (`Host.keeps_memory_for_streams`)."""
        self._context = ContextArguments(type(network), host.context_arguments)
        self._strings, _ = network_code(network, host)
        self._modules = ModuleGuard(network, host, in_place=True)
        self._tensors: TensorGuard | None = None
        """Set by the first call that could be captured."""
        self._watch: Watch | None = None
        """Of the whole network, set likewise: a capture holds what runs between blocks, too."""
        self._states: dict[Any, _Seen | _Captured | _NotCaptured] = {}
        """By a call's arguments."""
        self._validated: dict[Any, Any] = {}
        """The form of the result, by arguments whose capture once gave what the call gave."""
        self._used: set[Any] = set()
        """The arguments of this sampling's calls."""
        self._entries: set[CacheEntry] = set()
        """Region graphs that the captures contain."""
        self._pool: Any = None
        self.reason: Reason | None = None
        """Why the last call was not replayed; None if it was, or if nothing is known yet."""
        self.has_replayed = False

    def serve(self, call: Callable, args: tuple, kwargs: Mapping[str, Any], running: RunningCall) -> Any:
        """Return the result of a call, made or replayed."""
        if self._weights.places is None:  # captures wait for the weights to come back
            self.reason = Reason(ReasonCode.WEIGHTS_ELSEWHERE)
            return call(*args, **kwargs)
        try:
            key, tensors, steps = self._read(args, kwargs)
            self._drop_stale()
            self._used.add(key)
            state = self._states.get(key)
            result = _replayed(state, tensors) if isinstance(state, _Captured) else None
            # Only now, while the GPU works: a replay reads tensors that are in place and writes to its own.
            self._modules.check()
        except (Unsupported, Changed) as error:
            self.drop_and_revalidate()
            self.reason = error.reason if isinstance(error, Unsupported) else Reason(ReasonCode.MODULE_REPLACED)
            return call(*args, **kwargs)
        if isinstance(state, _Captured):
            self.counters.add("replays")
            self.reason = None
            self.has_replayed = running.was_replayed = True
            return result
        if steps < MIN_STEPS and not captures_borrow_memory(self._device):
            self.reason = Reason(ReasonCode.FEW_STEPS, str(MIN_STEPS))
            return call(*args, **kwargs)
        if state is None:
            return self._call_first(key, call, args, kwargs, running)
        if isinstance(state, _Seen):
            running.had_setup = True
            return self._call_and_capture(key, call, args, kwargs, running)
        return call(*args, **kwargs)

    @property
    def is_settled(self) -> bool:
        """Whether calls are made as longer samplings will make them: replayed, or never to be."""
        reason = self.reason
        return self.has_replayed or (reason is not None and reason.code is not ReasonCode.FEW_STEPS)

    def drop_if_changed(self) -> None:
        """Before a sampling, drop captures of what the network is no longer."""
        if self._watch is not None and not self._watch.holds():
            self.drop_and_revalidate()

    def end_sampling(self) -> None:
        """Give back the memory that captures work in, at the end of a sampling; without it some cannot go on."""
        self._used.clear()
        if not captures_borrow_memory(self._device):
            self.drop_captures()
            return
        # Sizes that could not be captured are tried again.
        self._states = {key: state for key, state in self._states.items() if not isinstance(state, _NotCaptured)}
        if self._states:
            return_lent_memory(self._device)

    def drop_and_revalidate(self) -> None:
        """Drop all captures, and have the next ones watched and compared again.

        Other code may run by now, and wait for the GPU. Where memory is lent, no process survives a capture of that.
        """
        self.drop_captures()
        self._validated.clear()

    def drop_captures(self) -> None:
        """Drop all captures."""
        has_captured = self._pool is not None
        if has_captured:
            self._wait()
        self._states.clear()
        self._entries.clear()
        self._tensors = self._watch = self._pool = None
        if has_captured and captures_borrow_memory(self._device):
            return_lent_memory(self._device)

    def _read(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Any, list[torch.Tensor], int]:
        """Return what tells this call from others, its tensors, and how many steps its sampling has.

        Raises Unsupported if it is not to be captured.
        """
        if torch.is_grad_enabled():
            raise Unsupported(ReasonCode.GRADIENTS)
        if torch.is_autocast_enabled(self._device.type):
            raise Unsupported(ReasonCode.AUTOCAST)
        context = self._context.of(args, kwargs)
        if reason := self._host.capture_blocker(context, self._strings):
            raise Unsupported.of(reason)
        token, tensors = self._context.token(args, kwargs)
        if any(t.device != self._device for t in tensors):
            raise Unsupported(ReasonCode.INPUT_DEVICE)
        return (*token, _arithmetic()), tensors, self._host.steps(context)

    def _drop_stale(self) -> None:
        if not self._states:
            return
        has_graphs = not any(entry.is_out for entry in self._entries)
        if self._tensors is None or not has_graphs or not self._tensors.has_same_attributes:
            self.drop_and_revalidate()
        elif not self._tensors.holds():
            self.drop_captures()

    def _call_first(
        self, key: Any, call: Callable, args: tuple, kwargs: Mapping[str, Any], running: RunningCall
    ) -> Any:
        """Make a call of a new size, and note it if nothing in it happened for the first time or eagerly."""
        result = call(*args, **kwargs)
        if not (running.had_setup or running.is_eager_in_part) and self._has_room():
            self._states[key] = _Seen()
            self._entries |= running.entries
            self._tensors = self._tensors or TensorGuard(self._network(), self._host, self._device, self._weights)
            if self._watch is None:  # other code may look up other options
                self._strings, self._watch = network_code(self._network(), self._host)
            self.reason = None if self._tensors.is_usable else Reason(ReasonCode.WEIGHTS_ELSEWHERE)
        return result

    def _has_room(self) -> bool:
        """Make room for one more capture, if need be in the place of one that this sampling has not used."""
        unused = next((key for key in self._states if key not in self._used), None)
        if len(self._states) >= MAX_CAPTURES and unused is not None:
            self._wait()
            del self._states[unused]
        return len(self._states) < MAX_CAPTURES

    def _wait(self) -> None:
        """Before memory is taken from what may still run."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _call_and_capture(
        self, key: Any, call: Callable, args: tuple, kwargs: Mapping[str, Any], running: RunningCall
    ) -> Any:
        """Return the result of a call, and keep a capture of it if that gives the same."""
        own = _OwnArguments(args, kwargs, self._is_context)  # first: a call empties lists of residuals that it is given
        form = self._validated.get(key)
        expected, error = (None, None) if form is not None else self._watched(call, args, kwargs)
        try:
            if error is None:
                captured = self._captured(call, own, expected if form is None else form)
                result = captured.replay([t.clone() for t in captured.inputs])
                error = None if form is not None else _difference(result, expected)
        except Exception as raised:  # too little memory, what only CUDA knows: it can still be called
            if self._host.is_cancellation(raised):
                raise
            error = reason_of(raised)
        if error is None:
            self.counters.add("captures")
            self._validated[key] = pytree.tree_map_only(torch.Tensor, _without_data, result)
            self._states[key] = captured
            self._entries |= running.entries
            return result
        log.info("Steps of %s run without a CUDA graph: %s", type(self._network()).__name__, error)
        self._states[key], self.reason = _NotCaptured(error), error
        return expected if form is None else call(*args, **kwargs)

    def _watched(self, call: Callable, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Any, Reason | None]:
        """Make a call; return its result, and what keeps it from being captured."""
        with SyncDetector(self._device, self._host) as watch:
            result = call(*args, **kwargs)
        self._runs_first = self._runs_first or watch.runs_first
        if watch.found:
            return result, Reason(ReasonCode.WAITS_FOR_GPU, watch.found)
        return result, Reason(ReasonCode.UNSAFE_TO_CAPTURE, watch.unsafe) if watch.unsafe else None

    def _captured(self, call: Callable, own: _OwnArguments, form: Any) -> _Captured:
        """Return a capture of a call whose result has this form."""
        result = pytree.tree_map_only(torch.Tensor, self._allocate, form)

        def fill() -> None:
            for target, source in zip(tensors_in(result), tensors_in(own.call(call)), strict=True):
                target.copy_(source)

        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else ()
        capture = partial(self._capture, runs_first=True) if self._runs_first else self._capture
        # A capture clears caches that calls on other GPUs work with. A run before it may not take pages either.
        with current(self._device), call_lock.exclusive(), self._weights.capturing():
            return _Captured(capture(fill, self._pool), own.tensors, result)

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self._device)

    def _is_context(self, place: int | str) -> bool:
        return place in self._context.places or place in self._context.names


def _difference(result: Any, expected: Any) -> Reason | None:
    text = disagreement(tensors_in(result), tensors_in(expected))
    return Reason(ReasonCode.CAPTURE_DIFFERS, text.splitlines()[0]) if text else None


def _replayed(captured: _Captured, tensors: Sequence[torch.Tensor]) -> Any:
    try:
        return captured.replay(tensors)
    except RuntimeError as error:
        raise Unsupported.of(reason_of(error)) from error


class _OwnArguments:
    """A call's arguments with tensors and containers of their own."""

    def __init__(self, args: tuple, kwargs: Mapping[str, Any], is_context: Callable[[int | str], bool]) -> None:
        self.tensors: list[torch.Tensor] = []
        """In the order of `call_signature.describe`."""
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
            if 0 in value.stride():  # one number seen as many: nothing can be written to that
                own = torch.empty(value.shape, dtype=value.dtype, device=value.device)
            else:
                own = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        self.tensors.append(own.copy_(value))
        return own


def _arithmetic() -> tuple[Any, ...]:
    """Return torch's settings by which the same operator may run another kernel."""
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    return (
        *float32_precisions(),
        products.allow_fp16_reduced_precision_reduction,
        products.allow_bf16_reduced_precision_reduction,
        getattr(products, "allow_fp16_accumulation", None),
        convolutions.benchmark,
        convolutions.deterministic,
    )


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    return empty_like(tensor, torch.device("meta"))
