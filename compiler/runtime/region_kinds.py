"""The regions of one model as they are now: which kind each is of, and whether that still holds."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import nn

from ..backends.base import Backend
from ..common.devices import with_number
from ..common.errors import one_line
from ..common.host import Host
from ..common.reason import Reason, ReasonCode, Unsupported
from ..compile_cache.background_queue import Background
from ..identity.fingerprint import Describer, describe_network
from ..identity.regions import Region
from ..identity.watch import Watch
from .region_kind import RegionKind
from .summary import KindInUse

MAX_STATES = 8
"""How many states a region may have; then it runs eagerly. What changes with every image must not compile with each."""


@dataclass(frozen=True)
class Target:
    """Where a model runs, and by whose rules."""

    device: torch.device
    backend: Backend
    host: Host

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", with_number(self.device))


@dataclass(frozen=True)
class _Described:
    """What all regions were when they were described, and what tells whether they still are."""

    watch: Watch
    fingerprints: dict[str, str]


@dataclass(frozen=True)
class Options:
    """What whoever compiles a model may choose."""

    verify: bool = True
    """Whether a graph is compared with eager before it serves."""
    background: Background | None = None
    """Where to compile what a call misses, while the call runs eagerly. Without it the call waits."""
    on_change: Callable[[], None] = lambda: None
    """Called, on any thread, when a running call has brought graphs, or one has failed its check."""


DEFAULTS = Options()


class RegionKinds:
    """Describes a model's regions; equal ones are of one kind. Holds the model weakly."""

    def __init__(self, model: nn.Module, paths: Iterable[str], target: Target) -> None:
        self.target = target
        self._model = weakref.ref(model)
        self._kinds: dict[str, RegionKind] = {}
        self._fingerprints: dict[str, str] = {}
        self._states: dict[str, set[str]] = defaultdict(set)
        """By path: what a region has been."""
        self._described = self._describe_all(paths)
        self._before: _Described | None = None
        """The description before the last change. Extensions change blocks for a call and undo it (`go_back`)."""

    def __iter__(self) -> Iterator[RegionKind]:
        """Iterate over the kinds, also those that no region is of any more."""
        return iter(list(self._kinds.values()))

    def model(self) -> nn.Module | None:
        """Return the model, or None if it is gone."""
        return self._model()

    def paths(self) -> dict[str, str]:
        """Return the fingerprint of the region at each path."""
        return dict(self._fingerprints)

    def regions(self) -> dict[Region, str]:
        """Return the regions as modules, and their fingerprints."""
        model = self._model()
        return {Region(path, model.get_submodule(path)): known for path, known in self._fingerprints.items()}

    def at(self, path: str) -> RegionKind:
        """Return the kind of the region at a path."""
        return self._kinds[self._fingerprints[path]]

    def of(self, fingerprint: str) -> RegionKind | None:
        """Return the kind with a fingerprint, or None."""
        return self._kinds.get(fingerprint)

    def region_of(self, fingerprint: str) -> Region | None:
        """Return one region of a kind, or None."""
        path = next((path for path, known in self._fingerprints.items() if known == fingerprint), None)
        return None if path is None else Region(path, self._model().get_submodule(path))

    def in_use(self) -> list[KindInUse]:
        """Return the kinds that regions are of now, and what serves them."""
        blocks = Counter(self._fingerprints.values())
        return [KindInUse.of(self._kinds[identity], count) for identity, count in blocks.items()]

    def are_unchanged(self) -> bool:
        """Whether the regions are still what was described. Takes milliseconds."""
        return self._described.watch.holds()

    def describe_again(self) -> dict[str, nn.Module]:
        """Describe all regions as they are now; return the modules at their paths, without those that are gone."""
        if not self.are_unchanged():
            self._before = self._described
        self._described = self._describe_all(list(self._fingerprints))
        return self.modules()

    def go_back(self) -> bool:
        """Return to the description before the last change if the regions match it again. Return whether they do."""
        before = self._before
        if before is None or not before.watch.holds():
            return False
        self._before, self._described = self._described, before
        self._fingerprints = dict(before.fingerprints)
        return True

    def modules(self) -> dict[str, nn.Module]:
        """Return the modules at the regions' paths, without those that are gone."""
        modules = {path: self._submodule(path) for path in self._fingerprints}
        return {path: module for path, module in modules.items() if module is not None}

    def describe(self, path: str) -> RegionKind:
        """Return the kind of a region that has changed: other modules, settings, dtypes, or another device.

        Raises Unsupported if no region is there any more, though other code may still run the one that was.
        """
        module = self._submodule(path)
        if module is None:
            raise Unsupported(ReasonCode.MODULE_REPLACED)
        if self.target.host.weights_say_device:
            tensors = chain(module.parameters(), module.buffers())
            self._go_to(next((tensor.device for tensor in tensors), self.target.device))
        kind = self._describe(path, module, Describer(self.target.host))
        # What no watch sees has changed, such as a dtype.
        self._described.fingerprints[path], self._before = kind.fingerprint, None
        return kind

    def network_fingerprint(self) -> str:
        """Return the fingerprint of the whole network; nothing if it cannot be described."""
        try:
            network, _ = describe_network(self._model(), self.target.host)
        except Exception:  # only its regions have to bear being looked at
            return ""
        return "" if network.obscure else network.fingerprint

    def _go_to(self, device: torch.device) -> None:
        """Describe everything anew after the model has moved."""
        if device == self.target.device or device.type == "meta":
            return
        self.target = replace(self.target, device=device)
        self._before, before = None, self._kinds
        self._kinds = {}
        missing = self.target.backend.loads(device)
        self._described = self._describe_all(list(self._fingerprints))
        # A region that is gone keeps its kind until it comes back and is described.
        gone = set(self._fingerprints.values()) - self._kinds.keys()
        self._kinds |= {fingerprint: before[fingerprint] for fingerprint in gone}
        for kind in self._kinds.values():
            if missing and kind.device == device:
                kind.closed = kind.closed or Reason(ReasonCode.BACKEND, missing)

    def _describe_all(self, paths: Iterable[str]) -> _Described:
        """Describe the regions as they are now."""
        model, describer, paths = self._model(), Describer(self.target.host), list(paths)
        for path in paths:
            module = self._submodule(path)
            if module is not None:
                self._describe(path, module, describer)
        describer.watch.children(model, paths)
        return _Described(describer.watch, dict(self._fingerprints))

    def _describe(self, path: str, module: nn.Module, describer: Describer) -> RegionKind:
        """Return the kind that a region is of now, and remember that it is."""
        host, device = self.target.host, self.target.device
        try:
            description = describer.describe(module)
            self._limit_states(path, description.fingerprint)
            kind = self._known(description.fingerprint) or RegionKind.of(module, description, host, device)
        except Unsupported as error:
            kind = RegionKind.closed_for(error.reason, path, module, device)
        except Exception as error:  # a block can hold anything, and anything can refuse to be looked at
            reason = Reason(ReasonCode.INDESCRIBABLE, one_line(error))
            kind = RegionKind.closed_for(reason, path, module, device)
        self._fingerprints[path] = kind.fingerprint
        self._kinds[kind.fingerprint] = kind = self._known(kind.fingerprint) or kind
        return kind

    def _known(self, fingerprint: str) -> RegionKind | None:
        """Return the kind with a fingerprint if it is for this device."""
        kind = self._kinds.get(fingerprint)
        return kind if kind is not None and kind.device == self.target.device else None

    def _limit_states(self, path: str, identity: str) -> None:
        states = self._states[path]
        if identity not in states and len(states) > MAX_STATES:
            raise Unsupported(ReasonCode.KEEPS_CHANGING, str(MAX_STATES))
        states.add(identity)

    def _submodule(self, path: str) -> nn.Module | None:
        """Return what is at a path by now: extensions put other blocks there, or none."""
        try:
            return self._model().get_submodule(path)
        except AttributeError:
            return None
