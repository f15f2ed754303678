"""One compiled model. This page is the trick; each name on it leads to a file.

A diffusion network is a few kinds of block (regions), each repeated many times. A block is a function of its weights
and its inputs, so one graph serves every block of a kind, with any weights, at any size:

    regions, kinds    `identity/regions`, `region_kinds`    which blocks are equal, by what their code can read
    requests          `tracing/shape_discovery`             which graphs a call of the network needs
    graphs            `compile_cache/graph_cache`           from memory, the store, or an export and a backend
    calls             `region_forward`                      look up, guard, run; or run eagerly, for a counted reason

Before a sampling `follow` sees whether the blocks are still what their graphs were made of. A graph is compared with
eager before it serves, and one call in many afterwards (`canary`).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Set
from contextlib import AbstractContextManager

import torch
from torch import nn

from ..common.counters import Counters, totals
from ..common.peers import has_peers
from ..common.reason import Reason
from ..common.timing import Gain, LatencyTracker, gain
from ..compile_cache.background_queue import Background
from ..compile_cache.graph_cache import CacheEntry, GraphCache
from ..identity.graph_spec import CompiledGraph, GraphIdentity
from ..identity.regions import Region
from ..storage.graph_file import StoredGraph
from ..tracing.shape_discovery import ModelCall
from .canary import Canary
from .graph_supply import GraphSupply, OnProgress, no_progress
from .region_forward import RegionForward
from .region_kind import Miss, RegionKind
from .region_kinds import DEFAULTS, Options, RegionKinds, Target
from .running_call import RunningCall
from .summary import KindInUse, Summary, entries_of

log = logging.getLogger(__name__)


class CompiledModel:
    """Makes a `forward` for each region of a network, and gets graphs for them. Holds the network weakly."""

    def __init__(
        self,
        network: nn.Module,
        regions: Iterable[Region],
        target: Target,
        cache: GraphCache,
        options: Options = DEFAULTS,
    ) -> None:
        self.counters = Counters(parent=totals)
        self.latency = LatencyTracker()
        """What calls of the network take; told by whoever makes them."""
        self.host = target.host
        self.weights = target.host.network_weights(network, target.device)
        """Where the network's weights come from."""
        self.verifies = options.verify
        self._options = options
        self._cache = cache
        self._kinds = RegionKinds(network, [region.path for region in regions], target)
        self._supply = GraphSupply(self._kinds, cache, self.counters, options.background, options.on_change)
        self._forwards: weakref.WeakValueDictionary[str, RegionForward] = weakref.WeakValueDictionary()
        self._canary = Canary()
        self._has_replayed = False
        self._calls_blocks: bool | None = None
        """Whether the network has called one of its blocks. None before its first call."""

    def __reduce__(self) -> tuple:
        """Copy and pickle as None: a copy of a network is not compiled. Hooks of others have attributes of ours."""
        return type(None), ()

    def prepare(self, call: ModelCall, on_progress: OnProgress = no_progress, name: str = "") -> None:
        """Provide the graphs that a call of the network will use: from memory, the store, or compiled now.

        What a named call needs is remembered while the network lives. The host may cancel between graphs; what is done
        is kept. Raises CannotCallAhead, before anything is compiled, if the call fails under fake tensors.
        """
        self._supply.prepare(call, on_progress, name)

    def load(self, stored: Iterable[StoredGraph], keep: bool = False, left: Iterable[GraphIdentity] = ()) -> list[str]:
        """Use graphs from a file for the regions they were made for, without looking at a call.

        `keep` keeps those that fit no region as it is now for when the network changes its dtype or device. `left` are
        the file's graphs for other machines. Returns a sentence for each reason why graphs that fit a region cannot
        serve here, if no other graph of the file does.
        """
        return self._supply.load(stored, keep, left)

    def compile_listed(self, listed: Iterable[GraphIdentity], on_progress: OnProgress = no_progress) -> None:
        """Provide graphs like those that a file lists; it need not be trusted. The host may cancel between graphs."""
        self._supply.compile_listed(listed, on_progress)

    def forwards(self) -> dict[str, RegionForward]:
        """Return what takes the place of each region's `forward`, by path: whoever installs them keeps them alive."""
        network, made = self._kinds.model(), []  # a list, or the weak dictionary would lose them at once
        for place, path in enumerate(self._kinds.paths()):
            if path not in self._forwards:
                forward = RegionForward(network.get_submodule(path), path, self._kinds.at(path), self, place)
                self._forwards[path] = forward
                made.append(forward)
        return dict(self._forwards)

    def refresh(self, is_inside: bool = False) -> bool:
        """Compare the regions with their last description, and attach the forwards of those that have changed.

        Returns whether any has; takes milliseconds if not. During a call the forwards are in place already: a module
        that has left its path runs eagerly, and its replacement too until the next call.
        """
        is_same = self._kinds.are_unchanged()
        modules = self._kinds.modules() if is_same or self._kinds.go_back() else self._kinds.describe_again()
        # Even if nothing has changed: a cache miss in the last sampling may have described the regions again.
        for path, forward in list(self._forwards.items()):
            module, kind = modules.get(path), self._kinds.at(path)
            if module is None or (is_inside and module is not forward.module()):
                is_same &= not forward.detach()
            elif not forward.is_attached_to(module, kind):
                forward.attach(module, kind)
                is_same = False
        if not is_same:
            self._supply.use_pending()
        return not is_same

    def schedule_check(self) -> bool:
        """Choose a region whose next call is compared with eager, if a check is due. Return whether there is one."""
        if not self.verifies or not self._canary.is_due() or has_peers():
            return False
        forward = self._canary.choose(list(self._forwards.values()))
        if forward is not None:
            forward.check_next = True
        return forward is not None

    def note_call(self, call: RunningCall) -> None:
        """Take note of a call of the network that has ended."""
        self._has_replayed |= call.was_replayed
        if call.regions:
            self._calls_blocks = True
        elif self._calls_blocks is None:  # that is news, which is told after a call that set something up
            self._calls_blocks, call.had_setup = False, True
        self._canary.note(call)
        self._cache.note_run(call.entries)

    def on_cache_miss(self, kind: RegionKind, miss: Miss, call: RunningCall | None) -> Reason | None:
        """Provide a graph for calls that none serves, or return why not.

        Raises Unsupported while one is compiled in the background.
        """
        repeated = None if call is None else call.repeated()
        return self._supply.on_cache_miss(kind, miss, repeated)

    def describe(self, path: str) -> RegionKind:
        """Return the kind of a region that has changed: other modules, settings, dtypes, or another device."""
        kind = self._kinds.describe(path)
        self._supply.use_pending()
        return kind

    def is_unchanged(self) -> bool:
        """Whether the regions are what was described when the running call began."""
        return self._kinds.are_unchanged()

    def retire(self, kind: RegionKind, entry: CacheEntry, reason: Reason, was_right: bool) -> None:
        """Stop using a graph that failed its check; `was_right` if it passed one before.

        One that was loaded and never right here is compiled again. One that was right before meets something that no
        description sees: another graph under its name would be wrong for somebody else.
        """
        if entry.source in ("disk", "file") and not was_right:
            log.warning("The graph of %s that was loaded is compiled again.", entry.graph.spec.region)
            self._supply.evict(kind, entry)
        else:
            entry.retired = reason
        self._options.on_change()

    def graphs(self) -> list[CompiledGraph]:
        """Return the graphs in use, each once."""
        entries = [entry for kind in self._kinds for entry in entries_of(kind) if not entry.retired]
        return list({entry.graph.key: entry.graph for entry in entries}.values())

    def graphs_by_region(self) -> list[tuple[Region, CacheEntry]]:
        """Return the graphs in use, each with a region that it is for."""
        found = []
        for kind in self._kinds:
            region = self._kinds.region_of(kind.fingerprint)
            found += [(region, entry) for entry in entries_of(kind) if region is not None and not entry.retired]
        return found

    def evict(self, keys: Set[str]) -> None:
        """Forget graphs, not while the network runs. Calls that want them ask the cache for them again."""
        for kind in self._kinds:
            kind.evict(keys)

    def like(self, network: nn.Module, regions: Iterable[Region]) -> CompiledModel:
        """Return another compiled model with the same device, backend, cache and host."""
        return CompiledModel(network, regions, self._kinds.target, self._cache)

    def network_name(self) -> str:
        """Return the class of the network, for people."""
        return type(self._kinds.model()).__name__

    def kinds(self) -> list[KindInUse]:
        """Return the kinds of region that the network has now."""
        return self._kinds.in_use()

    def summary(self) -> Summary:
        """Return how things stand now."""
        kinds = self.kinds()
        loaded, compiled = self._supply.loaded, self._supply.compiled
        return Summary.of(kinds, self.counters, loaded, compiled, self._gain(kinds), self._calls_blocks is not False)

    def gain(self) -> Gain | None:
        """Return what the network gains, as far as was measured."""
        return self._gain(self.kinds())

    def _gain(self, kinds: Iterable[KindInUse]) -> Gain | None:
        timings = [(kind.blocks, [entry.timing for entry in kind.graphs]) for kind in kinds if kind.graphs]
        called = next(reversed(self.latency.figures()), None)
        return gain(timings, called, replays=self._has_replayed)

    def trial(self) -> AbstractContextManager[None]:
        """Enter around calls of its graphs at sizes that nobody uses."""
        return self._kinds.target.backend.trial_context()

    @property
    def device(self) -> torch.device:
        """Where the network runs."""
        return self._kinds.target.device

    @property
    def backend(self) -> str:
        """Name of the backend that its graphs are for."""
        return self._kinds.target.backend.name

    @property
    def background(self) -> Background | None:
        """Where it compiles while it runs, if it does."""
        return self._options.background

    @property
    def pending(self) -> int:
        """Graphs of files that wait for the network to change its dtype or device."""
        return len(self._supply.pending)
