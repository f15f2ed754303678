"""Replaces the method by which a host calls a network, so that its regions run compiled during the call.

The regions' forwards are installed only for the length of a call, so that nobody else has to remove them. A host
that undoes patches by their paths would restore a forward on whatever module stands at a path by then, and that
may be another extension's block.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..common.random_state import saved_random_numbers
from ..common.reason import Reason, ReasonCode
from ..common.timing import LatencyTracker, call_size
from ..common.torch_compat import pytree
from ..tracing.call_lock import call_lock
from ..tracing.shape_discovery import ModelCall
from .compiled_model import CompiledModel
from .region_forward import RegionForward, eagerly
from .running_call import RunningCall, entered
from .sampling import EachCall, Sampling
from .speed_trial import SpeedTrial
from .step_replay import StepReplay

log = logging.getLogger(__name__)

Repeat = Callable[[nn.Module, str, tuple, Mapping[str, Any]], ModelCall | None]
"""Makes of a running call (network, method, arguments) what makes it again at other sizes."""

OVERFLOWED = Reason(ReasonCode.NOT_FINITE)
MAX_OVERFLOWS = 3
"""After so many images one after the other that were made twice, they are made eagerly at once."""


class NetworkWrapper:
    """Takes the place of a network's method. Each call of it is the running call of its thread."""

    package = "compiled_graphs"
    """Marks a patch as ours for another copy of this package, whatever its modules are called."""
    stands_in = True
    """Marks the object as our stand-in, which another copy of this package recognises too."""

    def __init__(
        self,
        network: nn.Module,
        method: str,
        inner: Callable | None,
        compiled: CompiledModel,
        repeat: Repeat = lambda network, method, args, kwargs: None,
    ) -> None:
        """`inner` is what somebody else had put in the method's place, or None for the class's own.

        `repeat` makes of a running call what makes it again at other sizes, so that what it misses can be compiled.
        """
        self._network = weakref.ref(network)
        self._cls = type(network)
        self.method = method
        self.inner = inner
        self.compiled = compiled
        """The compiled model that this wrapper serves, for callers that hold only the network."""
        self._repeat = repeat
        self.step_replay: StepReplay | None = None
        """If set, replays repeated calls as CUDA graphs, without Python."""
        self.speed_trial: SpeedTrial | None = None
        """If set, has calls made uncompiled where compiled ones are slower."""
        self.device: torch.device | None = None
        """Where the network runs, for calls without tensors."""
        self.on_call: Callable[[], None] = lambda: None
        """Called before each call of the network."""
        self.on_setup: Callable[[], None] = lambda: None
        """Called after a call that compiled, loaded, checked or captured something. For a network of no
        sampling also when it is decided how its calls are made."""
        self.sampling: Sampling = EachCall()
        """Tells whether this call belongs to a sampling whose network was checked already."""
        self._forwards: dict[str, RegionForward] = {}
        self._has_changed_inside = False
        """Whether code inside of the last call had changed the network."""
        self._told: float | None = None
        """The measured gain that the node showed last."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # torch.compile, which traces this call, compiles the blocks as well
            return self._call_network(*args, **kwargs)
        if self.speed_trial is not None:
            if isinstance(self.sampling, EachCall):
                self._decide_between_calls(self.speed_trial)
            if self.speed_trial.runs_eagerly:
                return self._call_eagerly(self.speed_trial, args, kwargs)
        size = call_size(args, kwargs)
        call = RunningCall(self.compiled, lambda: self._repeat(self._network(), self.method, args, kwargs), size)
        if self.compiled.host.runs_inside(self._context_in(kwargs)):
            call.on_pass = partial(self._look_inside, call)
        with entered(call):
            self.on_call()
            untypical = partial(self._is_untypical, call, kwargs)
            timed = self._timed(self.compiled.latency, args, kwargs, untypical)
            with call_lock.shared():  # a trace on another thread replaces values for a while: those are no changes
                has_check = self._refresh()
                with self.compiled.host.without_allocation_scopes(), timed:
                    result = self._call_with_weights(call, args, kwargs, has_check)
            self.compiled.note_call(call)
            if call.had_setup:
                self.on_setup()
            return result

    def _call_eagerly(self, trial: SpeedTrial, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Make a call as if nothing were compiled, and time it."""
        self.on_call()
        self.compiled.counters.add_eager(trial.reason)
        with (
            call_lock.shared(),
            self._timed(trial.latency, args, kwargs, lambda: not self._is_comparable(kwargs)),
        ):
            return self._call_network(*args, **kwargs)

    def _timed(
        self, pace: LatencyTracker, args: tuple, kwargs: Mapping[str, Any], is_left_out: Callable[[], bool]
    ) -> AbstractContextManager[None]:
        # A network that is called once a prompt has its weights brought for one call and not for the next.
        brings_weights = isinstance(self.sampling, EachCall) and not self.compiled.weights.are_there
        return pace.timed(self.method, args, kwargs, is_left_out, self.device, brings_weights)

    def _decide_between_calls(self, trial: SpeedTrial) -> None:
        """Decide how a call that belongs to no sampling is made, by the calls before it."""
        self.end_sampling()
        if trial.factor != self._told:  # another node on the same VAE may have decided
            self._told = trial.factor
            self.on_setup()

    def end_sampling(self) -> None:
        """Decide whether the calls of the next sampling are compiled, if there is a choice.

        A doubt comes from the timed blocks of all methods, the decision from whole calls of this one.
        """
        if self.speed_trial is None:
            return
        is_final = not self._is_busy() and (self.step_replay is None or self.step_replay.is_settled)
        gain = self.compiled.gain() if is_final else None
        had_fallen_back = self.speed_trial.has_fallen_back
        self.speed_trial.end_sampling(
            gain, [each for each in self.compiled.latency.figures() if each.method == self.method]
        )
        if self.speed_trial.has_fallen_back and not had_fallen_back and self.step_replay is not None:
            self.step_replay.drop_captures()

    def _call_with_weights(self, call: RunningCall, args: tuple, kwargs: Mapping[str, Any], has_check: bool) -> Any:
        """Make a call while its weights are kept in place. One that runs out of memory is made again without that."""
        weights, size = self.compiled.weights, _size_of(args, kwargs)
        context = self._context_in(kwargs)
        again = _own_containers((args, kwargs | dict.fromkeys(context)))  # a UNet empties lists of residuals
        try:
            with weights.running(size):
                return self._call_or_replay(call, args, kwargs, has_check)
        except torch.cuda.OutOfMemoryError:
            if not weights.give_way(size):
                raise
        args, kwargs = again
        with weights.running(size):
            return self._call_or_replay(call, args, kwargs | context, has_check)

    def _call_or_replay(self, call: RunningCall, args: tuple, kwargs: Mapping[str, Any], has_check: bool) -> Any:
        if self.step_replay is None or has_check:
            return self._call_compiled(*args, **kwargs)
        self.step_replay.counters = self.compiled.counters
        return self.step_replay.serve(self._call_compiled, args, kwargs, call)

    def _is_untypical(self, call: RunningCall, kwargs: Mapping[str, Any]) -> bool:
        """Whether another call of its size takes more or less: something was set up or left out, or compiled beside."""
        return call.had_setup or self._is_busy() or not self._is_comparable(kwargs)

    def _is_comparable(self, kwargs: Mapping[str, Any]) -> bool:
        return self.compiled.host.is_comparable(self._context_in(kwargs))

    def _is_busy(self) -> bool:
        """Whether graphs are compiled beside the calls."""
        background = self.compiled.background
        return background is not None and background.is_busy

    def _context_in(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return {name: kwargs[name] for name in self.compiled.host.context_arguments & kwargs.keys()}

    def _refresh(self) -> bool:
        """Before a sampling, check whether the network has changed since its graphs were made.

        Returns whether a block of this call is compared with eager.
        """
        if not self.sampling.covers_call() or self._has_changed_inside:
            self._has_changed_inside = False
            self.compiled.weights.follow()
            has_changed = self.compiled.refresh()
            if self.step_replay is not None:
                self.step_replay.drop_and_revalidate() if has_changed else self.step_replay.drop_if_changed()
            self.sampling.note()
        return self.compiled.schedule_check()

    def _look_inside(self, call: RunningCall) -> None:
        """Check once more before the first block: what runs inside of the call may have changed the network by then."""
        if self.compiled.refresh(is_inside=True):
            self._has_changed_inside = call.had_setup = True
            if self.step_replay is not None:
                self.step_replay.drop_and_revalidate()

    def _call_compiled(self, *args: Any, **kwargs: Any) -> Any:
        installed: list[tuple[dict[str, Any], dict[str, Any]]] = []
        try:
            self._install_forwards(installed)
            return self._enter(*args, **kwargs)
        finally:
            for attributes, before in installed:
                attributes.pop("forward", None)
                attributes.update(before)

    def install_while_running(self, forwards: Mapping[str, RegionForward]) -> None:
        """Install these forwards, by the path of their block, during each call of the network."""
        self._forwards = dict(forwards)

    def _install_forwards(self, installed: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        """Install the forwards. Appends each block's attributes, and a `forward` of its own, to `installed`."""
        for forward in self._forwards.values():
            module = forward.module()
            if module is None:  # the block was replaced and freed
                continue
            before = module.__dict__.get("forward")
            if before is None or getattr(before, "__func__", None) is type(module).forward:
                installed.append((module.__dict__, {} if before is None else {"forward": before}))
                module.__dict__["forward"] = forward

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable:
        """Return the plain method for a copy of the network, which is not compiled."""
        copied = memo.get(id(self._network()))
        return self if copied is None else MethodType(getattr(type(copied), self.method), copied)

    def __reduce__(self) -> tuple:
        """Pickle as the method that was replaced, so that a loaded network is not compiled."""
        return getattr, (self._network(), self.method)

    def network(self) -> nn.Module | None:
        """Return the network, or None if it is gone."""
        return self._network()

    def _enter(self, *args: Any, **kwargs: Any) -> Any:
        return self._call_network(*args, **kwargs)

    def _call_network(self, *args: Any, **kwargs: Any) -> Any:
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return getattr(self._cls, self.method)(self._network(), *args, **kwargs)


class VAEWrapper(NetworkWrapper):
    """The wrapper of a VAE. A graph may overflow where eager code does not, and must not make a black image."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.on_broken: Callable[[Reason], None] = lambda reason: None
        """Called with the reason when an image had to be made again eagerly."""
        self._overflows: Counter[torch.dtype] = Counter()
        """Results one after the other that were not finite, by the dtype of the calls."""

    def _enter(self, *args: Any, **kwargs: Any) -> Any:
        first = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        device, dtype = first.device, first.dtype
        if self._overflows[dtype] >= MAX_OVERFLOWS:
            with eagerly(OVERFLOWED):
                return super()._enter(*args, **kwargs)
        draw_again = saved_random_numbers(device)
        result = super()._enter(*args, **kwargs)
        if _is_finite(result):
            self._overflows[dtype] = 0
            return result
        self._overflows[dtype] += 1
        draw_again()  # an encoder may sample
        with eagerly(OVERFLOWED):
            again = super()._enter(*args, **kwargs)
        if _is_finite(again):
            log.warning("A VAE's graphs returned values that are not finite; eager code did not, so its image is used.")
            self.on_broken(OVERFLOWED)
        return again


def _size_of(args: tuple, kwargs: Mapping[str, Any]) -> int:
    return sum(value.numel() for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))


def _own_containers(value: Any, depth: int = 4) -> Any:
    """Return a value with lists and dictionaries of its own, down to those within arguments of a call."""
    if depth and type(value) in (list, tuple):
        return type(value)(_own_containers(item, depth - 1) for item in value)
    if depth and type(value) is dict:
        return {key: _own_containers(item, depth - 1) for key, item in value.items()}
    return value


def _is_finite(result: Any) -> bool:
    """Whether a result has neither infinite values nor NaN.

    The extremes show both. To find them takes one pass: `isfinite` of a video on the CPU took 0.2 s, and more memory.
    """
    tensors = (leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))
    return all(_has_finite_extremes(t) for t in tensors if t.is_floating_point() and t.numel())


def _has_finite_extremes(tensor: torch.Tensor) -> bool:
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())
