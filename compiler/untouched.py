"""Running a network's code ahead of time so that nothing of it stays.

A network that is called with fake tensors, or traced, runs its own code and the host's. What that code remembers (in
an `lru_cache`, in a dictionary of a module, in an object that blocks share) it would remember of tensors that hold no
numbers, and every later image would be made of those. So whatever the code can reach is put back as it was.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from .fingerprint import LIBRARIES, Describer
from .host import Host

_OURS = __name__.partition(".compiler.")[0]
_PURE = LIBRARIES | {"sympy", "mpmath", _OURS.partition(".")[0]}
"""Packages whose caches hold no tensors of a network."""


class _Turns:
    """Lets calls of networks run together, and what looks ahead beside them alone."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._calls = 0
        self._is_taken = False
        self._own = threading.local()

    @contextmanager
    def shared(self) -> Iterator[None]:
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
                with self._change:
                    self._calls -= 1
                    self._change.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._change:
            self._change.wait_for(lambda: not self._is_taken)
            self._is_taken = True
            self._change.wait_for(lambda: self._calls == 0)
        try:
            yield
        finally:
            with self._change:
                self._is_taken = False
                self._change.notify_all()


turns = _Turns()
"""A call of a network takes a shared turn. What looks ahead on a thread beside it runs alone: a call must not meet what
is put back afterwards."""


@contextmanager
def untouched(module: nn.Module, host: Host, classes: Iterable[type] = ()) -> Iterator[Describer]:
    """Put back, at the end, what the code of a module or of these classes has changed; gives what described it."""
    describer = Describer(host)
    describer.describe(module)
    describer.code(frozenset(classes))
    with untouched_caches(), describer.watch.restored():
        yield describer


@contextmanager
def untouched_caches() -> Iterator[None]:
    """Clear, at the end, every `functools.lru_cache` of the process that was given something new.

    Single entries cannot be taken out, and a cache may be emptied at any time.
    """
    before = {cache: cache.cache_info().misses for cache in list(_known)}
    try:
        yield
    finally:
        _known.update(_caches())
        for cache in list(_known):
            if cache.cache_info().misses != before.get(cache, 0):
                cache.cache_clear()


_known: weakref.WeakSet = weakref.WeakSet()
"""Caches that were found before. To look for all of them takes 30 ms, and is done once each time."""


def _caches() -> list[functools._lru_cache_wrapper]:
    found = gc.get_referrers(functools._lru_cache_wrapper)
    caches = (item for item in found if type(item) is functools._lru_cache_wrapper)
    return [cache for cache in caches if not _is_pure(getattr(cache, "__module__", None) or "")]


def _is_pure(module: str) -> bool:
    root = module.partition(".")[0]
    return root in _PURE or root in sys.stdlib_module_names or module.startswith(f"{_OURS}.")
