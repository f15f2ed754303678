"""When a network is looked at again: once per sampling, where the host says when one begins.

Between two steps of a sampling nobody changes a network but those who change it in each step, and a look takes
milliseconds. Where nobody says when a sampling begins, every call is looked at.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol


class Sampling(Protocol):
    """Whether the running call belongs to a sampling whose network was looked at."""

    def is_known(self) -> bool: ...

    def note(self) -> None:
        """Note that the network has been looked at."""
        ...


class EachCall:
    """For calls that nobody counts, such as a VAE's."""

    def is_known(self) -> bool:
        return False

    def note(self) -> None:
        """Nothing is known of the next call."""


class Announced:
    """For a host that says when a sampling begins and ends. A call outside of one is looked at."""

    def __init__(self) -> None:
        self._runs = self._noted = False

    def begin(self) -> None:
        """A sampling begins."""
        self._runs, self._noted = True, False

    def end(self) -> None:
        """It is over."""
        self._runs = self._noted = False

    def is_known(self) -> bool:
        return self._runs and self._noted

    def note(self) -> None:
        self._noted = self._runs


class Scheduled:
    """For pipelines: each sets a new schedule of timesteps when it begins, and calls the network once a step.

    A schedule that is used again, by a loop of somebody's own, is good for as many calls as it has steps.
    """

    def __init__(self, schedules: Callable[[], list[Any]]) -> None:
        """`schedules` returns the tensors of timesteps of all pipelines that the network is part of."""
        self._schedules = schedules
        self._noted: list[weakref.ref] = []
        self._left = 0

    def is_known(self) -> bool:
        self._left -= 1
        if self._left < 0:
            return False
        schedules = self._schedules()
        return len(schedules) == len(self._noted) and all(r() is s for r, s in zip(self._noted, schedules))

    def note(self) -> None:
        schedules = self._schedules()
        self._noted = [weakref.ref(schedule) for schedule in schedules]
        self._left = min(map(len, schedules), default=1) - 1
