"""The call of a network that runs on this thread, and what happens in it.

A network's wrapper enters a call; the regions inside report to it. Whoever decides whether the call may be captured
or timed asks the call itself. Counters are for people and tests, and decide nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..compile_cache.graph_cache import CacheEntry
from ..tracing.shape_discovery import ModelCall

_thread = threading.local()


class RunningCall:
    """One call of a compiled model's network."""

    __slots__ = (
        *("_last", "_repeat", "entries", "had_setup", "is_eager_in_part", "model", "on_pass", "regions", "shape"),
        "was_replayed",
    )

    def __init__(
        self, model: object, repeat: Callable[[], ModelCall | None] = lambda: None, shape: tuple[int, ...] = ()
    ) -> None:
        """`repeat` returns what makes this call again at other sizes, or None if nobody can."""
        self._repeat = repeat
        self._last = -1
        self.on_pass: Callable[[], None] | None = None
        """Called before the first region of each pass through them: other code may run a network more than once."""
        self.model = model
        self.shape = shape
        """The call's `call_size`."""
        self.regions = 0
        """Calls of regions so far."""
        self.entries: set[CacheEntry] = set()
        """Graphs that have served."""
        self.is_eager_in_part = False
        """Whether a region ran eagerly."""
        self.was_replayed = False
        """Whether it was replayed as a whole."""
        self.had_setup = False
        """Whether something happened that the next such call does without: a compile, a load, a check or a capture."""

    def note_region(self, place: int) -> None:
        """A region is called, which has this place among all. One that does not come later begins another pass."""
        self.regions += 1
        if self.on_pass is not None and (self.regions == 1 or place <= self._last):
            self.on_pass()
        self._last = place

    def repeated(self) -> ModelCall | None:
        """Return what makes this call again at other sizes, or None if nobody can."""
        return self._repeat()


def running_call(model: object) -> RunningCall | None:
    """Return this thread's call of a model's network; None outside of any, and inside another network's."""
    call = getattr(_thread, "call", None)
    return call if call is not None and call.model is model else None


@contextmanager
def entered(call: RunningCall) -> Iterator[RunningCall]:
    """Make this the running call inside the block."""
    outer = getattr(_thread, "call", None)
    _thread.call = call
    try:
        yield call
    finally:
        _thread.call = outer
