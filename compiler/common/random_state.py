"""Keeps our own work from advancing the random number generators, whose seeds are for the user's image."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Restore the states of the generators of Python, numpy and torch at the end.

    Code of blocks and of extensions may draw from any of them when it runs ahead of time.
    """
    python, on_cpu = random.getstate(), torch.get_rng_state()
    numpy = sys.modules.get("numpy")
    arrays = numpy.random.get_state() if numpy else None
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(on_cpu)
        if arrays is not None:
            numpy.random.set_state(arrays)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, device)
