"""Claims: how machines that share an object store take turns, where there are no locks.

A machine that wants to compile a graph writes an object with a name of its own beside it, waits a moment, and reads it
back. The last writer's name is there. So one of those that came at once goes on, and the others wait. It writes the
object again every few seconds while it compiles: a claim that no longer changes is a dead machine's. No clocks are
compared.

Two machines compile the same graph if the store takes longer than SETTLE to show what was written, if it does not
answer, if a machine stands still for STALE seconds and then goes on, or if a compile takes longer than the limit.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

log = logging.getLogger(__name__)

SETTLE = 1.0
"""Seconds in which every machine sees what another one wrote."""
BEAT = 5.0
"""Seconds after which a claim is written again."""
STALE = 30.0
"""Seconds without a change after which a claim is a dead machine's."""
POLL = 1.0


class Place(Protocol):
    """The object of a claim. Each method raises OSError if the store does not answer."""

    def read(self) -> bytes | None:
        """Return what the object says, or None if it is not there."""

    def write(self, data: bytes) -> None:
        """Write the object."""

    def delete(self) -> None:
        """Delete the object."""


@contextmanager
def claimed(place: Place, limit: float, is_made: Callable[[], bool] = lambda: False) -> Iterator[bool]:
    """Hold a claim inside the block, and say whether it is held.

    Another machine's claim is waited for, until it has made what was claimed. After `limit` seconds, or if the store
    fails, the block runs without one.
    """
    name = secrets.token_hex(16).encode()
    try:
        is_ours = _take(place, name, limit, is_made)
    except OSError as error:
        log.debug("No claim (%r): two machines may compile the same graph.", error)
        is_ours = False
    if not is_ours:
        yield False
        return
    ended = threading.Event()
    beating = threading.Thread(target=_beat, args=(place, name, ended), name="compiled_graphs claim", daemon=True)
    beating.start()
    try:
        yield True
    finally:
        ended.set()
        beating.join()
        with suppress(OSError):
            place.delete()


def _take(place: Place, name: bytes, limit: float, is_made: Callable[[], bool]) -> bool:
    """Wait until nobody else has a claim, and take it. Return False if it is not needed, or that takes too long."""
    deadline = time.monotonic() + limit
    seen, since = None, time.monotonic()
    while time.monotonic() < deadline:
        if is_made():  # all that wait would take the claim one after another, for nothing
            return False
        held = place.read()
        if held != seen:
            seen, since = held, time.monotonic()
        if held is None or time.monotonic() - since >= STALE:
            place.write(name)
            time.sleep(SETTLE)
            seen = place.read()
            if seen is not None and seen.startswith(name):
                return True
            since = time.monotonic()
        else:
            time.sleep(POLL)
    log.warning("Another machine has compiled for %.0f s. This one compiles without waiting.", limit)
    return False


def _beat(place: Place, name: bytes, ended: threading.Event) -> None:
    count = 0
    while not ended.wait(BEAT):
        count += 1
        with suppress(OSError):
            place.write(name + b" %d" % count)
