"""How far compiling is, in ComfyUI's progress bar, in words on the node and in the log."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import Any

from ...runtime.summary import Progress, log_progress
from . import comfy_compat

log = logging.getLogger(__name__)

BEGINNING = "looking which blocks there are"
WORTH_ESTIMATING = 5.0
"""Seconds after which a person is told how many more there are."""
_SOURCES = {"memory": "in memory already", "disk": "loaded from disk", "eager": "stays uncompiled"}


class ProgressReport:
    """Reports one run of a node. To be called with each graph that is settled."""

    def __init__(self, node_id: str, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`tell` is given the words that the node is to show."""
        self._node_id = node_id
        self._tell = tell
        self._clock = clock
        self._began = clock()
        self._bar: Any = None

    def begin(self) -> None:
        """Say that something goes on before there is anything to count."""
        self._tell(BEGINNING)

    def __call__(self, progress: Progress) -> None:
        if self._bar is None:
            self._bar = comfy_compat.progress_bar(progress.total, self._node_id)
        if self._bar is not None:
            self._bar.update_absolute(progress.done, progress.total)
        self._tell(progress_text(progress, self._clock() - self._began))
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


def progress_text(progress: Progress, elapsed: float) -> str:
    """Return what a person is told, such as "3 of 14: res block, middle block 0: compiled in 9.1 s; about 40 s left".

    The estimate takes what is left to go as fast as what is done; what takes longest goes first, so it is less.
    """
    done = _SOURCES.get(progress.source, f"{progress.source} in {progress.seconds:.1f} s")
    text = f"{progress.done} of {progress.total}: {in_words(progress.region)}: {done}"
    left = elapsed / progress.done * (progress.total - progress.done)
    if elapsed >= WORTH_ESTIMATING and left >= 1:
        text += f"; about {_duration(left)} left"
    return text


def in_words(region: str) -> str:
    """Return a region's label, such as "SpatialTransformer (input_blocks.4.1)", in words."""
    name, _, path = region.partition(" (")
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", name).lower()
    place = re.sub(r"[._]+", " ", path.rstrip(")"))
    return f"{words}, {place}" if place else words


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
