"""Background jobs run one after another while a model runs. Their thread ends when no job is left."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

from ..common.host import Host

log = logging.getLogger(__name__)


class Background:
    """A queue of named jobs. A job that waits or runs already is not added again."""

    def __init__(self, on_idle: Callable[[], None] = lambda: None, host: Host | None = None) -> None:
        """`on_idle` is called on the queue's thread whenever no job is left."""
        self._on_idle = on_idle
        self._host = host or Host()
        self._jobs: OrderedDict[Hashable, Callable[[], None]] = OrderedDict()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, name: Hashable, job: Callable[[], None]) -> None:
        """Queue a job. The queue logs what it raises."""
        with self._lock:
            if name in self._jobs:
                return
            self._jobs[name] = job
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="compile in background", daemon=True)
                self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether a job waits or runs."""
        return bool(self._jobs)

    def wait(self, check: Callable[[], None] = lambda: None, every: float = 0.1) -> None:
        """Return when all jobs are done. `check` is called every `every` seconds; what it raises ends the wait."""
        while self.is_busy:
            check()
            time.sleep(every)

    def _work(self) -> None:
        while (item := self._next()) is not None:
            name, job = item
            try:
                job()
            except BaseException as error:  # nobody outside of this thread could catch it
                if self._is_for_prompt(error):
                    continue
                log.warning("Compiling in the background failed: %s: %s", type(error).__name__, error)
                log.debug("Compiling in the background failed", exc_info=error)
            with self._lock:
                self._jobs.pop(name)
        self._on_idle()

    def _is_for_prompt(self, error: BaseException, every: float = 0.05) -> bool:
        """Whether an error is a cancellation that was meant for a prompt. Returns when that prompt has ended.

        The job then runs again. If the cancellation cannot be handed back, the job counts as failed.
        """
        try:
            if not self._host.is_cancellation(error):
                return False
            self._host.return_cancellation()
            while self._host.is_cancelled():
                time.sleep(every)
        except Exception as other:
            log.warning("A cancellation could not be handed back: %s: %s", type(other).__name__, other)
            return False
        return True

    def _next(self) -> tuple[Hashable, Callable[[], None]] | None:
        with self._lock:
            if not self._jobs:
                self._thread = None
                return None
            return next(iter(self._jobs.items()))
