"""What a call leaves to Python's garbage collector: maps that take a GPU's memory until it runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_tensors_in_cycles() -> Iterator[None]:
    """Fail if the body makes tensors that only the garbage collector can free.

    Weights, and what ComfyUI drops meanwhile, such as models of earlier tests, do not count.
    """
    before = {id(each): weakref.ref(each) for each in gc.get_objects() if type(each) is torch.Tensor}

    def is_new(value: object) -> bool:
        known = before.get(id(value))
        return type(value) is torch.Tensor and (known is None or known() is not value)

    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        assert not [tuple(each.shape) for each in gc.garbage if is_new(each)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
