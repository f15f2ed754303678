"""What a compiled model tells people of itself: plain data, made when it is asked for."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from ..common.counters import Counters
from ..common.reason import Reason
from ..common.timing import Gain
from ..compile_cache.graph_cache import CacheEntry
from .region_kind import RegionKind


@dataclass(frozen=True)
class Progress:
    """How far compiling is, before the first graph and after each one."""

    done: int
    total: int
    region: str
    source: str
    """"memory", "disk", "compiled" or "eager"; nothing before the first graph."""
    seconds: float
    reason: Reason | None = None
    """Why the region stays eager, if it does."""


def log_progress(log: logging.Logger, progress: Progress) -> None:
    """Write one line for one graph, and none before the first."""
    if not progress.done:
        return
    log.info(
        "[%d/%d] %s: %s, %.1f s", progress.done, progress.total, progress.region, progress.source, progress.seconds
    )


@dataclass(frozen=True)
class Summary:
    """How a compiled model stands."""

    regions: int
    """Kinds of region: blocks of equal code and shapes are one."""
    compiled: int
    variants: int
    """Graphs in use: a kind has one per signature of call."""
    eager: int
    waiting: int
    """Kinds that are compiled when the model first calls them."""
    from_memory: int
    from_disk: int
    from_file: int
    compiles: int
    seconds: float
    reasons: tuple[Reason, ...]
    loaded: int
    """Kinds that a file gave a graph."""
    compiled_here: tuple[str, ...]
    """Regions whose graphs this model had to have compiled."""
    gain: Gain | None = None
    """None until something was timed."""
    calls_blocks: bool = True
    """False once the network has run and has called none of its blocks as modules: it runs their parts itself."""
    regions_by_reason: Mapping[Reason, tuple[str, ...]] = field(default_factory=dict)
    """For each reason the classes of the regions that it keeps from being compiled, wholly or for some calls."""

    @classmethod
    def of(
        cls,
        kinds: Sequence[KindInUse],
        counters: Counters,
        loaded: int,
        compiled_here: Sequence[str],
        gain: Gain | None = None,
        calls_blocks: bool = True,
    ) -> Summary:
        """Return the summary of a model with these kinds."""
        reasons = tuple(dict.fromkeys(reason for kind in kinds for reason in kind.reasons))
        return cls(
            regions=len(kinds),
            compiled=sum(bool(kind.graphs) for kind in kinds),
            variants=sum(len(kind.graphs) for kind in kinds),
            eager=sum(bool(kind.reasons) and not kind.graphs for kind in kinds),
            waiting=sum(not kind.reasons and not kind.graphs for kind in kinds),
            from_memory=counters.from_memory,
            from_disk=counters.from_disk,
            from_file=counters.from_file,
            compiles=counters.compiles,
            seconds=counters.seconds,
            reasons=reasons,
            loaded=loaded,
            compiled_here=tuple(compiled_here),
            gain=gain,
            calls_blocks=calls_blocks,
            regions_by_reason={
                reason: tuple(dict.fromkeys(kind.region for kind in kinds if reason in kind.reasons))
                for reason in reasons
            },
        )


@dataclass(frozen=True)
class KindInUse:
    """Equal regions of a model, and what serves them now."""

    region: str
    """Their class, for people."""
    blocks: int
    entries: tuple[CacheEntry, ...]
    """One per signature of call, and those that failed their check."""
    refusals: tuple[Reason, ...]
    """Why calls run eagerly that no graph was made for."""

    @classmethod
    def of(cls, kind: RegionKind, blocks: int) -> KindInUse:
        """Return what serves this kind, which so many blocks are of."""
        refusals = [*([kind.closed] if kind.closed else []), *list(kind.refusals.values())]
        return cls(kind.cls.__name__, blocks, tuple(entries_of(kind)), tuple(refusals))

    @property
    def graphs(self) -> tuple[CacheEntry, ...]:
        """The graphs that are in use."""
        return tuple(entry for entry in self.entries if not entry.retired)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Every reason for which a call runs eagerly."""
        return (*self.refusals, *(entry.retired for entry in self.entries if entry.retired))


def entries_of(kind: RegionKind) -> list[CacheEntry]:
    """Return a kind's graphs, those that failed their check too."""
    # Lists first: another thread may be adding to what this one reads.
    return [entry for entry in chain.from_iterable(list(kind.graphs.values())) if not entry.is_evicted]
