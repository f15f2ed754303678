"""Counts of what happened, for tests, the node's text and the registry.

A compiler that silently does nothing looks like one that works. Every event worth knowing about is
counted here, once, and a count travels up: a role's counters add to the totals of the process.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from .reason import Reason, ReasonCode

_LOCK = threading.Lock()
_OF_NETWORKS = frozenset({ReasonCode.SLOWER, ReasonCode.TIMED_UNCOMPILED})
"""Why a whole network was called uncompiled."""


@dataclass
class Counters:
    """Event counts of one role (or, without a parent, of the process)."""

    parent: Counters | None = None
    compiles: int = 0
    """Graphs that a backend compiled."""
    from_memory: int = 0
    """Graphs that were wanted and already in memory."""
    from_disk: int = 0
    """Graphs that were wanted and read from the store."""
    from_file: int = 0
    """Graphs that were wanted and read from a graph file."""
    verifications: int = 0
    """Comparisons of a graph with eager on real tensors."""
    retired: int = 0
    """Graphs that such a comparison rejected."""
    calls: int = 0
    """Region calls, compiled or eager."""
    captures: int = 0
    """Whole calls of a network that were recorded as CUDA graphs."""
    replays: int = 0
    """Calls of a network that were replayed from one; their region calls are not counted."""
    seconds: float = 0.0
    """Time spent tracing, compiling and loading."""
    eager_calls: Counter[Reason] = field(default_factory=Counter)
    """Region calls that ran eagerly, by reason, and calls of whole networks that were made uncompiled."""

    @property
    def eager_block_calls(self) -> int:
        """Region calls that ran eagerly."""
        return sum(count for reason, count in self.eager_calls.items() if reason.code not in _OF_NETWORKS)

    def add(self, name: str, amount: float = 1) -> None:
        """Add to a count here and in every parent."""
        with _LOCK:
            setattr(self, name, getattr(self, name) + amount)
        if self.parent is not None:
            self.parent.add(name, amount)

    def add_eager(self, reason: Reason) -> None:
        """Count one eager region call and its reason."""
        with _LOCK:
            self.eager_calls[reason] += 1
        if self.parent is not None:
            self.parent.add_eager(reason)

    @contextmanager
    def expect(self, **deltas: int) -> Iterator[None]:
        """Assert that the named counts change by exactly these amounts inside the block."""
        before = {name: getattr(self, name) for name in deltas}
        yield
        for name, delta in deltas.items():
            changed = getattr(self, name) - before[name]
            assert changed == delta, f"{name} changed by {changed}, expected {delta}"


totals = Counters()
"""Counts since this process started."""
