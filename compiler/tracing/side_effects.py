"""Runs a network's code ahead of time without lasting side effects.

A probe or a trace runs the network's code and the host's with fake tensors. That code may cache results (in an
`lru_cache`, in a dictionary of a module, in an object that blocks share). The cached tensors would hold no numbers,
and every later image would use them. So everything that the code can reach is restored afterwards.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import nn

from ..common.host import Host
from ..identity.fingerprint import Describer
from ..identity.libraries import LIBRARIES

_OURS = __name__.partition(".compiler.")[0]
_PURE = LIBRARIES | {"sympy", "mpmath", _OURS.partition(".")[0]}
"""Packages whose caches hold no tensors of a network."""


@contextmanager
def untouched(module: nn.Module, host: Host, classes: Iterable[type] = ()) -> Iterator[Describer]:
    """Restore, at the end, whatever the code of a module or of these classes changed. Yields the describer used."""
    describer = Describer(host)
    describer.describe(module)
    describer.code(frozenset(classes))
    with untouched_caches(), describer.watch.restored():
        yield describer


@contextmanager
def untouched_caches() -> Iterator[None]:
    """Clear, at the end, every `functools.lru_cache` of the process that has new entries.

    Single entries cannot be removed. Clearing is safe, because a cache may lose its entries at any time.
    """
    before = {cache: cache.cache_info().misses for cache in _caches.known()}
    try:
        yield
    finally:
        for cache in _caches.all():
            if cache.cache_info().misses != before.get(cache, 0):
                cache.cache_clear()


class _Caches:
    """The process's caches.

    A search takes a tenth of a second and more, so it is made only if there are more of them. Each holds a reference to
    its class, so the class's references tell how many there are.
    """

    def __init__(self) -> None:
        self._found: weakref.WeakSet = weakref.WeakSet()
        self._besides: int | None = None
        """References to the class that are not those of caches."""

    def known(self) -> list[functools._lru_cache_wrapper]:
        """Return those that were found before and may hold tensors of a network."""
        return [cache for cache in list(self._found) if not _is_pure(getattr(cache, "__module__", None) or "")]

    def all(self) -> list[functools._lru_cache_wrapper]:
        """Return all that may hold tensors of a network."""
        if not _counts_references() or sys.getrefcount(_CACHE) - len(self._found) != self._besides:
            self._found.update(_search())
            self._besides = sys.getrefcount(_CACHE) - len(self._found)
        return self.known()


_CACHE = functools._lru_cache_wrapper
_caches = _Caches()


def _counts_references() -> bool:
    """Whether references to classes are counted in one place. Python without the lock counts them by thread."""
    return getattr(sys, "_is_gil_enabled", lambda: True)()


def _search() -> list[functools._lru_cache_wrapper]:
    found = gc.get_referrers(_CACHE)
    if gc.get_freeze_count():  # the collector no longer sees what was there before `gc.freeze`
        found = [*found, *_frozen()]
    return [item for item in found if type(item) is _CACHE]


def _frozen() -> Iterator[Any]:
    """Yield what modules and their classes hold."""
    for module in [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]:
        for item in list(vars(module).values()):
            yield item
            if issubclass(type(item), type):  # `isinstance` asks the item, which may warn
                yield from list(vars(item).values())


def _is_pure(module: str) -> bool:
    root = module.partition(".")[0]
    return root in _PURE or root in sys.stdlib_module_names or module.startswith(f"{_OURS}.")
