"""One compiled model: its regions, the graphs they use, and how they get them."""

from __future__ import annotations

import hashlib
import json
import logging
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from torch import nn

from .backends.base import Backend
from .background import Background
from .canary import Canary
from .counters import Counters, totals
from .dispatch import RegionForward, RegionKind
from .environment import environment, probing_version
from .errors import one_line
from .fingerprint import Describer
from .graph import CompiledGraph, GraphIdentity
from .graph_file import StoredGraph
from .host import Host
from .jobs import side_by_side
from .probe import ModelCall, wanted_variants
from .randomness import same_random_numbers
from .region import Region
from .registry import MAX_STRUCTURES, GraphEntry, Place, Registry
from .signature import Structure, Unsupported
from .skeleton import tensor_slots
from .timing import Pace
from .trace import Variant
from .untouched import turns, untouched
from .watch import Watch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """One graph was settled."""

    done: int
    total: int
    region: str
    source: str
    """"memory", "disk", "compiled" or "eager"."""
    seconds: float
    reason: str = ""
    """Why the region stays eager, if it does."""


@dataclass(frozen=True)
class Summary:
    """What a person is told of a compiled model."""

    regions: int
    """Kinds of region: blocks of equal code and shapes are one."""
    compiled: int
    variants: int
    """Graphs in use: a kind has one per structure of call."""
    eager: int
    waiting: int
    """Kinds that are compiled when the model first calls them."""
    from_memory: int
    from_disk: int
    from_file: int
    compiles: int
    seconds: float
    reasons: tuple[str, ...]
    loaded: int
    """Kinds that a file gave a graph."""
    compiled_here: tuple[str, ...]
    """Regions whose graphs this model had to have compiled."""


@dataclass(frozen=True)
class KindInUse:
    """Equal regions of a model, and what serves them now."""

    region: str
    """Their class, for people."""
    blocks: int
    entries: tuple[GraphEntry, ...]
    """One per structure of call, and those that failed their check."""
    refusals: tuple[str, ...]
    """Why calls run eagerly that no graph was made for."""

    @property
    def graphs(self) -> tuple[GraphEntry, ...]:
        """The graphs that are in use."""
        return tuple(entry for entry in self.entries if not entry.retired)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Every reason for which a call runs eagerly."""
        return (*self.refusals, *(entry.retired for entry in self.entries if entry.retired))


MAX_STATES = 8
"""New states of one region that are followed. What changes with every image must not compile with every image."""


class CannotCallAhead(Exception):
    """A model that cannot run under fake tensors with the inputs it was given; its own error is the cause."""


OnProgress = Callable[[Progress], None]


class CompiledModel:
    """Makes a `forward` for each region of a model, and graphs for them.

    Holds the model weakly. `current_call` gives, while the model runs, a way to repeat the running call
    at other sizes; with it, structures that `prepare` did not foresee are compiled when they turn up.
    """

    def __init__(
        self,
        model: nn.Module,
        regions: Iterable[Region],
        device: torch.device,
        backend: Backend,
        registry: Registry,
        host: Host,
        current_call: Callable[[], ModelCall | None] = lambda: None,
        verify: bool = True,
        on_change: Callable[[], None] = lambda: None,
        background: Background | None = None,
    ) -> None:
        """With a `background`, structures that turn up run eagerly until it has compiled them."""
        self.counters = Counters(parent=totals)
        self.pace = Pace(self.counters)
        """What calls of the model take; told by whoever makes them."""
        self._model = weakref.ref(model)
        self._device = device
        self._backend = backend
        self._registry = registry
        self._host = host
        self._current_call = current_call
        self._kinds: dict[str, RegionKind] = {}
        self._verify = verify
        self._on_change = on_change
        self._background = background
        self._fingerprints: dict[str, str] = {}
        self._forwards: weakref.WeakValueDictionary[str, RegionForward] = weakref.WeakValueDictionary()
        self._canary = Canary(self.counters)
        self._loaded: set[str] = set()
        self._compiled: list[str] = []
        self._pending: list[StoredGraph] = []
        self._states: dict[str, set[str]] = defaultdict(set)
        """By path: what a region has been."""
        self._watch = self._describe_all([region.path for region in regions])

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self._device

    @property
    def backend(self) -> str:
        """Name of the backend that its graphs are for."""
        return self._backend.name

    @property
    def background(self) -> Background | None:
        """Where it compiles while it runs, if it does."""
        return self._background

    @property
    def pending(self) -> int:
        """Graphs of files that wait for the model to change its dtype or device."""
        return len(self._pending)

    def forwards(self) -> dict[str, RegionForward]:
        """Return what takes the place of each region's `forward`, by path: whoever installs them keeps them alive."""
        made: list[RegionForward] = []  # or the weak dictionary would lose them at once
        model = self._model()
        for path, identity in self._fingerprints.items():
            if path not in self._forwards:
                module, kind = model.get_submodule(path), self._kinds[identity]
                self._forwards[path] = forward = RegionForward(
                    module, path, kind, self._host, self.counters, self, self._verify
                )
                made.append(forward)
        return dict(self._forwards)

    def follow(self) -> bool:
        """See, before a sampling, whether the regions are still what was described; go on as what they are now.

        Returns whether something has changed. Takes milliseconds if nothing has.
        """
        if self._watch.holds():
            return False
        model, before = self._model(), dict(self._fingerprints)
        self._watch = self._describe_all(list(before))
        for path, forward in list(self._forwards.items()):
            module = _submodule(model, path)
            if module is not None and (module is not forward.module() or self._fingerprints[path] != before[path]):
                forward.become(module, self._kinds[self._fingerprints[path]])
        self._serve_pending()
        return True

    def watch_over(self) -> bool:
        """Have one call of one region compared with eager, in turn, if it is time; return whether it is."""
        if not self._verify or not self._canary.is_due():
            return False
        forward = self._canary.choose(list(self._forwards.values()))
        if forward is not None:
            forward.check_next = True
        return forward is not None

    def like(self, model: nn.Module, regions: Iterable[Region]) -> CompiledModel:
        """Return another compiled model with the same device, backend, registry and host."""
        return CompiledModel(model, regions, self._device, self._backend, self._registry, self._host)

    def load(self, stored: Iterable[StoredGraph], keep: bool = False) -> list[str]:
        """Use graphs from a file for the regions they were made for, without looking at a call.

        `keep` keeps those that fit no region as it is now for when the model changes its dtype or device.
        Returns a sentence for each reason why graphs that fit a region cannot serve here.
        """
        refused: Counter[str] = Counter()
        classes = {kind.cls.__name__ for kind in self._kinds.values()}
        waiting = [graph for graph in stored if not self._serve_stored(graph, refused)]
        self._pending = [graph for graph in waiting if keep and graph.spec.region in classes]
        return [f"{count} graphs of the file were {reason}; compiled here instead" for reason, count in refused.items()]

    def _serve_stored(self, graph: StoredGraph, refused: Counter[str]) -> bool:
        """Use a graph from a file if a region is what it was made for, or note why that region cannot."""
        kind = self._kinds.get(graph.fingerprint)
        if kind is None or kind.closed:
            return False
        if different := _difference(graph.environment, environment(self._backend, self._device)):
            refused[f"made for {different}"] += 1
            return False
        try:
            kind.serve(graph.structure, self._registry.adopt(graph, self._backend, self.counters))
            self._loaded.add(graph.fingerprint)
        except Exception as error:
            refused[f"not loaded ({one_line(error)})"] += 1
        return True

    def compile_listed(self, listed: Iterable[GraphIdentity], on_progress: OnProgress = lambda progress: None) -> None:
        """Provide graphs like those of a file that cannot be loaded here. The file need not be trusted.

        Between graphs the host may cancel.
        """
        variants = [variant for identity in listed if (variant := self._variant_like(identity))]
        for done, variant in enumerate(variants):
            if self._has_room(variant):
                self._check_cancelled()
                on_progress(replace(self._provide(variant, self._place), done=done + 1, total=len(variants)))

    def graphs(self) -> list[CompiledGraph]:
        """Return the graphs in use, each once."""
        entries = [e for kind in list(self._kinds.values()) for e in _entries(kind) if not e.retired]
        return list({entry.graph.key: entry.graph for entry in entries}.values())

    def drop(self, keys: Set[str]) -> None:
        """Forget graphs, not while the model runs. Calls that want them ask the registry for them again."""
        for kind in self._kinds.values():
            kind.drop(keys)

    def network_name(self) -> str:
        """Return the class of the network, for people."""
        return type(self._model()).__name__

    def kinds(self) -> list[KindInUse]:
        """Return the kinds of region that the model has now."""
        blocks = Counter(self._fingerprints.values())
        return [_in_use(self._kinds[identity], count) for identity, count in blocks.items()]

    def prepare(self, call: ModelCall, on_progress: OnProgress = lambda progress: None, name: str = "") -> None:
        """Provide the graphs that a call of the model will use: from memory, the store, or compiled now.

        What a call with a name wants is remembered as long as the model lives. Between graphs the host may cancel;
        what is done is kept. Raises CannotCallAhead, before anything is compiled, if the call fails under fake tensors.
        """
        start = time.perf_counter()
        try:
            variants = self._wanted_ahead(call, name)
        except Exception as error:
            raise CannotCallAhead(one_line(error)) from error
        self.counters.add("seconds", time.perf_counter() - start)
        for progress in self._provide_all([variant for variant in variants if self._is_missing(variant)]):
            on_progress(progress)

    def summary(self) -> Summary:
        """Return how things stand now."""
        kinds = self.kinds()
        return Summary(
            regions=len(kinds),
            compiled=sum(bool(kind.graphs) for kind in kinds),
            variants=sum(len(kind.graphs) for kind in kinds),
            eager=sum(bool(kind.reasons) and not kind.graphs for kind in kinds),
            waiting=sum(not kind.reasons and not kind.graphs for kind in kinds),
            from_memory=self.counters.from_memory,
            from_disk=self.counters.from_disk,
            from_file=self.counters.from_file,
            compiles=self.counters.compiles,
            seconds=self.counters.seconds,
            reasons=tuple(dict.fromkeys(reason for kind in kinds for reason in kind.reasons)),
            loaded=len(self._loaded & set(self._fingerprints.values())),
            compiled_here=tuple(self._compiled),
        )

    def _describe(self, path: str, module: nn.Module, describer: Describer) -> RegionKind:
        """Return the kind that a region is now, and remember that it is."""
        try:
            description = describer.describe(module)
            self._limit_states(path, description.fingerprint)
            known = self._kinds.get(description.fingerprint)
            kind = known or RegionKind.of(module, description, self._host, self._device)
        except Unsupported as reason:
            kind = self._closed(path, module, str(reason))
        except Exception as error:  # a block can hold anything, and anything can refuse to be looked at
            kind = self._closed(path, module, f"a block that cannot be described ({one_line(error)})")
        self._fingerprints[path] = kind.fingerprint
        return self._kinds.setdefault(kind.fingerprint, kind)

    def _limit_states(self, path: str, identity: str) -> None:
        states = self._states[path]
        if identity not in states and len(states) > MAX_STATES:
            raise Unsupported(f"a block that keeps changing (more than {MAX_STATES} times)")
        states.add(identity)

    def _describe_all(self, paths: Iterable[str]) -> Watch:
        """Describe the regions as they are now; return the places that were looked at."""
        model, describer = self._model(), Describer(self._host)
        for path in paths:
            module = _submodule(model, path)
            if module is not None:
                self._describe(path, module, describer)
        describer.watch.children(model, paths)
        return describer.watch

    def _closed(self, path: str, module: nn.Module, reason: str) -> RegionKind:
        return RegionKind(type(module), f"{path}: {reason}", frozenset(), {}, self._device, closed=reason)

    def describe(self, path: str) -> RegionKind:
        """Return the kind of a region that has changed: other modules, settings, dtypes, or another device."""
        module = self._model().get_submodule(path)
        if self._host.weights_say_device:
            tensors = chain(module.parameters(), module.buffers())
            self._go_to(next((tensor.device for tensor in tensors), self._device))
        kind = self._describe(path, module, Describer(self._host))
        self._serve_pending()
        return kind

    def is_unchanged(self) -> bool:
        """Whether the regions are what was described when the running call began."""
        return self._watch.holds()

    def give_up(self, kind: RegionKind, entry: GraphEntry, reason: str, was_right: bool) -> None:
        """Use a graph no more that failed its check.

        One that was loaded and never right here is compiled again. One that was right before meets something that no
        description sees: another graph under its name would be wrong for somebody else.
        """
        if entry.source in ("disk", "file") and not was_right:
            log.warning("The graph of %s that was loaded is compiled again.", entry.graph.spec.region)
            self._registry.discard(entry.graph.key)
            kind.drop({entry.graph.key})
        else:
            entry.retired = reason
        self._on_change()

    def _go_to(self, device: torch.device) -> None:
        if device == self._device or device.type == "meta":
            return
        self._device = device
        self._kinds.clear()
        reason = self._backend.available(device)
        self._describe_all(list(self._fingerprints))
        for kind in self._kinds.values():
            kind.closed = kind.closed or reason
        self._serve_pending()

    def _serve_pending(self) -> None:
        self._pending = [graph for graph in self._pending if not self._serve_stored(graph, Counter())]

    def _wanted_ahead(self, call: ModelCall, name: str) -> list[Variant]:
        if not name:
            return self._look_ahead(call)
        model = self._model()
        state = name, self._device, tuple(self._fingerprints.items())
        wanted = self._registry.wanted(
            model,
            state,
            self._device,
            lambda: self._look_ahead(call),
            lambda: self._note_name(name),
        )
        modules = {identity: model.get_submodule(path) for path, identity in self._fingerprints.items()}
        known = [variant for variant in wanted if variant.fingerprint in modules]  # a note is anybody's
        return [replace(variant, module=modules[variant.fingerprint]) for variant in known]

    def _note_name(self, name: str) -> str:
        """Return a digest of what the graphs depend on that a call wants; nothing if the model has no fingerprint."""
        try:
            network = Describer(self._host).describe(self._model())
        except Exception:  # only its regions have to bear being looked at
            return ""
        if network.obscure:
            return ""
        record = [name, str(self._device), network.fingerprint, sorted(self._fingerprints.items()), probing_version()]
        return hashlib.sha256(json.dumps([*record, torch.__version__]).encode()).hexdigest()

    def _wanted(self, call: ModelCall) -> list[Variant]:
        model = self._model()
        regions = {Region(path, model.get_submodule(path)): known for path, known in self._fingerprints.items()}
        with untouched(model, self._host, getattr(call, "classes", ())):
            return wanted_variants(model, regions, self._device, self._host, call)

    def _look_ahead(self, call: ModelCall) -> list[Variant]:
        """Return what a call wants. The person's random numbers stay where they are, if the person waits."""
        # Beside a sampling its generator may be drawn from meanwhile, and must not be set back.
        beside = same_random_numbers(self._device) if self._background is None else turns.alone()
        with beside:
            return self._registry.run("probe", lambda: self._wanted(call))

    def _is_missing(self, variant: Variant) -> bool:
        kind = self._kinds[variant.fingerprint]
        return not kind.closed and variant.structure.text not in kind.graphs

    def _has_room(self, variant: Variant) -> bool:
        kind = self._kinds[variant.fingerprint]
        return self._is_missing(variant) and len(kind.graphs) + len(kind.refusals) < MAX_STRUCTURES

    def _variant_like(self, identity: GraphIdentity) -> Variant | None:
        path = next((path for path, known in self._fingerprints.items() if known == identity.fingerprint), None)
        if path is None:
            return None
        try:
            return Variant.like(identity, Region(path, self._model().get_submodule(path)), self._device)
        except ValueError as error:
            log.warning("A graph of %s that a file lists makes no sense here: %s.", path, error)
            return None

    def _provide_all(self, variants: list[Variant]) -> Iterator[Progress]:
        """Provide graphs, side by side in worker processes if that is sooner; the host may cancel in between."""
        workers = self._registry.workers
        if workers is not None and workers.pay(self._registry.missing(variants, self._backend)):
            place = Place.WORKER if self._background is None else Place.WORKER_ONLY
            # The one that takes longest first, or all wait for it in the end.
            variants = sorted(variants, key=lambda variant: -len(list(tensor_slots(variant.module))))
            jobs = [partial(self._provide, variant, place) for variant in variants]
            provided = side_by_side(jobs, workers.count, self._check_cancelled)
        else:  # on this thread: tracing must not go on after a cancellation
            provided = map(self._provide_uncancelled, variants)
        start, counted = time.perf_counter(), self.counters.seconds
        for done, progress in enumerate(provided):
            yield replace(progress, done=done + 1, total=len(variants))
        if workers is not None:
            workers.rest(self._device)
        uncounted = time.perf_counter() - start - (self.counters.seconds - counted)
        self.counters.add("seconds", max(0.0, uncounted))

    def _provide_uncancelled(self, variant: Variant) -> Progress:
        self._check_cancelled()
        return self._provide(variant, self._place)

    @property
    def _place(self) -> Place:
        return Place.HERE if self._background is None else Place.WORKER_ONLY

    def _provide(self, variant: Variant, place: Place) -> Progress:
        kind = self._kinds[variant.fingerprint]
        start = time.perf_counter()
        reason = ""
        try:
            entry, source = self._registry.obtain(variant, self._backend, self._host, self.counters, place)
            kind.serve(variant.structure.text, entry)
            if source == "compiled":
                self._compiled.append(variant.region)
        except Exception as error:  # tracing and compilers raise anything; the region then stays eager
            source, reason = "eager", one_line(error)
            kind.refuse(variant.structure.text, reason)
            log.warning("%s stays eager: %s", variant.region, reason)
            log.debug("%s", variant.region, exc_info=error)
        return Progress(1, 1, variant.region, source, time.perf_counter() - start, reason)

    def _check_cancelled(self) -> None:
        """Let the host cancel, unless this goes on beside it: asking can answer for somebody else's prompt."""
        if self._background is None:
            self._host.check_cancelled()

    def learn(self, kind: RegionKind, structure: Structure) -> str | None:
        """Serve a structure met in a running call, or return why it stays eager. Raises Unsupported if that may end."""
        call = self._current_call()
        if call is None:
            return "a kind of call that was not foreseen"
        if self._background is None:
            return self._learn_now(kind, structure, call)
        self._background.submit((kind.fingerprint, structure.text), partial(self._learn_later, kind, structure, call))
        raise Unsupported("compiling in the background")

    def _learn_later(self, kind: RegionKind, structure: Structure, call: ModelCall) -> None:
        if self._model() is None or structure.text in kind.graphs or structure.text in kind.refusals:
            return
        if reason := self._learn_now(kind, structure, call):
            kind.refuse(structure.text, reason)
            self._on_change()

    def _learn_now(self, kind: RegionKind, structure: Structure, call: ModelCall) -> str | None:
        if self._background is None:  # what has made one region another may have changed others, not called since
            self._describe_all(list(self._fingerprints))
        try:
            variants = self._look_ahead(call)
        except Exception as error:
            return f"its sizes cannot be told apart from data ({one_line(error)})"
        if structure.text not in {v.structure.text for v in variants if v.fingerprint == kind.fingerprint}:
            # Repeated without patches, the call did not get here; the sizes of one like it vary in the same way.
            alike = (v.with_structure(structure) for v in variants if v.fingerprint == kind.fingerprint)
            variants += [variant for variant in alike if variant][:1]
        for variant in variants:
            if self._is_missing(variant) and variant.structure.text not in self._kinds[variant.fingerprint].refusals:
                self._check_cancelled()
                self._provide(variant, self._place)
        self._on_change()
        if structure.text in kind.graphs or structure.text in kind.refusals:
            return None
        return "an argument that changes with the size, or sizes that cannot be told apart"


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    """Return what is at a path by now: extensions put other blocks there, or none."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _in_use(kind: RegionKind, blocks: int) -> KindInUse:
    refusals = [*([kind.closed] if kind.closed else []), *list(kind.refusals.values())]
    return KindInUse(kind.cls.__name__, blocks, tuple(_entries(kind)), tuple(refusals))


def _entries(kind: RegionKind) -> list[GraphEntry]:
    # Lists first: another thread may be adding to what this one reads.
    return list(chain.from_iterable(list(kind.graphs.values())))


def _difference(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Name the first field in which two environments differ, or return nothing."""
    for name in sorted({*theirs, *ours}):
        if theirs.get(name) != ours.get(name):
            return f"{name} {theirs.get(name, 'none')}, and this is {ours.get(name, 'none')}"
    return ""
