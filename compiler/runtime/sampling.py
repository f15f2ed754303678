"""When a network is checked for changes: once per sampling, if the host announces samplings.

A check takes milliseconds, and between two steps only code around the network's calls can change the network. If the
host reports such code, each call is checked. If code runs inside a call, the network is checked again there, before its
first block. A network that takes part in another's sampling, such as a ControlNet, is checked once in that sampling.
Any other call is checked.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Protocol


class Sampling(Protocol):
    """Tells whether the running call belongs to a sampling whose network was checked already."""

    def covers_call(self) -> bool:
        """Return whether the network was checked in the running call's sampling. Ask once for each call."""
        ...

    def note(self) -> None:
        """Record that the network was checked."""
        ...


class EachCall:
    """For calls that belong to no sampling, such as a VAE's: each is checked."""

    def covers_call(self) -> bool:
        """Return False: each call is checked."""
        return False

    def note(self) -> None:
        """Do nothing: a check says nothing about the next call."""


class Announced:
    """For a host that says when a sampling begins and ends. A call outside a sampling is checked."""

    running: ClassVar[object | None] = None
    """A token for the sampling that began last, of any network; None if it is over, or if each call is checked."""

    def __init__(self) -> None:
        self._is_running = self._checked = self._checks_each = False

    def begin(self, checks_each: bool = False) -> None:
        """Say that a sampling begins, and whether each of its calls is to be checked."""
        self._is_running, self._checked, self._checks_each = True, False, checks_each
        Announced.running = None if checks_each else object()

    def end(self) -> None:
        """Say that the sampling is over."""
        self._is_running = self._checked = False
        Announced.running = None

    def covers_call(self) -> bool:
        """Return whether the network was checked since the sampling began."""
        return self._is_running and self._checked and not self._checks_each

    def note(self) -> None:
        """Record that the network was checked, if a sampling is running."""
        self._checked = self._is_running


class Beside(EachCall):
    """For networks whose host does not say when they sample, such as ControlNets.

    One check covers the sampling of another network that they take part in, if that is announced. Each other call is
    checked.
    """

    def __init__(self) -> None:
        self._checked: object | None = None

    def covers_call(self) -> bool:
        """Return whether the network was checked since the other one's sampling began."""
        return self._checked is not None and self._checked is Announced.running

    def note(self) -> None:
        """Record that the network was checked."""
        self._checked = Announced.running


class Scheduled:
    """For pipelines: each sets a new schedule of timesteps when it begins, and calls the network once per step.

    A user's own loop may use a schedule again. So one check covers only as many calls as the schedule has steps.
    """

    def __init__(self, schedules: Callable[[], list[Any]]) -> None:
        """`schedules` returns the timestep tensors of all pipelines that contain the network."""
        self._schedules = schedules
        self._checked: list[weakref.ref] = []
        self._calls_left = 0

    def covers_call(self) -> bool:
        """Return whether the present schedules were checked and have a step left for this call."""
        self._calls_left -= 1
        if self._calls_left < 0:
            return False
        schedules = self._schedules()
        return len(schedules) == len(self._checked) and all(r() is s for r, s in zip(self._checked, schedules))

    def note(self) -> None:
        """Record that the network was checked under the present schedules."""
        schedules = self._schedules()
        self._checked = [weakref.ref(schedule) for schedule in schedules]
        self._calls_left = min(map(len, schedules), default=1) - 1
