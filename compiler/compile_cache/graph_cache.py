"""The graph cache holds each graph once per device of a process, by key.

Graphs come from memory, the store, a file or a compiler.

Graphs hold no weights, so the cache keeps strong references to a bounded number of them. It knows nothing about models:
a model asks for the graph of a request, and tells the cache which graphs it needs.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from ..backends.base import Backend, GiveWay, at_once
from ..common import bounded_json
from ..common.counters import Counters
from ..common.devices import current
from ..common.errors import one_line, printable
from ..common.host import Host
from ..common.jobs import CompileJobs, side_by_side
from ..common.reason import Reason, ReasonCode, ReasonedError, Unsupported
from ..common.tensor_slots import tensor_slots
from ..common.timing import Timing
from ..common.torch_compat import guards_value, needs_values
from ..identity.call_signature import graph_key
from ..identity.graph_spec import CompiledGraph, Executable, GraphSpec
from ..storage.base import Store
from ..storage.graph_file import GraphFileError, StoredGraph
from ..tracing.call_lock import call_lock
from ..tracing.export import ExportedRegion, export_region
from ..tracing.graph_request import GraphRequest
from ..tracing.operators import register_operators
from ..tracing.side_effects import untouched
from .key import environment
from .renewals import Renewals
from .worker_pool import WorkerError, Workers

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_GRAPHS = 256
"""Graphs kept in memory. An SDXL UNet has 14, of 6 MB each. Dropped graphs are loaded from the store again."""
PRELOADED = 32
"""Graphs that are loaded before anybody asks, which takes about 0.1 s each: an SDXL UNet's and its VAE's."""
MAX_SIGNATURES = 8
"""Call signatures per kind of region. A number that changes at every step must not cause a compile at every step."""


@dataclass(eq=False)
class CacheEntry:
    """A graph and what this process has learned about it."""

    graph: CompiledGraph
    source: str = ""
    """Where this process got it: "compiled", "disk", "file", or "memory" for what another device had."""
    seconds: float = 0.0
    """How long compiling or loading took."""
    size: int = 0
    """Bytes of its executable in the store or a file, or 0 if unknown."""
    verified: set[frozenset[str]] = field(default_factory=set)
    """Small sizes (`GraphSpec.small_sizes`) of calls whose results agreed with eager."""
    wrong_at: set[frozenset[str]] = field(default_factory=set)
    """Few frames (`GraphSpec.few_frames`) of calls whose results disagreed with eager: these want another graph."""
    retired: Reason | None = None
    """Why the graph must not be used, after its results disagreed with eager."""
    is_evicted: bool = False
    """Whether the cache dropped it. The next call that wants it gets a new one under the same key."""
    rejected: dict[frozenset[str], Reason] = field(default_factory=dict)
    """Why the graph must not be used with some patches, by their names."""
    served: set[frozenset[str]] = field(default_factory=set)
    """Patches, by their names, that the graph has called."""
    timing: Timing | None = None
    """How long its region takes with it and eagerly, once it was checked."""
    has_run: bool = False
    """Whether it has served in a call of a network."""
    is_preloaded: bool = False
    """Whether it was loaded before anybody asked for it, and nobody has asked since."""

    @property
    def is_out(self) -> bool:
        """Whether the graph must not run any more."""
        return self.is_evicted or self.retired is not None

    def fits(self, shapes: Sequence[Sequence[int]]) -> bool:
        """Whether the graph is for calls with these input shapes, as far as is known."""
        spec = self.graph.spec
        return spec.fits(shapes) and not (self.wrong_at and spec.few_frames(shapes) in self.wrong_at)


class CompileIn(Enum):
    """Which process compiles a graph that does not exist yet."""

    PROCESS = "this process"
    WORKER_PREFERRED = "worker preferred"
    """A worker process, or this one if no worker can."""
    WORKER_REQUIRED = "worker required"
    """While a model runs here, tracing in this process would disturb it."""


@dataclass(frozen=True)
class Requester:
    """Who asks for graphs, and where their events are counted."""

    backend: Backend
    host: Host
    counters: Counters


@dataclass(frozen=True)
class Outcome:
    """The result of one request."""

    request: GraphRequest
    seconds: float
    entry: CacheEntry | None = None
    source: str = "eager"
    """"memory", "disk", "compiled", or "eager" if there is no graph."""
    error: Exception | None = None
    """Why there is no graph."""


@dataclass(frozen=True)
class _Task:
    """A request whose graph was not in memory, and its key."""

    key: str
    environment: Mapping[str, str]
    request: GraphRequest
    by: Requester


def _check_compiler(task: _Task) -> None:
    """Raise ReasonedError where graphs can be loaded only."""
    if reason := task.by.backend.available(task.request.device):
        raise ReasonedError(ReasonCode.BACKEND, reason)


def _traced(task: _Task) -> ExportedRegion:
    """Trace a region. Raises Unsupported if it does not match its fingerprint before or afterwards."""
    module = task.request.module
    with untouched(module, task.by.host) as describer:
        is_known = describer.describe(module).fingerprint == task.request.fingerprint
        try:
            exported = export_region(task.request, task.by.host)
        except Exception as error:
            if value := needs_values(error) or guards_value(error):
                raise Unsupported(ReasonCode.DEPENDS_ON_VALUES, value) from error
            raise
        if not is_known or not describer.watch.holds():
            raise Unsupported(ReasonCode.CHANGES_MEANWHILE)
    return exported


class GraphCache:
    """Finds, loads and compiles graphs."""

    def __init__(
        self, store: Store | None = None, jobs: CompileJobs | None = None, workers: Workers | None = None
    ) -> None:
        """Without `workers`, this process compiles everything."""
        self.store = store
        self.workers = workers
        self.on_change: Callable[[], None] = lambda: None
        """Called, on any thread, when graphs come or go. Must return at once."""
        self._claims: weakref.WeakValueDictionary[str, threading.Lock] = weakref.WeakValueDictionary()
        self._jobs = jobs or CompileJobs()
        self.renewals = Renewals(store, self._jobs)
        self._entries: OrderedDict[tuple[str, str], CacheEntry] = OrderedDict()
        """By key and device: GPUs of a kind share a graph, and each loads it and has it checked for itself."""
        self._lock = threading.RLock()
        self._memos: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, list[GraphRequest]]]
        self._memos = weakref.WeakKeyDictionary()

    def remembered(self, model: nn.Module, state: Hashable) -> list[GraphRequest] | None:
        """Return the requests of a model in this state, without modules, or None if nobody has found them yet.

        The nodes before a node that compiles often run again with the same model, for example with another LoRA.
        """
        with self._lock:
            return self._memos.get(model, {}).get(state)

    def remember(self, model: nn.Module, state: Hashable, requests: Iterable[GraphRequest]) -> None:
        """Remember the requests of a model in this state, as long as the model lives."""
        kept = [request.without_module() for request in requests]
        with self._lock:
            self._memos.setdefault(model, {})[state] = kept

    def memo(self, name: str, device: torch.device) -> list[GraphRequest] | None:
        """Return the requests of a memo in the store, without modules, or None if there is no usable memo."""
        data = self.store.note(name) if self.store and name else None
        if data is None:
            return None
        try:
            return _within_bounds([GraphRequest.noted(note, device) for note in bounded_json.parse(data)]) or None
        except (KeyError, TypeError, ValueError) as error:
            text = "What a model wants is found out again: the store's note of it makes no sense (%s)."
            log.warning(text, printable(one_line(error)))
            return None

    def save_memo(self, name: str, requests: list[GraphRequest]) -> None:
        """Keep a memo in the store for the next process. Without a name, keep nothing."""
        if self.store is None or not name:
            return
        with suppress(ValueError):  # `memo` would refuse it
            notes = [request.note() for request in _within_bounds(requests)]
            self.store.put_note(name, json.dumps(notes).encode())

    def run(self, name: str, job: Callable[[], T], device: torch.device, traces: bool = False) -> T:
        """Run work for a device that traces, compiles or loads, away from the host's thread and its inference mode.

        Calls of networks on other threads go on meanwhile, unless the job `traces`.
        """
        with call_lock.released():
            return self._jobs.run(
                name, partial(_on, device, job), around=call_lock.exclusive if traces else nullcontext
            )

    def get_or_compile_all(
        self, requests: Sequence[GraphRequest], by: Requester, is_beside: bool, check: Callable[[], None] = lambda: None
    ) -> Iterator[Outcome]:
        """Yield the outcome of each request. Worker processes compile in parallel if that is faster.

        `is_beside` says that a model runs meanwhile. `check` is called between requests, and what it raises ends the
        iteration.
        """
        pays = self.workers is not None and self.workers.are_worth_starting(self._missing(requests, by))
        if pays:
            place = CompileIn.WORKER_REQUIRED if is_beside else CompileIn.WORKER_PREFERRED
            # The slowest one comes first, or everybody waits for it at the end.
            requests = sorted(requests, key=lambda request: -len(list(tensor_slots(request.module))))
            jobs = [partial(self.get_or_refuse, request, by, place) for request in requests]
            outcomes = side_by_side(jobs, max(1, self.workers.count), check)  # memory may just have run short
        else:  # on this thread, because tracing must stop after a cancellation
            if self.workers is not None:
                self.workers.has_begun.set()
            place = CompileIn.WORKER_REQUIRED if is_beside else CompileIn.PROCESS
            outcomes = self._one_by_one(requests, by, place, check)
        start, counted = time.perf_counter(), by.counters.seconds
        yield from outcomes
        if self.workers is not None and requests:
            self.workers.stop_if_memory_is_scarce(requests[0].device)
        uncounted = time.perf_counter() - start - (by.counters.seconds - counted)
        by.counters.add("seconds", max(0.0, uncounted))

    def _one_by_one(
        self, requests: Iterable[GraphRequest], by: Requester, place: CompileIn, check: Callable[[], None]
    ) -> Iterator[Outcome]:
        for request in requests:
            check()
            yield self.get_or_refuse(request, by, place)

    def get_or_refuse(self, request: GraphRequest, by: Requester, place: CompileIn = CompileIn.PROCESS) -> Outcome:
        """Return the outcome of a request, even if tracing or the compiler raises."""
        start = time.perf_counter()
        try:
            entry, source = self.get_or_compile(request, by, place)
            return Outcome(request, time.perf_counter() - start, entry, source)
        except Exception as error:  # tracing and compilers can raise anything; then the region stays eager
            return Outcome(request, time.perf_counter() - start, error=error)

    def _missing(self, requests: Iterable[GraphRequest], by: Requester) -> int:
        """Return how many of these graphs would have to be compiled."""
        keys = {self._key(request, environment(by.backend, request.device, by.host)) for request in requests}
        with self._lock:
            in_memory = {key for key, _ in self._entries}
        return len(keys - in_memory - self.stored_keys())

    def get_or_compile(
        self, request: GraphRequest, by: Requester, place: CompileIn = CompileIn.PROCESS
    ) -> tuple[CacheEntry, str]:
        """Return the graph for a request and where it came from: "memory", "disk" or "compiled".

        Two callers that want one key get one graph: the second caller waits, and then finds the graph of the first.
        Raises what tracing or the backend raises, and CompileTimeout. Raises WorkerError if only a worker may compile
        and none can.
        """
        fields = environment(by.backend, request.device, by.host)
        key = self._key(request, fields)
        if entry := self._find(key, request.device):
            return self._found(entry, by)
        task = _Task(key, fields, request, by)
        with call_lock.released(), self._claim(key):
            if found := self._timed(task, lambda: self._load(task)):
                return found
            _check_compiler(task)
            with self.store.exclusive(key) if self.store else nullcontext():
                # Whoever held the claim before may have made the graph. Loading it needs no claim, and others wait.
                stored = self.store.get(key) if self.store else None
                if stored is None:
                    return self._compile_in(task, place)
            return self._timed(task, lambda: self._load(task, stored)) or self._compile_in(task, place)

    def recent(self) -> list[StoredGraph]:
        """Return the graphs of the store that were used last. A distant store has none: reading it takes long."""
        if self.store is None or not self.store.is_near:
            return []
        found = []
        with suppress(OSError):
            for entry in sorted(self.store.entries(), key=lambda entry: -entry.used)[:PRELOADED]:
                with suppress(OSError, GraphFileError):  # whoever asks for it says why
                    found.append(self.store.read_graph(entry.name))
        return found

    def preload(
        self,
        recent: Iterable[StoredGraph],
        backend: Backend,
        device: torch.device,
        host: Host,
        give_way: GiveWay = at_once,
    ) -> None:
        """Load graphs before anybody asks for them. One that cannot be loaded is left to whoever asks.

        It calls `give_way` before each graph.
        """
        fields = environment(backend, device, host)
        for stored in recent:
            give_way()
            if stored.backend == backend.name and stored.environment == fields:
                with suppress(Exception):  # torch can raise anything for bytes that it cannot load
                    job = partial(self._preload, stored, backend, device)
                    self.run(f"preload {stored.spec.region}", job, device)

    def _preload(self, stored: StoredGraph, backend: Backend, device: torch.device) -> None:
        if self._find(stored.key, device) is None:
            start = time.perf_counter()
            graph = stored.load(backend, device)
            entry = self._keep(graph, "disk", time.perf_counter() - start, len(stored.executable))
            entry.is_preloaded = True

    def add_loaded(self, stored: StoredGraph, by: Requester, device: torch.device) -> CacheEntry:
        """Return the entry for a graph that was read from a file. Loads it only if this device has none in memory.

        Raises whatever torch raises for bytes that it cannot load.
        """
        if entry := self._find(stored.key, device):
            by.counters.add("from_memory")
            return entry
        register_operators()
        start = time.perf_counter()
        graph = self.run(stored.spec.region, lambda: stored.load(by.backend, device), device)
        seconds = time.perf_counter() - start
        by.counters.add("from_file")
        by.counters.add("seconds", seconds)
        return self._keep(graph, "file", seconds, len(stored.executable))

    def note_run(self, entries: Iterable[CacheEntry]) -> None:
        """Take note of graphs that have served in a call of a network."""
        new = [entry for entry in entries if not entry.has_run]
        for entry in new:
            entry.has_run = True
        self.renewals.note(entry for entry in new if not entry.graph.is_foreign)

    def evict(self, entry: CacheEntry) -> None:
        """Remove a wrong graph from memory and from the store. The next request for it compiles it again."""
        key = entry.graph.key
        entry.is_evicted = True
        with self._lock:
            self._entries.pop(_place(entry.graph), None)
        if self.store is not None and not self.store.discard(key):
            log.warning("The graph %s failed its check and cannot be removed from the store; remove the file.", key)
        self.on_change()

    def forget(self, keys: Set[str]) -> None:
        """Remove graphs from memory. The next request for one loads it from the store."""
        with self._lock:
            for place in [place for place in self._entries if place[0] in keys]:
                entry = self._entries.pop(place)
                entry.is_evicted = entry.retired is None  # captures hold it, too, until they see this
        self.on_change()

    def store_graphs(self, graphs: Iterable[CompiledGraph]) -> set[str]:
        """Write graphs to the store unless it has them. Return the keys of those that it now holds.

        The store lacks graphs that came from a file, and graphs that did not fit on a full disk. Foreign ones are not
        written: the store's files are signed by this machine.
        """
        by_key = {graph.key: graph for graph in graphs}
        for key in by_key.keys() - self.stored_keys():
            if not by_key[key].is_foreign:
                self._put(by_key[key])
        return by_key.keys() & self.stored_keys()

    def stored_keys(self) -> set[str]:
        """Return the keys of the graphs in the store, if there is one."""
        return self.store.keys() if self.store else set()

    def sizes(self) -> list[int]:
        """Return the stored size in bytes of each graph in memory."""
        with self._lock:
            return [entry.size for entry in self._entries.values()]

    @staticmethod
    def _key(request: GraphRequest, fields: Mapping[str, str]) -> str:
        return graph_key(request.fingerprint, request.signature, request.sizes, fields)

    def _timed(self, task: _Task, work: Callable[[], T]) -> T:
        """Do work in this process, on a job's thread, and count its seconds."""

        def timed() -> T:
            start = time.perf_counter()
            try:
                return work()
            finally:
                task.by.counters.add("seconds", time.perf_counter() - start)

        return self.run(task.request.region, timed, task.request.device)

    def _compile_in(self, task: _Task, place: CompileIn) -> tuple[CacheEntry, str]:
        """Compile a graph, in this process or in a worker. Only work in this process takes the call lock."""
        region, backend, device = task.request.region, task.by.backend, task.request.device
        start = time.perf_counter()
        if place is CompileIn.PROCESS:
            try:
                return self._add_compiled(task, start, *self._compile(task))
            finally:
                task.by.counters.add("seconds", time.perf_counter() - start)
        try:
            spec, data = self.workers.compile(task.request, backend.name)
            executable = self.run(region, lambda: backend.load(data, spec), device)
        except WorkerError as reason:
            if place is CompileIn.WORKER_REQUIRED:
                raise
            log.info("%s is compiled in this process: %s", region, reason)
            spec, executable = self._compile(task)
        return self._add_compiled(task, start, spec, executable)

    def _compile(self, task: _Task) -> tuple[GraphSpec, Executable]:
        """Trace and compile in this process."""
        region, device = task.request.region, task.request.device
        exported = self.run(region, lambda: _traced(task), device, traces=True)
        executable = self.run(region, lambda: task.by.backend.compile(exported), device)
        return exported.spec_now(), executable

    def _claim(self, key: str) -> threading.Lock:
        """Return what keeps other threads from compiling the same graph meanwhile."""
        with self._lock:
            return self._claims.setdefault(key, threading.Lock())

    def _load(self, task: _Task, stored: StoredGraph | None = None) -> tuple[CacheEntry, str] | None:
        """Return a graph that is in memory by now or in the store, or None if it must be compiled.

        `stored` is what was read from the store, if somebody has read it.
        """
        device = task.request.device
        if entry := self._find(task.key, device):
            return self._found(entry, task.by)
        register_operators()
        start = time.perf_counter()
        if graph := self._of_another_device(task):
            task.by.counters.add("from_memory")
            return self._keep(graph, "memory", time.perf_counter() - start), "memory"
        stored = stored or (self.store.get(task.key) if self.store else None)
        if loaded := self._loaded(stored, task.by.backend, device):
            graph, size = loaded
            task.by.counters.add("from_disk")
            return self._keep(graph, "disk", time.perf_counter() - start, size), "disk"
        return None

    def _add_compiled(
        self, task: _Task, start: float, spec: GraphSpec, executable: Executable
    ) -> tuple[CacheEntry, str]:
        seconds = time.perf_counter() - start
        task.by.counters.add("compiles")
        request, name = task.request, task.by.backend.name
        graph = CompiledGraph(
            task.key, request.fingerprint, request.signature.text, name, task.environment, spec, executable
        )
        size = self._put(graph)
        return self._keep(graph, "compiled", seconds, size), "compiled"

    def _of_another_device(self, task: _Task) -> CompiledGraph | None:
        """Return a graph that another device of this process has in memory, loaded for this one."""
        with self._lock:
            others = [entry for (key, _), entry in self._entries.items() if key == task.key and not entry.is_out]
        for entry in others[:1]:
            try:
                return StoredGraph.of(entry.graph).load(task.by.backend, task.request.device)
            except Exception as error:  # torch can raise anything for bytes that it cannot move
                log.info("%s is not taken over from another device: %r", task.request.region, error)
        return None

    @staticmethod
    def _loaded(stored: StoredGraph | None, backend: Backend, device: torch.device) -> tuple[CompiledGraph, int] | None:
        if stored is None or stored.backend != backend.name:
            return None
        try:
            return stored.load(backend, device), len(stored.executable)
        except Exception as error:  # torch can raise anything for bytes that it cannot load
            log.warning("A stored graph of %s could not be loaded (%r); compiling it.", stored.spec.region, error)
            return None

    def _put(self, graph: CompiledGraph) -> int:
        """Keep a graph for the next start. Return the bytes of its executable, or 0 if it cannot be kept."""
        if self.store is None:
            return 0
        try:
            stored = StoredGraph.of(graph)
            self.store.put(stored)
        except Exception as error:  # a graph that cannot be kept still runs
            log.warning("The graph of %s cannot be kept for the next start: %r", graph.spec.region, error)
            return 0
        return len(stored.executable)

    def _find(self, key: str, device: torch.device) -> CacheEntry | None:
        with self._lock:
            entry = self._entries.get((key, str(device)))
            if entry:
                self._entries.move_to_end((key, str(device)))
            return entry

    def _found(self, entry: CacheEntry, by: Requester) -> tuple[CacheEntry, str]:
        """Return a graph that is in memory, and where it came from for whoever asks first."""
        source = "disk" if entry.is_preloaded else "memory"
        if entry.is_preloaded and self.store is not None:
            self.store.note_use(entry.graph.key)
        entry.is_preloaded = False
        by.counters.add(f"from_{source}")
        return entry, source

    def _keep(self, graph: CompiledGraph, source: str = "", seconds: float = 0.0, size: int = 0) -> CacheEntry:
        with self._lock:
            entry = self._entries[_place(graph)] = CacheEntry(graph, source, seconds, size)
            while len(self._entries) > MAX_GRAPHS:
                self._entries.popitem(last=False)
        self.on_change()
        return entry


def _place(graph: CompiledGraph) -> tuple[str, str]:
    return graph.key, graph.spec.device


def _on(device: torch.device, job: Callable[[], T]) -> T:
    """Run a job with a device as the thread's current one: code may say "cuda" and mean the GPU that it runs on."""
    with current(device):
        return job()


def _within_bounds(requests: list[GraphRequest]) -> list[GraphRequest]:
    """Return these requests. Raises ValueError if there are more than any model makes."""
    if len(requests) > MAX_GRAPHS:
        raise ValueError(f"more than {MAX_GRAPHS} graphs")
    kinds_of_call = Counter(fingerprint for fingerprint, _ in {(r.fingerprint, r.signature.text) for r in requests})
    if any(count > MAX_SIGNATURES for count in kinds_of_call.values()):
        raise ValueError(f"more than {MAX_SIGNATURES} kinds of call of one block")
    return requests
