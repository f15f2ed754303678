"""How far compiling is, in ComfyUI's progress bar, in words on the node and in the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from ...common.words import Words, say
from ...runtime.summary import Progress, log_progress
from . import comfy_compat
from .texts import block_types, duration

log = logging.getLogger(__name__)

BEGINNING = say("Looking for the blocks that repeat in this model")
WORTH_ESTIMATING = 5.0
"""Seconds after which a person is told how many more there are."""


class ProgressReport:
    """Reports one run of a node. To be called with each graph that is settled."""

    def __init__(self, node_id: str, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`tell` is given the words that the node is to show."""
        self._node_id = node_id
        self._tell = tell
        self._clock = clock
        self._began = clock()
        self._bar: Any = None
        self._compiles = False

    def begin(self) -> None:
        """Say that something goes on before there is anything to count."""
        self._tell(BEGINNING)

    def __call__(self, progress: Progress) -> None:
        if self._bar is None:
            self._bar = comfy_compat.progress_bar(progress.total, self._node_id)
        if self._bar is not None:
            self._bar.update_absolute(progress.done, progress.total)
        self._compiles = self._compiles or progress.source == "compiled"
        self._tell(progress_text(progress.done, progress.total, self._compiles, self._clock() - self._began))
        log_progress(log, progress)


class BackgroundReport:
    """Reports what is compiled while the model runs: no bar, which is the sampler's then."""

    def __init__(self, tell: Callable[[], None]) -> None:
        """`tell` has the node show how its model stands."""
        self._tell = tell

    def begin(self) -> None:
        """Say nothing: the node shows a result already."""

    def __call__(self, progress: Progress) -> None:
        log_progress(log, progress)
        self._tell()


def progress_text(done: int, total: int, compiles: bool, elapsed: float) -> Words:
    """Return what a person is told, such as "Compiling 3 block types, 1 done, about 40 s left (once per model type)".

    The estimate takes what is left to go as fast as what is done; what takes longest goes first, so it is less.
    """
    types = block_types(total)
    if not done:
        return say("Preparing {types} (compiled once per model type)", types=types)
    if not compiles:
        return say("Loading {types}, {done} done", types=types, done=done)
    left = elapsed / done * (total - done)
    if elapsed < WORTH_ESTIMATING or left < 1:
        return say("Compiling {types}, {done} done (once per model type)", types=types, done=done)
    return say(
        "Compiling {types}, {done} done, about {left} left (once per model type)",
        types=types,
        done=done,
        left=duration(left, digits=0),
    )
