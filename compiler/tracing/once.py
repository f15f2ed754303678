"""Operators are defined once in a process, whoever asks first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache, wraps


def once(define: Callable[[], None]) -> Callable[[], None]:
    """Have a function run once. A thread that calls it meanwhile waits.

    One thread loads graphs while another one traces. An operator that is defined in part has no fake implementation
    yet, and would run on tensors without data.
    """
    lock, defined = threading.Lock(), lru_cache(maxsize=1)(define)

    @wraps(define)
    def define_once() -> None:
        with lock:
            defined()

    return define_once
