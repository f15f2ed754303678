"""Falls back to eager for good if a network is slower with its graphs.

Blocks that are timed one by one can only raise a doubt. They say nothing of what runs between them, nor of steps that
are replayed without Python. So one to three samplings then run uncompiled, and are timed as the compiled ones were.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum, auto

from ..common.reason import Reason, ReasonCode
from ..common.timing import CallTime, Gain, LatencyTracker

DOUBTED = 1.05
"""A gain below this, of blocks timed one by one, is doubted. This timing favours graphs: it waits for the GPU after
each block, and in a step the next block is queued already."""
MARGIN = 0.97
"""Uncompiled calls must take less than this share of compiled ones. Nobody sees a loss of three percent, and medians of
the same calls can differ by one or two between samplings: a GPU gets warm, and changes its clock."""
MIN_CALLS = 8
"""Calls of a size, each way, that a decision needs. The first few of a sampling can be unlike the others."""
MAX_SAMPLINGS = 3
"""Samplings that are made uncompiled in search of a decision. Then the sizes keep changing, and the graphs stay."""
MIN_ALONE, MAX_ALONE = 3, 6
"""The same for networks that are called once a prompt, such as a VAE's decoder: each call counts as a sampling."""


class _State(Enum):
    COMPILED = auto()
    TIMES_EAGER = auto()
    KEEPS_GRAPHS = auto()
    RUNS_EAGERLY = auto()


class SpeedTrial:
    """The trial of one network, by the calls of one of its methods. Lasts as long as the network."""

    @classmethod
    def of_calls(cls) -> SpeedTrial:
        """Return the trial of a network that is called once a step and not told when a sampling ends.

        That is a ControlNet, or a model in a ComfyUI from before 2025.
        """
        return cls(MIN_CALLS, 2 * MIN_CALLS)

    @classmethod
    def of_decoder(cls) -> SpeedTrial:
        """Return the trial of a VAE's decoder, whose calls belong to no sampling."""
        return cls(MIN_ALONE, MAX_ALONE)

    @classmethod
    def of_encoder(cls) -> SpeedTrial:
        """Return the trial of a text encoder. It is always doubted: its blocks are so small that what runs between
        them takes as long. The uncompiled prompts that this takes are few: T5-XXL takes 0.05 s longer for each.
        """
        return cls(MIN_ALONE, MAX_ALONE, doubted=math.inf)

    def __init__(
        self, enough_calls: int = MIN_CALLS, most_samplings: int = MAX_SAMPLINGS, doubted: float = DOUBTED
    ) -> None:
        self.latency = LatencyTracker()
        """What uncompiled calls take; told by whoever makes them."""
        self.factor: float | None = None
        """What compiled calls gain over uncompiled ones of their size, as measured; None before a decision."""
        self._state = _State.COMPILED
        self._compiled: dict[tuple, float] = {}
        """The seconds of compiled calls, by what makes calls alike."""
        self._samplings = 0
        self._enough_calls = enough_calls
        self._most_samplings = most_samplings
        self._doubted = doubted

    @property
    def runs_eagerly(self) -> bool:
        """Whether the calls of the running sampling are made uncompiled."""
        return self._state in (_State.TIMES_EAGER, _State.RUNS_EAGERLY)

    @property
    def has_fallen_back(self) -> bool:
        """Whether it was decided that the network goes on uncompiled."""
        return self._state is _State.RUNS_EAGERLY

    @property
    def reason(self) -> Reason:
        """Why calls are made uncompiled, while they are."""
        if self.has_fallen_back:
            return Reason(ReasonCode.SLOWER, f"{self.factor:.2f}x")
        return Reason(ReasonCode.TIMED_UNCOMPILED)

    def end_sampling(self, gain: Gain | None, figures: Iterable[CallTime]) -> None:
        """Decide how the next sampling is made.

        `gain` is what the network seems to gain, if that is final, and `figures` are those of its compiled calls.
        """
        if self._state is _State.COMPILED and gain is not None and gain.factor < self._doubted:
            self._compiled = self._by_size(figures)
            self._state = _State.TIMES_EAGER if self._compiled else _State.COMPILED
        elif self._state is _State.TIMES_EAGER:
            self._samplings += 1
            self._compare()

    def _compare(self) -> None:
        plain = self._by_size(self.latency.figures())
        both = {kind: seconds for kind, seconds in plain.items() if kind in self._compiled}
        if both:
            kind, seconds = both.popitem()  # the size that was called last
            self.factor = seconds / self._compiled[kind]
            self._state = _State.RUNS_EAGERLY if self.factor < MARGIN else _State.KEEPS_GRAPHS
        elif self._samplings >= self._most_samplings:
            self._state = _State.KEEPS_GRAPHS

    def _by_size(self, figures: Iterable[CallTime]) -> dict[tuple, float]:
        enough = (figure for figure in figures if figure.calls >= self._enough_calls)
        return {(figure.shape, figure.brings_weights): figure.seconds for figure in enough}
