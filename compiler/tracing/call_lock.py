"""Keeps calls of networks apart from work that runs a network's code ahead of time.

A trace, or a call ahead, puts fake values where the code finds real ones, and takes them away at the end. A call on
another thread must not see them. So calls share a lock, and such work holds it alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class CallLock:
    """A readers-writer lock. Calls of networks share it."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._calls = 0
        self._is_taken = False
        self._own = threading.local()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Share the lock: wait until nobody holds it alone. Calls of one thread nest."""
        depth = getattr(self._own, "depth", 0)
        if depth == 0:
            with self._change:
                self._change.wait_for(lambda: not self._is_taken)
                self._calls += 1
        self._own.depth = depth + 1
        try:
            yield
        finally:
            self._own.depth = depth
            if depth == 0:
                self._end_call()

    @property
    def _is_exclusive(self) -> bool:
        return getattr(self._own, "is_exclusive", False)

    def _end_call(self) -> None:
        with self._change:
            self._calls -= 1
            self._change.notify_all()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Let others hold the lock alone meanwhile: this thread, inside of a call, waits for something."""
        depth = getattr(self._own, "depth", 0)
        if depth == 0 or self._is_exclusive:
            yield
            return
        self._own.depth = 0
        self._end_call()
        try:
            yield
        finally:
            with self._change:
                self._change.wait_for(lambda: not self._is_taken)
                self._calls += 1
            self._own.depth = depth

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock alone: keep new calls out, and wait for the running ones to end.

        A thread inside of a call, with others on other devices, releases its share first. Whoever holds the lock alone
        may take it again in any way.
        """
        if self._is_exclusive:
            yield
            return
        with self.released():
            with self._change:
                self._change.wait_for(lambda: not self._is_taken)
                self._is_taken = True
            try:
                with self._change:
                    self._change.wait_for(lambda: self._calls == 0)
                self._own.depth, self._own.is_exclusive = 1, True  # what this thread calls meanwhile is its own
                yield
            finally:
                self._own.depth, self._own.is_exclusive = 0, False
                with self._change:
                    self._is_taken = False
                    self._change.notify_all()


call_lock = CallLock()
"""That of all networks in this process."""
