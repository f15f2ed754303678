"""The order in which regions ask for weights, by which those of the next regions are brought while one runs."""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

import torch

from .. import comfy_compat

MOST_AHEAD = 4
"""Regions whose weights are on their way at a time. Regions that have little to bring would all be begun at once."""


class Source(Protocol):
    """The weights of one region."""

    def begin_staging(self) -> bool:
        """Begin to bring what needs the ring, as far as it has room. Return whether all of that is on its way."""
        ...

    def is_staged_for_now(self) -> bool:
        """Whether what was begun in an earlier call still is what the region gets."""
        ...

    def begin_bringing(self) -> None:
        """Begin to bring everything."""
        ...

    def end_bringing(self) -> None:
        """Let go of the weights, used or not."""
        ...


S = TypeVar("S", bound=Source)


class Prefetcher(Generic[S]):
    """Knows the order of one network's regions, and begins with the weights of later ones. Refers to them weakly."""

    def __init__(self) -> None:
        self._next: dict[int, weakref.ref[S]] = {}
        self._first: weakref.ref[S] | None = None
        self._last: S | None = None
        self._begun: deque[S] = deque()
        """Regions whose weights are on their way, in the order of their calls."""

    def order(self) -> list[S]:
        """Return the regions in the order in which they asked first."""
        found, source = [], _alive(self._first)
        while source is not None and source not in found:
            found.append(source)
            source = self._after(source)
        return found

    def note(self, source: S) -> None:
        """A region asks for its weights."""
        if self._last is None:
            self._first = weakref.ref(source)
        else:
            self._next[id(self._last)] = weakref.ref(source)
        self._last = source
        while self._begun and (begun := self._begun.popleft()) is not source:
            begun.end_bringing()

    def begin_next_call(self) -> None:
        """A call is over: bring what the first regions need next time, while the sampler computes."""
        if comfy_compat.can_bring_ahead():
            self._fill_ring(_alive(self._first))

    def begin_first(self) -> None:
        """A call begins: bring what the first region needs, unless that was begun before and still is what it gets.

        Only the ring is used. A cast of ComfyUI's begun here would delay those of the layers before the region.
        """
        if not all(source.is_staged_for_now() for source in self._begun):
            self.drop()
        first = _alive(self._first)
        if first is not None and not self._begun and comfy_compat.can_bring_ahead():
            self._begun.append(first)
            first.begin_staging()

    def begin_later(self, source: S) -> None:
        """A region has its weights: bring those of later regions, as far as the ring has room."""
        if comfy_compat.can_bring_ahead():
            self._fill_ring(self._begun[-1] if self._begun else self._after(source))

    def begin_after(self, source: S) -> None:
        """A region's graph has been launched: bring what the next ones need, if there is another stream for it."""
        following = self._after(source)
        if following is None or following is source or not comfy_compat.can_bring_ahead():
            return
        if following not in self._begun:
            self._begun.append(following)
        try:
            following.begin_bringing()
        except Exception:  # its own call has more room, or says what is wrong
            following.end_bringing()
            return
        with suppress(torch.cuda.OutOfMemoryError):
            self._fill_ring(self._begun[-1])

    def drop(self) -> None:
        """The call of the network is over."""
        self._last = None
        self.let_go()

    def let_go(self) -> None:
        """Let go of what was begun."""
        while self._begun:
            self._begun.popleft().end_bringing()

    def _fill_ring(self, source: S | None) -> None:
        """Bring the weights of a region and of those after it, as far as the ring has room."""
        while source is not None and source is not self._last:
            if source not in self._begun:
                if len(self._begun) >= MOST_AHEAD:
                    return
                self._begun.append(source)
            if not source.begin_staging():
                return
            source = self._after(source)
            if source in self._begun:
                return

    def _after(self, source: S) -> S | None:
        return _alive(self._next.get(id(source)))


def _alive(reference: weakref.ref[S] | None) -> S | None:
    return None if reference is None else reference()
