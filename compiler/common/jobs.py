"""Compile jobs run one at a time, each on a thread of its own, with a time limit.

A job needs its own thread for two reasons. Hosts call us inside `torch.inference_mode`, in which tracing fails. And a
compiler that never returns must not block the person's queue.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from .reason import ReasonCode, ReasonedError

T = TypeVar("T")

DEFAULT_LIMIT = 600.0
"""Seconds for one region. The slowest region seen so far took 25 s, on two busy cores."""


class CompileTimeout(ReasonedError):
    """A job took longer than its limit."""


class CompileJobs:
    """Runs the jobs of all threads one after another."""

    def __init__(self, wait: Callable[[threading.Thread, float], None] = threading.Thread.join) -> None:
        """`wait` waits for a job's thread to end, at most for the given number of seconds."""
        self._wait = wait
        self._turn = threading.Lock()
        self._stuck: tuple[threading.Thread, str] | None = None
        self._interrupted: threading.Thread | None = None
        """The thread of a job that nobody waits for any more. The next job does, up to its own limit."""

    def run(
        self,
        name: str,
        job: Callable[[], T],
        limit: float | None = None,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> T:
        """Run a job and return its result or raise its exception.

        `around` makes a context that this thread enters when it is the job's turn, and leaves at the limit.
        Raises CompileTimeout after `limit` seconds. It raises at once while an earlier job still hangs: two
        compilers in one process are not safe.
        """
        limit = compile_limit() if limit is None else limit
        with self._turn:
            if self._interrupted is not None:  # it may be quick: its limit has not passed
                self._wait(self._interrupted, limit)
                self._interrupted = None
            if self._stuck and self._stuck[0].is_alive():
                raise CompileTimeout(ReasonCode.HANGS, self._stuck[1])
            outcome: dict[str, Any] = {}
            thread = threading.Thread(target=_run_into, args=(job, outcome), name=f"compile {name}", daemon=True)
            with around():
                thread.start()
                try:
                    self._wait(thread, limit)
                except BaseException:  # somebody interrupts this thread, and not the job
                    self._interrupted, self._stuck = thread, (thread, name)
                    raise
            if thread.is_alive():
                self._stuck = (thread, name)
                raise CompileTimeout(ReasonCode.TIMEOUT, f"{limit:g} s")
        if "error" in outcome:
            raise outcome["error"]
        return outcome["result"]


def _run_into(job: Callable[[], Any], outcome: dict[str, Any]) -> None:
    try:
        outcome["result"] = job()
    except BaseException as error:  # the thread that waits raises it
        outcome["error"] = error


def side_by_side(jobs: Iterable[Callable[[], T]], count: int, check: Callable[[], None] = lambda: None) -> Iterator[T]:
    """Run jobs on `count` threads. Yield their results as they come, and raise what a job raises.

    `check` is called while waiting. If it or a job raises, or the caller stops iterating, no further jobs start, and
    the results of running jobs are dropped. The threads are daemons: they do not keep the process alive.
    """
    waiting = deque(jobs)
    outcomes: SimpleQueue[dict[str, Any]] = SimpleQueue()

    def work() -> None:
        while True:
            try:
                job = waiting.popleft()
            except IndexError:
                return
            _run_into(job, outcome := {})
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
    """Return how many seconds one region may take: COMPILED_GRAPHS_COMPILE_LIMIT, or DEFAULT_LIMIT."""
    try:
        return float(os.environ.get("COMPILED_GRAPHS_COMPILE_LIMIT", DEFAULT_LIMIT))
    except ValueError:
        return DEFAULT_LIMIT
