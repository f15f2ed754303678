"""Graphs whose bytes have grown while they ran are written to the store again, when nobody waits for it.

The first calls of a graph can add to it what the next process would have to find out again: the choices of Inductor's
kernels, OneFlow's jobs for more sizes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Protocol

from ..backends.base import GiveWay, at_once
from ..common.errors import one_line
from ..common.jobs import CompileJobs
from ..identity.graph_spec import CompiledGraph
from ..storage.base import Store
from ..storage.graph_file import StoredGraph
from .background_queue import Background

log = logging.getLogger(__name__)

DELAY = 10.0
"""Seconds after a graph's first call. Most first samplings are over by then, and they would share Python's lock."""


class Ran(Protocol):
    """A graph that has run (CacheEntry)."""

    graph: CompiledGraph

    @property
    def is_out(self) -> bool:
        """Whether it turned out to be wrong. Another one may be stored under its key by now."""
        ...


class Renewals:
    """The graphs of a store that have run, each until its bytes were looked at."""

    def __init__(self, store: Store | None, jobs: CompileJobs) -> None:
        self.give_way: GiveWay = at_once
        """Called before each graph on a thread of this object's own. It returns when nobody waits for that thread."""
        self._store = store
        self._jobs = jobs
        self._ran: deque[Ran] = deque()
        self._background = Background()
        self._lock = threading.Lock()

    def note(self, entries: Iterable[Ran]) -> None:
        """Take note of graphs that have run for the first time. They are looked at later."""
        growing = [entry for entry in entries if entry.graph.grows]
        if growing and self._store is not None:
            self._ran.extend(growing)
            self._background.submit(frozenset(entry.graph.key for entry in growing), self._later)

    def finish(self) -> None:
        """Look at all graphs now, and return when none is left."""
        while self._next():
            pass

    def _later(self) -> None:
        if self._ran:
            time.sleep(DELAY)
        while self._ran:
            self.give_way()
            self._next()

    def _next(self) -> bool:
        """Look at one graph. Return whether there was one."""
        with self._lock:
            if not self._ran:
                return False
            entry = self._ran.popleft()
            try:
                self._renew(entry)
            except Exception as error:  # a graph that cannot be written again still runs
                log.info("The stored graph of %s stays as it is: %s", entry.graph.spec.region, one_line(error))
            return True

    def _renew(self, entry: Ran) -> None:
        # A compile changes the same settings of torch as the saving of an artifact does.
        job = partial(self._jobs.run, f"renew {entry.graph.spec.region}")
        if not job(entry.graph.has_grown):  # the store need not be read
            return
        stored = self._store.own(entry.graph.key)
        if stored is None or not job(partial(entry.graph.has_grown, stored.executable)):
            return
        newer = job(partial(StoredGraph.of, entry.graph))
        if entry.is_out:
            return
        self._store.replace(newer)
        if entry.is_out:  # meanwhile
            self._store.discard(entry.graph.key)
