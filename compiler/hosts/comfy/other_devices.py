"""Compiles the copies of a patcher that ComfyUI makes for other devices.

Core's MultiGPU CFG Split and its Select nodes make a copy of a patcher whose network is another one, with weights of
its own (`ModelPatcher.deepclone_multigpu`), and the split makes the copy's patcher anew before each sampling
(`match_multigpu_clones`). A wrapper of ours runs one network only. So what is compiled for a network is remembered
with the network, and put into each patcher that runs it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from ...common.words import Words, join, say
from ...tracing.call_lock import call_lock
from . import comfy_compat
from .coexistence import CALLBACKS_KEY, foreign_forward, take_ours_out

T = TypeVar("T")
CPU = torch.device("cpu")
_ON_ANOTHER_DEVICE = say("The copy of this model on another device runs uncompiled.")
_WITHOUT_STREAMING = say(
    "ComfyUI samples a copy of this model without dynamic VRAM, as it does for LoRA hooks. The copy runs uncompiled."
)


@dataclass(frozen=True)
class Uncompiled:
    """A copy that runs as it is."""

    reason: Words


@dataclass(frozen=True)
class Steps(Generic[T]):
    """How a network is compiled; T is what is compiled for one."""

    compile: Callable[[Any], T | Uncompiled]
    """Compiles the network of a patcher."""
    put_in: Callable[[Any, T], None]
    """Puts what was compiled for a network into a patcher that runs it."""
    leave: Callable[[Any], None]
    """Leaves a patcher's network uncompiled, beside others on other devices."""


class OtherDevices(Generic[T]):
    """Follows one compiled patcher to the devices that ComfyUI copies it to. Holds the networks weakly."""

    def __init__(self, steps: Steps[T] | None, network: Callable[[Any], nn.Module], tell: Callable[[], None]) -> None:
        """Without `steps`, copies run uncompiled. `network` returns a patcher's; `tell` tells how things stand."""
        self._steps = steps
        self._network = network
        self._tell = tell
        self._known: weakref.WeakKeyDictionary[nn.Module, T | Uncompiled] = weakref.WeakKeyDictionary()
        self._reasons: dict[str, Words] = {}
        """By device: why a copy runs uncompiled there."""

    def follow(self, patcher: Any) -> None:
        """Be told of each copy of this patcher."""
        comfy_compat.call_after_clone(patcher, CALLBACKS_KEY, self._take_out)
        if self._steps is not None:
            comfy_compat.call_for_copies(patcher, CALLBACKS_KEY, self._compile)

    def compile_those_of(self, patcher: Any) -> None:
        """Compile the copies that a patcher has already, before it is sampled."""
        for copied in comfy_compat.copies_of(patcher) if self._steps is not None else ():
            self._made_for(copied)

    def lines(self) -> list[Words]:
        """Return what a person is told of copies that run uncompiled."""
        return list(self._reasons.values())

    def _take_out(self, patcher: Any, clone: Any) -> None:
        """Take what runs one network out of a clone that has another."""
        if clone.model is patcher.model:
            return
        take_ours_out(clone)
        if self._steps is None or not comfy_compat.announces_copies() or is_of_another_kind(patcher, clone):
            is_elsewhere = clone.load_device != patcher.load_device
            self._note("", _ON_ANOTHER_DEVICE if is_elsewhere else _WITHOUT_STREAMING)

    def _compile(self, patcher: Any, clone: Any) -> None:
        """Give a copy what was compiled for its network, or will be now."""
        made = self._made_for(clone)
        if isinstance(made, Uncompiled):
            self._steps.leave(clone)
        else:
            self._steps.put_in(clone, made)
            self.follow(clone)

    def _made_for(self, clone: Any) -> T | Uncompiled:
        network = self._network(clone)
        if network not in self._known:
            made = self._known[network] = self._steps.compile(clone)
            device = device_of(clone)
            if isinstance(made, Uncompiled):
                reason = say("{device}: not compiled: {reason}", device=str(device), reason=made.reason)
                self._note(str(device), reason)
            else:
                self._reasons.pop(str(device), None)
                self._tell()
        return self._known[network]

    def _note(self, device: str, reason: Words) -> None:
        if self._reasons.get(device) != reason:
            self._reasons[device] = reason
            self._tell()


class UncompiledNetwork:
    """Takes the place of the `forward` of a network without graphs that runs beside others on other devices.

    Nobody traces the code of such networks while it runs.
    """

    package = "compiled_graphs"
    stands_in = True

    def __init__(self, network: nn.Module, inner: Callable | None) -> None:
        self._network = weakref.ref(network)
        self.inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        network = self._network()
        with call_lock.shared():
            return self.inner(*args, **kwargs) if self.inner else type(network).forward(network, *args, **kwargs)


def lock_calls(patcher: Any, network: nn.Module, name: str) -> None:
    """Have calls of a patcher's network without graphs wait for what traces code, and the other way round.

    `name` is what the patcher calls the network's `forward`.
    """
    inner = foreign_forward(patcher, network, name, "forward")
    patcher.add_object_patch(name, UncompiledNetwork(network, inner))


def device_of(patcher: Any) -> torch.device:
    """Return where a patcher's network runs, as its tensors say it."""
    return CPU if patcher.load_device.type == "cpu" else patcher.load_device


def is_of_another_kind(patcher: Any, clone: Any) -> bool:
    """Whether a clone streams no weights although its patcher does: Select Model Device makes it so for the CPU."""
    return comfy_compat.is_streamed(patcher) != comfy_compat.is_streamed(clone)


def lines_of(status: str, device: torch.device) -> Words:
    """Return how a copy stands, for the node of the model that it is a copy of."""
    return join([say("{device}: {text}", device=str(device), text=line) for line in status.splitlines()])
