"""The method by which a host enters a network, replaced so that its regions run compiled while a call lasts.

Forwards that are put into place for the length of a call need not be taken out by anybody else. A host that
undoes patches path by path would put things back into whatever stands at a path by then, and another
extension may have put a block of its own there.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .dispatch import eagerly
from .sampling import EachCall, Sampling
from .untouched import turns

if TYPE_CHECKING:
    from .dispatch import RegionForward
    from .model import CompiledModel
    from .recordings import Recordings

log = logging.getLogger(__name__)

OVERFLOWED = "a compiled image with values that are not finite, made again eagerly"


class Entrance:
    """Takes the place of a network's method; remembers, per thread, the arguments of the running call."""

    package = "compiled_graphs"
    """Marks a patch as ours for another copy of this package, whatever its modules are called."""
    stands_in = True
    """Told from what belongs to the network, also by another copy of this package."""

    def __init__(self, network: nn.Module, method: str, inner: Callable | None) -> None:
        self._network = weakref.ref(network)
        self._cls = type(network)
        self.method = method
        self.inner = inner
        """What somebody else had put in the method's place, or None for the class's own."""
        self.compiled: CompiledModel | None = None
        """What it was installed with, for those who hold only the network."""
        self.recordings: Recordings | None = None
        """If set, serves calls that repeat without Python."""
        self.on_call: Callable[[], None] = lambda: None
        self.sampling: Sampling = EachCall()
        """Tells whether this call is one of a sampling whose network was looked at already."""
        self._running = threading.local()
        self._forwards: dict[str, RegionForward] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # whoever traces this compiles the blocks as well
            return self._call_network(*args, **kwargs)
        outer = self.running_call()
        self._running.call = (args, kwargs)
        self.on_call()
        try:
            is_watched = self._look()
            with (
                turns.shared(),
                self.compiled.pace.timed(self.method, args, kwargs) if self.compiled else nullcontext(),
            ):
                if self.recordings is not None and not is_watched:
                    return self.recordings.serve(self._call_compiled, args, kwargs)
                return self._call_compiled(*args, **kwargs)
        finally:
            self._running.call = outer

    def _look(self) -> bool:
        """Before a sampling, see whether the network is still what its graphs were made of.

        Returns whether a block of this call is compared with eager.
        """
        if self.compiled is None:
            return False
        if not self.sampling.is_known():
            has_changed = self.compiled.follow()
            if self.recordings is not None:
                self.recordings.forget() if has_changed else self.recordings.look()
            self.sampling.note()
        return self.compiled.watch_over()

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
        """Put these forwards in the place of the network's blocks, by path, whenever it is called."""
        self._forwards = dict(forwards)

    def _install_forwards(self, installed: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        """Add the attributes of each block, and the `forward` among them that was there before, if any."""
        for forward in self._forwards.values():
            module = forward.module()
            if module is None:  # replaced, and gone
                continue
            before = module.__dict__.get("forward")
            if before is None or getattr(before, "__func__", None) is type(module).forward:
                installed.append((module.__dict__, {} if before is None else {"forward": before}))
                module.__dict__["forward"] = forward

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable:
        """A copy of the network is nobody's yet."""
        twin = memo.get(id(self._network()))
        return self if twin is None else MethodType(getattr(type(twin), self.method), twin)

    def __reduce__(self) -> tuple:
        """Pickle as what was there before: whoever loads the network has one that is not compiled."""
        return getattr, (self._network(), self.method)

    def network(self) -> nn.Module | None:
        """Return the network, or None if it is gone."""
        return self._network()

    def running_call(self) -> tuple[tuple, dict[str, Any]] | None:
        """Return the arguments of this thread's running call."""
        return getattr(self._running, "call", None)

    def _enter(self, *args: Any, **kwargs: Any) -> Any:
        return self._call_network(*args, **kwargs)

    def _call_network(self, *args: Any, **kwargs: Any) -> Any:
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return getattr(self._cls, self.method)(self._network(), *args, **kwargs)


class CodingEntrance(Entrance):
    """A VAE's way in: a graph that overflows where eager does not must not make a black image."""

    def __init__(self, network: nn.Module, method: str, inner: Callable | None) -> None:
        super().__init__(network, method, inner)
        self.on_broken: Callable[[str], None] = lambda line: None
        """Told when what the graphs gave had to be made again."""

    def _enter(self, *args: Any, **kwargs: Any) -> Any:
        device = next(leaf.device for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        drawn = _random_state(device)
        result = super()._enter(*args, **kwargs)
        if _is_finite(result):
            return result
        _restore_random_state(device, drawn)  # an encoder may sample, and then draws what it drew before
        with eagerly(OVERFLOWED):
            again = super()._enter(*args, **kwargs)
        if _is_finite(again):
            log.warning("A VAE's graphs gave values that are not finite, and eager ones did not; they are eager's now.")
            self.on_broken(f"eager: {OVERFLOWED}")
        return again


def _is_finite(result: Any) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor))


def _random_state(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _restore_random_state(device: torch.device, state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
