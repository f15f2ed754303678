"""Keeps our own work from advancing the random number generators, whose seeds are for the user's image."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class _Shared:
    """The generators that all threads share. Where several keep them at a time, the first saves and the last restores.

    Each for itself, a thread would restore what another one had drawn in between.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keepers = 0
        self._restore: Callable[[], None] = lambda: None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the states at the end of the last block that runs."""
        with self._lock:
            if self._keepers == 0:
                self._restore = _saved()
            self._keepers += 1
        try:
            yield
        finally:
            with self._lock:
                self._keepers -= 1
                if self._keepers == 0:
                    self._restore()


_shared = _Shared()


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Restore the states of the generators of Python, numpy and torch at the end.

    Code of blocks and of extensions may draw from any of them when it runs ahead of time.
    """
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    with _shared.kept():
        try:
            yield
        finally:
            if on_gpu is not None:
                torch.cuda.set_rng_state(on_gpu, device)


def saved_random_numbers(device: torch.device) -> Callable[[], None]:
    """Return what sets the generators of Python, numpy and torch back to what they are now, on a device and the CPU."""
    restore_shared = _saved()
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore() -> None:
        restore_shared()
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, device)

    return restore


def _saved() -> Callable[[], None]:
    """Return what restores the generators of Python, numpy and torch's CPU to what they are now."""
    python, on_cpu = random.getstate(), torch.get_rng_state()
    numpy = sys.modules.get("numpy")
    arrays = numpy.random.get_state() if numpy else None

    def restore() -> None:
        random.setstate(python)
        torch.set_rng_state(on_cpu)
        if arrays is not None:
            numpy.random.set_state(arrays)

    return restore
