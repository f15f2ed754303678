"""Graphs in memory: each once per process, by key, and what each workflow's roles make of them.

Module-level state, because a host drops what only its nodes hold as soon as the workflow changes. Graphs
hold no weights and are kept strongly, within a bound; models are held weakly.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from . import attention, bounded_json, patches
from .backends.base import Backend
from .counters import Counters, totals
from .environment import environment
from .errors import one_line, printable
from .graph import CompiledGraph, Executable, GraphSpec
from .graph_file import StoredGraph
from .host import Host
from .jobs import CompileJobs
from .signature import Unsupported, graph_key
from .timing import Timing, speed_up
from .trace import Variant, export_region
from .untouched import untouched
from .workers import WorkerError, Workers

if TYPE_CHECKING:
    from .model import CompiledModel, KindInUse
    from .store import StoreEntry

log = logging.getLogger(__name__)

MAX_GRAPHS = 256
"""Graphs kept in memory: an SDXL UNet has 14, of 6 MB each. Others come back from the store."""
MAX_STRUCTURES = 8
"""Structures of call per kind of region. A number that changes at every step must not compile at every step."""
MAX_WORKFLOWS = 64
"""Workflows kept in the report: those that ran last."""


class Store(Protocol):
    """Where compiled graphs outlive the process."""

    limit: int
    """Bytes."""
    is_near: bool
    """Whether it may be listed for every report."""

    def get(self, key: str) -> StoredGraph | None: ...

    def put(self, graph: StoredGraph) -> bool: ...

    def keys(self) -> set[str]:
        """Return the keys of all graphs, or of none if the place cannot be listed."""
        ...

    def entries(self) -> list[StoreEntry]:
        """Return the graph files. Raises OSError if the place cannot be listed."""
        ...

    def discard(self, key: str) -> bool:
        """Remove a graph, and return whether it is gone."""
        ...

    def note(self, name: str) -> bytes | None:
        """Return what was noted under a name."""
        ...

    def put_note(self, name: str, data: bytes) -> None:
        """Note a little that a process found out, for those after it."""
        ...

    def exclusive(self, key: str) -> AbstractContextManager[None]:
        """While it is held, no other process is compiling this key, as far as the store can tell."""
        ...


@dataclass(eq=False)
class GraphEntry:
    """A graph and what this process has learned of it."""

    graph: CompiledGraph
    source: str = ""
    """Where this process had it from: "compiled", "disk" or "file"."""
    seconds: float = 0.0
    """What compiling or loading it took."""
    size: int = 0
    """Bytes of its executable as it is stored, or 0 where nobody has asked for them."""
    verified: set[frozenset[str]] = field(default_factory=set)
    """Sets of symbols that were 1 in a call that agreed with eager."""
    retired: str | None = None
    """Why the graph must not be used, once it has disagreed."""
    rejected: dict[frozenset[str], str] = field(default_factory=dict)
    """By the names of patches: why the graph must not be used with them."""
    timing: Timing | None = None
    """What its region takes by it and eagerly, once it was checked."""


@dataclass(frozen=True, eq=False)
class Role:
    """One compiled object of a workflow: which node made it, and its counts."""

    counters: Counters
    model: Callable[[], CompiledModel | None]


class Place(Enum):
    """Where a graph that is nowhere yet is to be compiled."""

    HERE = "here"
    WORKER = "worker"
    """In a worker process, or here if that cannot."""
    WORKER_ONLY = "worker only"
    """While a model runs here, tracing in this process would disturb it."""


@dataclass(frozen=True)
class _Wanted:
    key: str
    environment: Mapping[str, str]
    variant: Variant
    backend: Backend
    host: Host


def _compile(wanted: _Wanted) -> tuple[GraphSpec, Executable]:
    """Trace and compile. Raises Unsupported if the region is not what its fingerprint says, before or afterwards."""
    module = wanted.variant.module
    with untouched(module, wanted.host) as describer:
        is_known = describer.describe(module).fingerprint == wanted.variant.fingerprint
        exported = export_region(wanted.variant, wanted.host)
        if not is_known or not describer.watch.holds():
            raise Unsupported("a block that changes while it is compiled")
    return exported.spec, wanted.backend.compile(exported)


class Registry:
    """Finds, loads and compiles graphs; knows who uses them."""

    def __init__(
        self, store: Store | None = None, jobs: CompileJobs | None = None, workers: Workers | None = None
    ) -> None:
        """Without `workers` everything is compiled in this process."""
        self.store = store
        self.workers = workers
        self.on_change: Callable[[], None] = lambda: None
        """Called, on any thread, when graphs or roles come or go. Must return at once."""
        self._claims: dict[str, threading.Lock] = {}
        self._jobs = jobs or CompileJobs()
        self._entries: OrderedDict[str, GraphEntry] = OrderedDict()
        self._workflows: OrderedDict[str, dict[str, Role]] = OrderedDict()
        self._lock = threading.RLock()
        self._wanted: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, list[Variant]]] = weakref.WeakKeyDictionary()

    def wanted(
        self,
        model: nn.Module,
        state: Hashable,
        device: torch.device,
        probe: Callable[[], list[Variant]],
        note: Callable[[], str] = lambda: "",
    ) -> list[Variant]:
        """Return the graphs a model in this state wants, without their modules; probe for them the first time.

        The nodes before a compiling one run again and again (another LoRA, say), with the same model. `note` gives
        the name by which the store remembers the answer for the next process, or nothing.
        """
        known = self._wanted.setdefault(model, {})
        if state not in known:
            name = note() if self.store else ""
            variants = self._noted(name, device) or self._probed(name, probe)
            known[state] = [variant.without_module() for variant in variants]
        return known[state]

    def _noted(self, name: str, device: torch.device) -> list[Variant]:
        data = self.store.note(name) if name else None
        if data is None:
            return []
        try:
            return _within_bounds([Variant.noted(note, device) for note in bounded_json.parse(data)])
        except (KeyError, TypeError, ValueError) as error:
            text = "What a model wants is found out again: the store's note of it makes no sense (%s)."
            log.warning(text, printable(one_line(error)))
            return []

    def _probed(self, name: str, probe: Callable[[], list[Variant]]) -> list[Variant]:
        variants = probe()
        if name:
            with suppress(ValueError):  # what would not be read
                notes = [variant.note() for variant in _within_bounds(variants)]
                self.store.put_note(name, json.dumps(notes).encode())
        return variants

    def run(self, name: str, job: Callable[[], Any]) -> Any:
        """Run work that traces or compiles, away from the host's thread and its inference mode."""
        return self._jobs.run(name, job)

    def missing(self, variants: Iterable[Variant], backend: Backend) -> int:
        """Return how many of these graphs would have to be compiled."""
        keys = {self._key(variant, environment(backend, variant.device)) for variant in variants}
        return len({key for key in keys if self._find(key) is None} - (self.store.keys() if self.store else set()))

    def obtain(
        self, variant: Variant, backend: Backend, host: Host, counters: Counters, place: Place = Place.HERE
    ) -> tuple[GraphEntry, str]:
        """Return the graph for a variant and where it came from: "memory", "disk" or "compiled".

        Two callers that want one key get one graph: the second waits, and looks again first. Raises what tracing
        or the backend raises, and CompileTimeout; WorkerError if there is only a worker and that cannot.
        """
        fields = environment(backend, variant.device)
        key = self._key(variant, fields)
        if entry := self._find(key):
            counters.add("from_memory")
            return entry, "memory"
        wanted = _Wanted(key, fields, variant, backend, host)
        with self._claim(key):
            if place is Place.HERE:
                return self.run(variant.region, lambda: self._load_or_compile(wanted, counters))
            return self._load_or_have_compiled(wanted, counters, place)

    def adopt(self, stored: StoredGraph, backend: Backend, counters: Counters) -> GraphEntry:
        """Return the entry for a graph read from a file, loading it unless memory has it.

        Raises what torch makes of bytes it does not like.
        """
        if entry := self._find(stored.key):
            counters.add("from_memory")
            return entry
        attention.register_operator()
        patches.register_operators()
        start = time.perf_counter()
        graph = self.run(stored.spec.region, lambda: stored.load(backend))
        seconds = time.perf_counter() - start
        counters.add("from_file")
        counters.add("seconds", seconds)
        return self._keep(graph, "file", seconds, len(stored.executable))

    def discard(self, key: str) -> None:
        """Forget a graph that turned out to be wrong, in memory and in the store: who wants it next compiles it."""
        with self._lock:
            self._entries.pop(key, None)
        if self.store is not None and not self.store.discard(key):
            log.warning("The graph %s failed its check and cannot be removed from the store; remove the file.", key)
        self.on_change()

    def assign(self, workflow: str, name: str, model: CompiledModel) -> None:
        """Say that a role of a workflow is now played by this model. To be said whenever it runs."""
        with self._lock:
            roles = self._workflows.setdefault(workflow, {})
            self._workflows.move_to_end(workflow)
            before = roles.get(name)
            roles[name] = Role(model.counters, weakref.ref(model))
            while len(self._workflows) > MAX_WORKFLOWS:
                self._workflows.popitem(last=False)
        if before is None or before.counters is not model.counters:
            self.on_change()

    def models(self, workflow: str) -> dict[str, CompiledModel] | None:
        """Return the models that play a workflow's roles, those that still live; None for an unknown workflow."""
        with self._lock:
            roles = self._workflows.get(workflow)
            return None if roles is None else _models(roles)

    def keep(self, workflow: str) -> set[str]:
        """Have the store hold the graphs of a workflow; return the keys of those that it does hold.

        Graphs of a file are not in the store, and one that a full disk turned away is not either.
        """
        models = (self.models(workflow) or {}).values()
        graphs = {graph.key: graph for model in models for graph in model.graphs()}
        for key in graphs.keys() - self._stored_keys():
            self._put(graphs[key])
        return graphs.keys() & self._stored_keys()

    def drop(self, workflow: str, keys: Set[str]) -> int:
        """Forget a workflow and these of its graphs; return how many left memory. Not while a model of it runs.

        Graphs that models of other workflows use stay in memory. A model that runs again asks for its graphs again.
        """
        with self._lock:
            models = _models(self._workflows.pop(workflow, {})).values()
            others = [m for roles in self._workflows.values() for m in _models(roles).values() if m not in models]
            gone = keys - {graph.key for model in others for graph in model.graphs()}
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # an interrupted prompt may have left kernels of these graphs in the queue
            for model in models:
                model.drop(keys)
            for key in gone:
                self._entries.pop(key, None)
        self.on_change()
        return len(gone)

    def _stored_keys(self) -> set[str]:
        return self.store.keys() if self.store else set()

    def report(self) -> dict[str, Any]:
        """Return workflows, roles, graphs, counts and sizes as JSON-able data, without paths of this machine.

        Times are in seconds, sizes in bytes.
        """
        disk = self._disk()
        with self._lock:
            workflows = {
                workflow: {"roles": {name: _role_report(role) for name, role in roles.items()}}
                for workflow, roles in self._workflows.items()
            }
        regions = {
            key: sum(role[key] for w in workflows.values() for role in w["roles"].values())
            for key in ("regions", "compiled", "variants", "eager")
        }
        memory = {"graphs": len(self._entries), "bytes": sum(entry.size for entry in list(self._entries.values()))}
        return {"workflows": workflows, "totals": regions | _counts(totals), "memory": memory, "disk": disk}

    def _disk(self) -> dict[str, Any] | None:
        """Return what the store holds, or None if there is no telling at once."""
        if self.store is None or not self.store.is_near:
            return None
        try:
            entries = self.store.entries()
        except OSError:
            return None
        return {"graphs": len(entries), "bytes": sum(entry.size for entry in entries), "limit": self.store.limit}

    @staticmethod
    def _key(variant: Variant, fields: Mapping[str, str]) -> str:
        return graph_key(variant.fingerprint, variant.structure, variant.sizes, fields)

    def _load_or_compile(self, wanted: _Wanted, counters: Counters) -> tuple[GraphEntry, str]:
        """Serve a key in this process, on the thread of a job."""
        start = time.perf_counter()
        try:
            return self._found(wanted, counters) or self._compiled(wanted, counters, start, *_compile(wanted))
        finally:
            counters.add("seconds", time.perf_counter() - start)

    def _load_or_have_compiled(self, wanted: _Wanted, counters: Counters, place: Place) -> tuple[GraphEntry, str]:
        """Serve a key with a worker's help, on any thread. Only what is loaded or compiled here takes turns."""
        region = wanted.variant.region
        if found := self.run(region, lambda: self._found(wanted, counters)):
            return found
        start = time.perf_counter()
        try:
            spec, data = self.workers.compile(wanted.variant, wanted.backend.name)
            executable = self.run(region, lambda: wanted.backend.load(data, spec))
        except WorkerError as reason:
            if place is Place.WORKER_ONLY:
                raise
            log.info("%s is compiled in this process: %s", region, reason)
            spec, executable = self.run(region, lambda: _compile(wanted))
        return self._compiled(wanted, counters, start, spec, executable)

    @contextmanager
    def _claim(self, key: str) -> Iterator[None]:
        """Keep other threads, and other processes with this store, from compiling a graph at the same time."""
        with self._lock:
            claim = self._claims.setdefault(key, threading.Lock())
        with claim, self.store.exclusive(key) if self.store else nullcontext():
            yield

    def _found(self, wanted: _Wanted, counters: Counters) -> tuple[GraphEntry, str] | None:
        if entry := self._find(wanted.key):
            counters.add("from_memory")
            return entry, "memory"
        attention.register_operator()
        patches.register_operators()
        start = time.perf_counter()
        if loaded := self._load(wanted.key, wanted.backend):
            graph, size = loaded
            counters.add("from_disk")
            return self._keep(graph, "disk", time.perf_counter() - start, size), "disk"
        return None

    def _compiled(
        self, wanted: _Wanted, counters: Counters, start: float, spec: GraphSpec, executable: Executable
    ) -> tuple[GraphEntry, str]:
        seconds = time.perf_counter() - start
        counters.add("compiles")
        variant, name = wanted.variant, wanted.backend.name
        graph = CompiledGraph(
            wanted.key, variant.fingerprint, variant.structure.text, name, wanted.environment, spec, executable
        )
        size = self._put(graph)
        return self._keep(graph, "compiled", seconds, size), "compiled"

    def _load(self, key: str, backend: Backend) -> tuple[CompiledGraph, int] | None:
        stored = self.store.get(key) if self.store else None
        if stored is None or stored.backend != backend.name:
            return None
        try:
            return stored.load(backend), len(stored.executable)
        except Exception as error:  # whatever torch makes of bytes it does not like
            log.warning("A stored graph of %s could not be loaded (%r); compiling it.", stored.spec.region, error)
            return None

    def _put(self, graph: CompiledGraph) -> int:
        """Keep a graph for the next start; return the bytes of its executable, or 0 if they cannot be had."""
        if self.store is None:
            return 0
        try:
            stored = StoredGraph.of(graph)
            self.store.put(stored)
        except Exception as error:  # a graph that cannot be kept still runs
            log.warning("The graph of %s cannot be kept for the next start: %r", graph.spec.region, error)
            return 0
        return len(stored.executable)

    def _find(self, key: str) -> GraphEntry | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry:
                self._entries.move_to_end(key)
            return entry

    def _keep(self, graph: CompiledGraph, source: str = "", seconds: float = 0.0, size: int = 0) -> GraphEntry:
        with self._lock:
            entry = self._entries[graph.key] = GraphEntry(graph, source, seconds, size)
            while len(self._entries) > MAX_GRAPHS:
                self._entries.popitem(last=False)
        self.on_change()
        return entry


def _within_bounds(variants: list[Variant]) -> list[Variant]:
    """Return these graphs. Raises ValueError if no model wants so many."""
    if len(variants) > MAX_GRAPHS:
        raise ValueError(f"more than {MAX_GRAPHS} graphs")
    if any(count > MAX_STRUCTURES for count in Counter(variant.fingerprint for variant in variants).values()):
        raise ValueError(f"more than {MAX_STRUCTURES} graphs of one block")
    return variants


def _models(roles: Mapping[str, Role]) -> dict[str, CompiledModel]:
    return {name: model for name, role in roles.items() if (model := role.model())}


def _role_report(role: Role) -> dict[str, Any]:
    model = role.model()
    summary = model.summary() if model else None
    kinds = model.kinds() if model else []
    timed = [(kind.blocks, entry.timing) for kind in kinds for entry in kind.graphs if entry.timing]
    gauges = {
        "regions": summary.regions if summary else 0,
        "compiled": summary.compiled if summary else 0,
        "variants": summary.variants if summary else 0,
        "eager": summary.eager if summary else 0,
        "graphs": [row for kind in kinds for row in _rows(kind)],
        "speed_up": speed_up(timed),
        "paces": [asdict(figure) for figure in model.pace.figures()] if model else [],
    }
    return gauges | _counts(role.counters)


def _rows(kind: KindInUse) -> list[dict[str, Any]]:
    """Return what serves a kind of region: a row for each graph and for each reason that there is none."""
    same = {"region": kind.region, "blocks": kind.blocks}
    rows = [same | _graph_row(entry) for entry in kind.entries]
    rows += [same | {"state": "eager", "reason": reason} for reason in kind.refusals]
    return rows or [same | {"state": "waiting", "reason": ""}]


def _graph_row(entry: GraphEntry) -> dict[str, Any]:
    return {
        "state": "eager" if entry.retired else "compiled",
        "reason": entry.retired or "",
        "key": entry.graph.key,
        "backend": entry.graph.backend,
        "source": entry.source,
        "seconds": entry.seconds,
        "bytes": entry.size,
        "timing": asdict(entry.timing) if entry.timing else None,
    }


def _counts(counters: Counters) -> dict[str, Any]:
    return {
        "from_memory": counters.from_memory,
        "from_disk": counters.from_disk,
        "from_file": counters.from_file,
        "reasons": dict(counters.eager_calls),
        "calls": counters.calls,
        "recordings": counters.recordings,
        "replays": counters.replays,
        "compiles": counters.compiles,
        "verifications": counters.verifications,
        "retired": counters.retired,
        "seconds": round(counters.seconds, 3),
    }
