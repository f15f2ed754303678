"""Graphs in memory: each once per process, by key, and what each workflow's roles make of them.

Module-level state, because a host drops what only its nodes hold as soon as the workflow changes. Graphs
hold no weights and are kept strongly, within a bound; models are held weakly.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from . import attention, patches
from .backends.base import Backend
from .counters import Counters, totals
from .environment import environment
from .graph import CompiledGraph
from .graph_file import StoredGraph
from .host import Host
from .jobs import CompileJobs
from .signature import graph_key
from .trace import Variant, export_region

if TYPE_CHECKING:
    from .model import CompiledModel

log = logging.getLogger(__name__)

MAX_GRAPHS = 256
"""Graphs kept in memory: an SDXL UNet has 14, of 6 MB each. Others come back from the store."""
MAX_WORKFLOWS = 64
"""Workflows kept in the report: those that ran last."""


class Store(Protocol):
    """Where compiled graphs outlive the process."""

    def get(self, key: str) -> StoredGraph | None: ...

    def put(self, graph: StoredGraph) -> bool: ...

    def exclusive(self, key: str) -> AbstractContextManager[None]:
        """While it is held, no other process is compiling this key, as far as the store can tell."""
        ...


@dataclass(eq=False)
class GraphEntry:
    """A graph and what this process has learned of it."""

    graph: CompiledGraph
    verified: set[frozenset[str]] = field(default_factory=set)
    """Sets of symbols that were 1 in a call that agreed with eager."""
    retired: str | None = None
    """Why the graph must not be used, once it has disagreed."""


@dataclass(frozen=True, eq=False)
class Role:
    """One compiled object of a workflow: which node made it, and its counts."""

    counters: Counters
    model: Callable[[], CompiledModel | None]


class Registry:
    """Finds, loads and compiles graphs; knows who uses them."""

    def __init__(self, store: Store | None = None, jobs: CompileJobs | None = None) -> None:
        self.store = store
        self._jobs = jobs or CompileJobs()
        self._entries: OrderedDict[str, GraphEntry] = OrderedDict()
        self._workflows: OrderedDict[str, dict[str, Role]] = OrderedDict()
        self._lock = threading.RLock()
        self._wanted: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, list[Variant]]] = weakref.WeakKeyDictionary()

    def wanted(self, model: nn.Module, state: Hashable, probe: Callable[[], list[Variant]]) -> list[Variant]:
        """Return the graphs a model in this state wants, without their modules; probe for them the first time.

        The nodes before a compiling one run again and again (another LoRA, say), with the same model.
        """
        known = self._wanted.setdefault(model, {})
        if state not in known:
            known[state] = [variant.without_module() for variant in probe()]
        return known[state]

    def run(self, name: str, job: Callable[[], Any]) -> Any:
        """Run work that traces or compiles, away from the host's thread and its inference mode."""
        return self._jobs.run(name, job)

    def obtain(self, variant: Variant, backend: Backend, host: Host, counters: Counters) -> tuple[GraphEntry, str]:
        """Return the graph for a variant and where it came from: "memory", "disk" or "compiled".

        Two callers that want one key get one graph: jobs run one at a time, and each looks again first.
        Raises what tracing or the backend raises, and CompileTimeout.
        """
        fields = environment(backend, variant.device)
        key = graph_key(variant.fingerprint, variant.structure, variant.sizes, fields)
        if entry := self._find(key):
            counters.add("from_memory")
            return entry, "memory"
        return self.run(variant.region, lambda: self._load_or_compile(key, fields, variant, backend, host, counters))

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
        counters.add("from_file")
        counters.add("seconds", time.perf_counter() - start)
        return self._keep(graph)

    def assign(self, workflow: str, name: str, model: CompiledModel) -> None:
        """Say that a role of a workflow is now played by this model. To be said whenever it runs."""
        with self._lock:
            roles = self._workflows.setdefault(workflow, {})
            self._workflows.move_to_end(workflow)
            roles[name] = Role(model.counters, weakref.ref(model))
            while len(self._workflows) > MAX_WORKFLOWS:
                self._workflows.popitem(last=False)

    def report(self) -> dict[str, Any]:
        """Return workflows, roles and counts as JSON-able data, without paths of this machine."""
        with self._lock:
            workflows = {
                workflow: {"roles": {name: _role_report(role) for name, role in roles.items()}}
                for workflow, roles in self._workflows.items()
            }
        regions = {
            key: sum(role[key] for w in workflows.values() for role in w["roles"].values())
            for key in ("regions", "compiled", "variants", "eager")
        }
        return {"workflows": workflows, "totals": regions | _counts(totals)}

    def _load_or_compile(
        self,
        key: str,
        environment: Mapping[str, str],
        variant: Variant,
        backend: Backend,
        host: Host,
        counters: Counters,
    ) -> tuple[GraphEntry, str]:
        if entry := self._find(key):
            counters.add("from_memory")
            return entry, "memory"
        attention.register_operator()
        patches.register_operators()
        start = time.perf_counter()
        try:
            with self.store.exclusive(key) if self.store else nullcontext():
                if graph := self._load(key, backend):
                    counters.add("from_disk")
                    return self._keep(graph), "disk"
                exported = export_region(variant, host)
                executable = backend.compile(exported)
                counters.add("compiles")
                structure = variant.structure.text
                graph = CompiledGraph(
                    key, variant.fingerprint, structure, backend.name, environment, exported.spec, executable
                )
                self._put(graph)
                return self._keep(graph), "compiled"
        finally:
            counters.add("seconds", time.perf_counter() - start)

    def _load(self, key: str, backend: Backend) -> CompiledGraph | None:
        stored = self.store.get(key) if self.store else None
        if stored is None or stored.backend != backend.name:
            return None
        try:
            return stored.load(backend)
        except Exception as error:  # whatever torch makes of bytes it does not like
            log.warning("A stored graph of %s could not be loaded (%r); compiling it.", stored.spec.region, error)
            return None

    def _put(self, graph: CompiledGraph) -> None:
        if self.store is None:
            return
        try:
            self.store.put(StoredGraph.of(graph))
        except Exception as error:  # a graph that cannot be kept still runs
            log.warning("The graph of %s cannot be kept for the next start: %r", graph.spec.region, error)

    def _find(self, key: str) -> GraphEntry | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry:
                self._entries.move_to_end(key)
            return entry

    def _keep(self, graph: CompiledGraph) -> GraphEntry:
        with self._lock:
            entry = self._entries[graph.key] = GraphEntry(graph)
            while len(self._entries) > MAX_GRAPHS:
                self._entries.popitem(last=False)
            return entry


def _role_report(role: Role) -> dict[str, Any]:
    model = role.model()
    summary = model.summary() if model else None
    gauges = {
        "regions": summary.regions if summary else 0,
        "compiled": summary.compiled if summary else 0,
        "variants": summary.variants if summary else 0,
        "eager": summary.eager if summary else 0,
    }
    return gauges | _counts(role.counters)


def _counts(counters: Counters) -> dict[str, Any]:
    return {
        "from_memory": counters.from_memory,
        "from_disk": counters.from_disk,
        "from_file": counters.from_file,
        "reasons": dict(counters.eager_calls),
        "calls": counters.calls,
        "compiles": counters.compiles,
        "verifications": counters.verifications,
        "retired": counters.retired,
        "seconds": round(counters.seconds, 3),
    }
