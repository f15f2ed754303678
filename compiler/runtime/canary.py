"""Which call of a block is compared with eager next, though its graph was proven right before.

A watch sees what code can read. What it cannot see (a kernel that was replaced, state of another library) shows in
what a block gives. So one block call in many is compared, each block in turn. The share below bounds what that costs.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from .running_call import RunningCall

CALLS = 1600
"""Block calls for each one that is compared: 0.6% of the time of SDXL's steps on an H200 (benchmarks/watch.py)."""
REPLAYS = 200
"""Replayed steps for each one that is called block by block to compare one: 0.5% there, since it takes as two."""


class _Forward(Protocol):
    check_next: bool


F = TypeVar("F", bound=_Forward)


class Canary:
    """Knows what has run since the last comparison."""

    def __init__(self) -> None:
        self._share = 0.0
        """Of what may run until the next comparison."""
        self._turn = 0

    def note(self, call: RunningCall) -> None:
        """Take note of a call of the network that has ended."""
        self._share += 1 / REPLAYS if call.was_replayed else call.regions / CALLS

    def is_due(self) -> bool:
        """Whether enough has run since the last comparison."""
        return self._share >= 1

    def choose(self, forwards: list[F]) -> F | None:
        """Return whose call is compared next."""
        self._share = 0.0
        if not forwards:
            return None
        self._turn += 1
        return forwards[self._turn % len(forwards)]
