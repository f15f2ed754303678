"""Compile jobs: one at a time, on a thread of their own, with a limit.

A thread of its own because hosts call us inside `torch.inference_mode`, which tracing cannot bear, and
because a compiler that never returns must not take the person's queue with it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

DEFAULT_LIMIT = 600.0
"""Seconds for one region. The slowest seen so far took 25, on two busy cores."""


class CompileTimeout(Exception):
    """A job outlasted its limit; the message is the reason a person is shown."""


class CompileJobs:
    """Runs jobs one after another, whichever threads ask."""

    def __init__(self, wait: Callable[[threading.Thread, float], None] = threading.Thread.join) -> None:
        """`wait` waits for the end of a job's thread, at most so many seconds."""
        self._wait = wait
        self._turn = threading.Lock()
        self._stuck: tuple[threading.Thread, str] | None = None

    def run(self, name: str, job: Callable[[], T], limit: float | None = None) -> T:
        """Run a job and return its result or raise its exception.

        Raises CompileTimeout past `limit` seconds, and at once while an earlier job still hangs: two
        compilers in one process are not safe.
        """
        limit = compile_limit() if limit is None else limit
        with self._turn:
            if self._stuck and self._stuck[0].is_alive():
                raise CompileTimeout(f"the compiler still hangs on {self._stuck[1]}; restart to compile again")
            outcome: dict[str, Any] = {}
            thread = threading.Thread(target=_settle, args=(job, outcome), name=f"compile {name}", daemon=True)
            thread.start()
            self._wait(thread, limit)
            if thread.is_alive():
                self._stuck = (thread, name)
                raise CompileTimeout(f"the compiler took more than {limit:g} s")
        if "error" in outcome:
            raise outcome["error"]
        return outcome["result"]


def _settle(job: Callable[[], Any], outcome: dict[str, Any]) -> None:
    try:
        outcome["result"] = job()
    except BaseException as error:  # handed to the thread that waits
        outcome["error"] = error


def side_by_side(jobs: Iterable[Callable[[], T]], count: int, check: Callable[[], None] = lambda: None) -> Iterator[T]:
    """Yield the results of jobs as they come, from this many threads; raise what one of them raises.

    `check` is called meanwhile. What it raises, or an end of the iteration, lets running jobs finish unheard and the
    others be; threads do not keep the process from ending.
    """
    waiting = deque(jobs)
    outcomes: SimpleQueue[dict[str, Any]] = SimpleQueue()

    def work() -> None:
        while True:
            try:
                job = waiting.popleft()
            except IndexError:
                return
            _settle(job, outcome := {})
            outcomes.put(outcome)

    total = len(waiting)
    for number in range(min(count, total)):
        threading.Thread(target=work, name=f"side by side {number}", daemon=True).start()
    try:
        for _ in range(total):
            outcome = _wait_for(outcomes, check)
            if "error" in outcome:
                raise outcome["error"]
            yield outcome["result"]
    finally:
        waiting.clear()


def _wait_for(outcomes: SimpleQueue[dict[str, Any]], check: Callable[[], None]) -> dict[str, Any]:
    while True:
        check()
        with suppress(Empty):
            return outcomes.get(timeout=0.1)


def compile_limit() -> float:
    """Return the seconds that one region may take; COMPILED_GRAPHS_COMPILE_LIMIT sets others."""
    try:
        return float(os.environ.get("COMPILED_GRAPHS_COMPILE_LIMIT", DEFAULT_LIMIT))
    except ValueError:
        return DEFAULT_LIMIT
