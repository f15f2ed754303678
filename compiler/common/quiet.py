"""Keeps errors that are expected off a person's console."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet(logger: str) -> Iterator[None]:
    """Drop what this thread logs by a logger, inside the block. What other threads log is told as always."""
    own, thread = logging.getLogger(logger), threading.get_ident()

    def is_of_another(record: logging.LogRecord) -> bool:
        return record.thread != thread

    own.addFilter(is_of_another)
    try:
        yield
    finally:
        own.removeFilter(is_of_another)
