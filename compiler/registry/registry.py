"""The registry knows who uses which graphs: the roles of each workflow, and the report that people see.

When the workflow changes, a host drops everything that only its nodes hold. So the process keeps one registry, which
holds weak references to models.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Set
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import torch

from ..common.counters import Counters, totals
from ..common.reason import Reason
from ..common.timing import speed_up
from ..compile_cache.graph_cache import CacheEntry, GraphCache
from ..runtime.compiled_model import CompiledModel
from ..runtime.summary import KindInUse
from .explanations import explained

MAX_WORKFLOWS = 64
"""Workflows in the report. It keeps the most recent ones."""


@dataclass(frozen=True, eq=False)
class Role:
    """One compiled object of a workflow: which node made it, and its counts."""

    counters: Counters
    model: Callable[[], CompiledModel | None]


class Registry:
    """Knows which models play the roles of each workflow, and which graphs of the cache they use."""

    def __init__(self, cache: GraphCache | None = None) -> None:
        self.cache = cache or GraphCache()
        self.on_change: Callable[[], None] = lambda: None
        """Called, on any thread, when graphs or roles come or go. Must return at once."""
        self.cache.on_change = lambda: self.on_change()
        self._workflows: OrderedDict[str, dict[str, Role]] = OrderedDict()
        self._lock = threading.RLock()

    def assign(self, workflow: str, name: str, model: CompiledModel) -> None:
        """Record that this model now plays a role of a workflow. Call this whenever the model runs."""
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
        """Return the living models that play a workflow's roles, or None for an unknown workflow."""
        with self._lock:
            roles = self._workflows.get(workflow)
            return None if roles is None else _models(roles)

    def keep(self, workflow: str) -> set[str]:
        """Write a workflow's graphs to the store unless it has them. Return the keys of those that it now holds."""
        models = (self.models(workflow) or {}).values()
        return self.cache.store_graphs(graph for model in models for graph in model.graphs())

    def evict(self, workflow: str, keys: Set[str]) -> int:
        """Forget a workflow and some of its graphs. Return how many left memory. No model of it may be running.

        Graphs that models of other workflows use stay in memory. A model that runs again asks for its graphs again.
        """
        with self._lock:
            models = _models(self._workflows.pop(workflow, {})).values()
            others = [m for roles in self._workflows.values() for m in _models(roles).values() if m not in models]
            gone = keys - {graph.key for model in others for graph in model.graphs()}
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # an interrupted prompt may have left kernels of these graphs in the queue
            for model in models:
                model.evict(keys)
        self.cache.forget(gone)
        return len(gone)

    def report(self, language: str = "en") -> dict[str, Any]:
        """Return workflows, roles, graphs, counts and sizes as JSON-able data, without paths of this machine.

        Times are in seconds, and sizes in bytes. `explained` says in `language` what each reason in the report means.
        """
        disk = self.disk()
        with self._lock:
            workflows = {
                workflow: {"roles": {name: _role_report(role) for name, role in roles.items()}}
                for workflow, roles in self._workflows.items()
            }
            roles = [role for named in self._workflows.values() for role in named.values()]
            reasons = [reason for role in roles for reason in _reasons(role)]
        regions = {
            key: sum(role[key] for w in workflows.values() for role in w["roles"].values())
            for key in ("regions", "compiled", "variants", "eager")
        }
        sizes = self.cache.sizes()
        return {
            "workflows": workflows,
            "totals": regions | _counts(totals),
            "memory": {"graphs": len(sizes), "bytes": sum(sizes)},
            "disk": disk,
            "explained": explained(reasons, language),
        }

    def disk(self) -> dict[str, Any] | None:
        """Return what the store holds, or None if it cannot be listed quickly."""
        store = self.cache.store
        if store is None or not store.is_near:
            return None
        try:
            entries = store.entries()
        except OSError:
            return None
        return {"graphs": len(entries), "bytes": sum(entry.size for entry in entries), "limit": store.limit}


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
        "paces": [asdict(figure) for figure in model.latency.figures()] if model else [],
    }
    return gauges | _counts(role.counters)


def _reasons(role: Role) -> list[Reason]:
    model = role.model()
    return [*role.counters.eager_calls, *chain.from_iterable(kind.reasons for kind in (model.kinds() if model else ()))]


def _rows(kind: KindInUse) -> list[dict[str, Any]]:
    """Return the rows of a kind of region: one for each graph, and one for each reason why a graph is missing."""
    same = {"region": kind.region, "blocks": kind.blocks}
    rows = [same | _graph_row(entry) for entry in kind.entries]
    rows += [same | {"state": "eager", "reason": str(reason)} for reason in kind.refusals]
    return rows or [same | {"state": "waiting", "reason": ""}]


def _graph_row(entry: CacheEntry) -> dict[str, Any]:
    return {
        "state": "eager" if entry.retired else "compiled",
        "reason": str(entry.retired or ""),
        "key": entry.graph.key,
        "backend": entry.graph.backend,
        "source": entry.source,
        "seconds": entry.seconds,
        "bytes": entry.size,
        "timing": {"eager": entry.timing.eager, "graph": entry.timing.graph} if entry.timing else None,
    }


def _by_text(calls: Mapping[Reason, int]) -> dict[str, int]:
    """Return how many calls each text explains. A model that runs meanwhile may add reasons."""
    texts: Counter[str] = Counter()
    for reason, count in list(calls.items()):
        texts[str(reason)] += count
    return dict(texts)


def _counts(counters: Counters) -> dict[str, Any]:
    return {
        "from_memory": counters.from_memory,
        "from_disk": counters.from_disk,
        "from_file": counters.from_file,
        "reasons": _by_text(counters.eager_calls),
        "calls": counters.calls,
        "recordings": counters.captures,
        "replays": counters.replays,
        "compiles": counters.compiles,
        "verifications": counters.verifications,
        "retired": counters.retired,
        "seconds": round(counters.seconds, 3),
    }
