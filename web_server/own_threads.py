"""Threads for what this extension answers. ComfyUI's own answers need those that asyncio keeps, which are few.

A folder on the network can stop answering for minutes, and whoever reads it then waits. Prometheus asks every few
seconds. So there is a limit, and whoever asks beyond it is told at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ..compiler.common.words import say

MAX_REQUESTS = 8
"""Requests that are served at a time."""
_free = threading.BoundedSemaphore(MAX_REQUESTS)

T = TypeVar("T")


class Busy(Exception):
    """Too many requests wait already. The text is a sentence for people."""


async def in_own_thread(work: Callable[..., T], *args: object) -> T:
    """Return what `work` does on a thread that does not keep the process from ending. Raises Busy, and as it does."""
    if not _free.acquire(blocking=False):
        raise Busy(say("Earlier requests still wait: perhaps the folder of the compiled graphs does not answer."))
    answer: Future[T] = Future()

    def run() -> None:
        answer.set_running_or_notify_cancel()
        try:
            answer.set_result(work(*args))
        except BaseException as error:
            answer.set_exception(error)
        finally:
            _free.release()

    try:
        threading.Thread(target=run, name="answer a request", daemon=True).start()
    except RuntimeError:  # the system has no thread left
        _free.release()
        raise
    return await asyncio.wrap_future(answer)
