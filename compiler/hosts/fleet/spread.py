"""Hands items out to workers, each of which may be slow, refuse an item, or be lost with one.

Each worker takes the next item when it is free, so a slow one takes fewer. What a worker refuses, or is lost with, is
tried elsewhere, and what happened to it is said. Results come in the order of the items.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""An item is given up after it has lost this many workers."""
REPLACEMENTS = 3
"""How often a worker in one place is replaced."""


class Lost(Exception):
    """A worker cannot go on. The message says why, for people."""


class Refused(Exception):
    """A worker does not do this item, and others may. The message says why, for people."""


class Worker(Protocol):
    """Does one item at a time, on a thread of its own."""

    name: str
    """What people call it."""

    def run(self, item: Any) -> Any:
        """Do an item. Raises Lost, Refused, or what the item itself raises."""
        ...

    def replaced(self) -> Worker | None:
        """Return what takes its place after it was lost, or None. Raises Lost with a reason of its own."""
        ...

    def close(self) -> None:
        """Give up what it holds."""
        ...


@dataclass(frozen=True)
class Outcome:
    """What became of one item."""

    index: int
    """Its place among the items."""
    result: Any = None
    worker: str = ""
    """Who did it."""
    seconds: float = 0.0
    """How long that took."""
    error: str = ""
    """Why there is no result, for people; empty if there is one."""
    attempts: tuple[str, ...] = ()
    """What went wrong before, with the worker's name."""


@dataclass(frozen=True)
class Progress:
    """How far the items are."""

    done: int
    total: int
    working: int
    """Workers that are there."""
    seconds: float
    """Since the beginning."""
    said: str = ""
    """What has happened besides, for people."""

    def __str__(self) -> str:
        left = self.seconds / self.done * (self.total - self.done) if self.done else 0.0
        text = f"{self.done} of {self.total} done, {self.working} working"
        if self.done and left:
            text += f", about {left:.0f} s left"
        return f"{text}. {self.said}" if self.said else text


OnProgress = Callable[[Progress], None]


def log_progress(progress: Progress) -> None:
    """Write a line of progress to the log."""
    log.info("%s", progress)


@dataclass
class _Item:
    index: int
    content: Any
    attempts: list[str] = field(default_factory=list)
    refused_by: set[str] = field(default_factory=set)
    lost: int = 0


class Spread:
    """Items, and the workers that do them. Iterate over it once."""

    def __init__(self, items: Iterable[Any], workers: Sequence[Worker], on_progress: OnProgress = log_progress) -> None:
        self._items = [_Item(index, content) for index, content in enumerate(items)]
        self._waiting = deque(self._items)
        self._workers = {worker.name: worker for worker in workers}
        self._outcomes: dict[int, Outcome] = {}
        """Those that nobody has taken yet."""
        self._done = 0
        """Items that have an outcome."""
        self._on_progress = on_progress
        self._change = threading.Condition(threading.RLock())
        self._began = time.monotonic()
        self._is_over = False

    def __iter__(self) -> Iterator[Outcome]:
        """Yield the outcome of each item, in order. The workers stay open."""
        threads = [
            threading.Thread(target=self._work, args=(worker,), name=f"spread {worker.name}", daemon=True)
            for worker in self._workers.values()
        ]
        for thread in threads:
            thread.start()
        try:
            for item in self._items:
                with self._change:
                    self._change.wait_for(lambda index=item.index: index in self._outcomes)
                    outcome = self._outcomes.pop(item.index)
                yield outcome
        finally:
            with self._change:
                self._is_over = True
                self._change.notify_all()

    def workers(self) -> list[Worker]:
        """Return the workers that are there now."""
        with self._change:
            return list(self._workers.values())

    def _work(self, worker: Worker) -> None:
        """Do items until none is left for this worker."""
        replacements = REPLACEMENTS
        while (item := self._next(worker)) is not None:
            start = time.monotonic()
            try:
                result = worker.run(item.content)
            except Refused as error:
                self._refuse(item, worker, str(error))
            except Lost as error:
                self._lose(item, worker, str(error))
                worker = self._replace(worker, replacements)
                replacements -= 1
                if worker is None:
                    return
            except Exception as error:  # the item's own: another worker would raise it as well
                self._end(item, Outcome(item.index, None, worker.name, 0.0, f"{type(error).__name__}: {error}"))
            else:
                self._end(item, Outcome(item.index, result, worker.name, time.monotonic() - start))

    def _next(self, worker: Worker) -> _Item | None:
        """Return the next item that this worker has not refused; wait while others may yet give one back."""
        with self._change:
            while not self._is_over and self._done < len(self._items):
                item = next((each for each in self._waiting if worker.name not in each.refused_by), None)
                if item is not None:
                    self._waiting.remove(item)
                    return item
                self._change.wait()
        return None

    def _refuse(self, item: _Item, worker: Worker, reason: str) -> None:
        with self._change:
            item.attempts.append(f"{worker.name}: {reason}")
            item.refused_by.add(worker.name)
            if self._workers.keys() <= item.refused_by:
                self._end(item, Outcome(item.index, error=f"no worker does it ({'; '.join(item.attempts)})"))
                return
            self._put_back(item)
            self._tell(f"{worker.name} refuses item {item.index + 1}: {reason}. It is tried elsewhere.")

    def _put_back(self, item: _Item) -> None:
        """Have another worker do an item. It may be waiting by now."""
        self._waiting.appendleft(item)
        self._change.notify_all()

    def _lose(self, item: _Item, worker: Worker, reason: str) -> None:
        with self._change:
            del self._workers[worker.name]
            item.attempts.append(f"{worker.name}: {reason}")
            item.lost += 1
            if item.lost >= ATTEMPTS:
                error = f"it was lost {item.lost} times ({'; '.join(item.attempts)})"
                self._end(item, Outcome(item.index, error=error))
            else:
                self._put_back(item)
                self._tell(f"{worker.name} is lost: {reason}. Item {item.index + 1} is tried elsewhere.")

    def _replace(self, worker: Worker, left: int) -> Worker | None:
        """Return what takes the place of a lost worker, or end what nobody is there to do."""
        try:
            found = worker.replaced() if left > 0 and not self._is_over else None
            said = f"{found.name} takes the place of {worker.name}." if found else ""
        except Exception as error:  # also what the code that makes a worker raises, such as too little memory
            reason = str(error) if isinstance(error, Lost) else f"{type(error).__name__}: {error}"
            found, said = None, f"{worker.name} is not replaced: {reason}."
        with self._change:
            if found is not None:
                self._workers[found.name] = found
            if said:
                self._tell(said)
            for item in list(self._waiting):
                if self._workers.keys() <= item.refused_by:
                    self._waiting.remove(item)
                    text = "; ".join(item.attempts) or said or "the last one is lost"
                    self._end(item, Outcome(item.index, error=f"no worker is left for it ({text})"))
            self._change.notify_all()
        return found

    def _end(self, item: _Item, outcome: Outcome) -> None:
        with self._change:
            self._outcomes[item.index] = Outcome(
                outcome.index, outcome.result, outcome.worker, outcome.seconds, outcome.error, tuple(item.attempts)
            )
            self._done += 1
            self._tell(f"Item {item.index + 1} has failed: {outcome.error}." if outcome.error else "")
            self._change.notify_all()

    def _tell(self, said: str) -> None:
        seconds = time.monotonic() - self._began
        try:
            self._on_progress(Progress(self._done, len(self._items), len(self._workers), seconds, said))
        except Exception as error:  # it is the caller's, and the work goes on without it
            log.warning("Progress could not be told: %r", error)
