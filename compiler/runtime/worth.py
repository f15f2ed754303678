"""Whether a network is worth its graphs. Where it is slower with them, it goes on without, decided once and for good.

Blocks timed one by one raise a doubt, and no more: they say nothing of what runs between them, nor of steps that are
replayed without Python. So steps are then made uncompiled for a sampling or two, and timed as the compiled ones were.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum, auto

from ..common.reason import Reason, ReasonCode
from ..common.timing import CallTime, Gain, LatencyTracker

DOUBTED = 1.05
"""A gain below this, of blocks timed one by one, is doubted. It flatters graphs: the device is waited for after each
block, and in a step the next one is on its way by then."""
MARGIN = 0.97
"""Uncompiled calls must take less than this share of compiled ones. Nobody sees a loss of three percent, and medians of
the same calls can differ by one or two between samplings: a GPU gets warm, and changes its clock."""
ENOUGH_CALLS = 8
"""Calls of a size, each way, that a decision needs. The first few of a sampling can be unlike the others."""
MOST_SAMPLINGS = 3
"""Samplings that are made uncompiled in search of a decision. Then the sizes keep changing, and the graphs stay."""
ENOUGH_ALONE, MOST_ALONE = 3, 6
"""The same for networks that are called once a prompt, such as a VAE's decoder: each call counts as a sampling."""


class _State(Enum):
    UNDOUBTED = auto()
    TRIED = auto()
    KEPT = auto()
    LEFT = auto()


class Worth:
    """What is known of a network, by the calls of one of its methods. Lasts as long as the network."""

    @classmethod
    def of_calls(cls) -> Worth:
        """Return the worth of a network that is called once a step and not told when a sampling ends.

        That is a ControlNet, or a model in a ComfyUI from before 2025.
        """
        return cls(ENOUGH_CALLS, 2 * ENOUGH_CALLS)

    @classmethod
    def of_decoder(cls) -> Worth:
        """Return the worth of a VAE's decoder, whose calls belong to no sampling."""
        return cls(ENOUGH_ALONE, MOST_ALONE)

    @classmethod
    def of_encoder(cls) -> Worth:
        """Return the worth of a text encoder. It is always doubted: its blocks are so small that what runs between
        them takes as long. The uncompiled prompts that this takes are few: T5-XXL takes 0.05 s longer for each.
        """
        return cls(ENOUGH_ALONE, MOST_ALONE, doubted=math.inf)

    def __init__(
        self, enough_calls: int = ENOUGH_CALLS, most_samplings: int = MOST_SAMPLINGS, doubted: float = DOUBTED
    ) -> None:
        self.pace = LatencyTracker()
        """What uncompiled calls take; told by whoever makes them."""
        self.factor: float | None = None
        """What compiled calls gain over uncompiled ones of their size, as measured; None before a decision."""
        self._state = _State.UNDOUBTED
        self._compiled: dict[tuple, float] = {}
        """The seconds of compiled calls, by what makes calls alike."""
        self._samplings = 0
        self._enough_calls = enough_calls
        self._most_samplings = most_samplings
        self._doubted = doubted

    @property
    def is_plain(self) -> bool:
        """Whether the calls of the running sampling are made uncompiled."""
        return self._state in (_State.TRIED, _State.LEFT)

    @property
    def is_left(self) -> bool:
        """Whether it was decided that the network goes on uncompiled."""
        return self._state is _State.LEFT

    @property
    def reason(self) -> Reason:
        """Why calls are made uncompiled, while they are."""
        if self.is_left:
            return Reason(ReasonCode.SLOWER, f"{self.factor:.2f}x")
        return Reason(ReasonCode.TIMED_UNCOMPILED)

    def end_sampling(self, gain: Gain | None, figures: Iterable[CallTime]) -> None:
        """Decide how the next sampling is made.

        `gain` is what the network seems to gain, if that is final, and `figures` are those of its compiled calls.
        """
        if self._state is _State.UNDOUBTED and gain is not None and gain.factor < self._doubted:
            self._compiled = self._by_size(figures)
            self._state = _State.TRIED if self._compiled else _State.UNDOUBTED
        elif self._state is _State.TRIED:
            self._samplings += 1
            self._compare()

    def _compare(self) -> None:
        plain = self._by_size(self.pace.figures())
        both = {kind: seconds for kind, seconds in plain.items() if kind in self._compiled}
        if both:
            kind, seconds = both.popitem()  # the size that was called last
            self.factor = seconds / self._compiled[kind]
            self._state = _State.LEFT if self.factor < MARGIN else _State.KEPT
        elif self._samplings >= self._most_samplings:
            self._state = _State.KEPT

    def _by_size(self, figures: Iterable[CallTime]) -> dict[tuple, float]:
        enough = (figure for figure in figures if figure.calls >= self._enough_calls)
        return {(figure.shape, figure.brings_weights): figure.seconds for figure in enough}
