"""One of torch's functions is replaced by ours while graphs are compiled, where torch has no setting for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple


class Replaced(NamedTuple):
    """An attribute of torch's, and what takes its place."""

    owner: Any
    name: str
    ours: Any


class Replacement:
    """What takes the place of an attribute of torch's as long as anybody compiles, on any thread."""

    def __init__(self, find: Callable[[], Replaced | None]) -> None:
        """`find` returns None where this torch has no such attribute."""
        self._find = find
        self._lock = threading.Lock()
        self._users = 0
        self._restore: Callable[[], None] = lambda: None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have it in place for a while. Threads that compile meanwhile get it as well."""
        self._begin()
        try:
            yield
        finally:
            self._end()

    def _begin(self) -> None:
        with self._lock:
            if self._users == 0 and (found := self._find()) is not None:
                owner, name, ours = found
                self._restore = partial(setattr, owner, name, vars(owner)[name])
                setattr(owner, name, ours)
            self._users += 1

    def _end(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._restore()
                self._restore = lambda: None
