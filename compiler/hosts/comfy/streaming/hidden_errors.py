"""Errors that ComfyUI logs and goes on from: a LoRA for which there is no memory is left out of its weight.

`LoRAAdapter.calculate_weight` and its like catch whatever their arithmetic raises, log it, and return the weight as it
was. The image then lacks a part of the LoRA, and only the log says so.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def memory_errors_raised() -> Iterator[None]:
    """Raise torch.cuda.OutOfMemoryError after code of ComfyUI that has caught one, logged it, and gone on.

    Other errors that it logs stay its own: it meets them without compiled graphs, too.
    """
    listener = _Listener()
    root = logging.getLogger()  # ComfyUI logs there
    root.addHandler(listener)
    try:
        yield
    finally:
        root.removeHandler(listener)
    if listener.text is not None:
        raise torch.cuda.OutOfMemoryError(listener.text)


class _Listener(logging.Handler):
    """Notes whether this thread logs that it has run out of memory."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.text: str | None = None
        """What the error said. The error itself would keep the tensors of its frames."""
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]  # the record does not have it
        if isinstance(error, torch.cuda.OutOfMemoryError) and threading.get_ident() == self._thread:
            self.text = str(error)
