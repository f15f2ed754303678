"""What a call leaves to Python's garbage collector: maps that take a GPU's memory until it runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_tensors_in_cycles() -> Iterator[None]:
    """Fail if the body leaves tensors that only the garbage collector can free."""
    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        assert not [tuple(each.shape) for each in gc.garbage if isinstance(each, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
