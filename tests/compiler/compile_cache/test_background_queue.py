"""The queue of background jobs."""

from __future__ import annotations

import threading

import pytest
from compiled_graphs.compiler.common.host import Host
from compiled_graphs.compiler.compile_cache.background_queue import Background


@pytest.fixture
def held():
    """Yield a background whose first job waits for an event, and the event."""
    background, event = Background(), threading.Event()
    background.submit("held", event.wait)
    yield background, event
    event.set()
    background.wait(every=0.001)


def test_jobs_run_one_after_another_in_order(held):
    background, event = held
    done = []
    for number in range(3):
        background.submit(number, lambda number=number: done.append(number))
    assert done == []
    event.set()
    background.wait(every=0.001)
    assert done == [0, 1, 2]


def test_waiting_or_running_job_is_not_added_twice(held):
    background, event = held
    done = []
    background.submit("held", lambda: done.append("held again"))
    background.submit("one", lambda: done.append("one"))
    background.submit("one", lambda: done.append("one again"))
    event.set()
    background.wait(every=0.001)
    assert done == ["one"]


def test_a_job_may_be_submitted_again_when_it_is_done():
    background, done = Background(), []
    for _ in range(2):
        background.submit("one", lambda: done.append(1))
        background.wait(every=0.001)
    assert done == [1, 1]


def test_a_job_that_fails_does_not_stop_the_next(held, caplog):
    background, event = held
    done = []
    background.submit("bad", lambda: 1 / 0)
    background.submit("good", lambda: done.append(1))
    event.set()
    background.wait(every=0.001)
    assert done == [1]
    assert "ZeroDivisionError" in caplog.text


def test_waiting_can_be_cancelled(held):
    background, _ = held
    with pytest.raises(KeyboardInterrupt):
        background.wait(lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert background.is_busy


def test_the_thread_ends_when_nothing_is_left():
    background = Background()
    background.submit("one", lambda: None)
    background.wait(every=0.001)
    for thread in threading.enumerate():
        if thread.name == "compile in background":
            thread.join()
    assert background._thread is None


class Cancelled(BaseException):
    """A cancellation as ComfyUI raises it since 2026: it is no subclass of Exception."""


class CancellingHost(Host):
    """A host whose layers raise the person's cancellation on whatever thread they run."""

    def __init__(self):
        self.flag, self.seen = True, threading.Event()

    def is_cancellation(self, error):
        return isinstance(error, Cancelled)

    def return_cancellation(self):
        self.flag = True
        self.seen.set()

    def is_cancelled(self):
        return self.flag

    def layer(self):
        if self.flag:
            self.flag = False
            raise Cancelled


def test_cancelled_job_runs_again_after_the_prompt():
    host, done = CancellingHost(), []
    background = Background(host=host)
    background.submit("one", lambda: (host.layer(), done.append(1)))
    host.seen.wait()
    assert host.flag
    assert not done
    host.flag = False  # the prompt has been cancelled, and the next one starts
    background.wait(every=0.001)
    assert done == [1]


def test_next_job_runs_after_any_exception(caplog):
    background, done = Background(), []

    def exit_thread():
        raise SystemExit

    background.submit("bad", exit_thread)
    background.submit("good", lambda: done.append(1))
    background.wait(every=0.001)
    assert done == [1]


def test_a_cancellation_that_cannot_be_handed_back_does_not_stop_the_next_job(caplog):
    class Broken(Host):
        def is_cancellation(self, error):
            return True

        def return_cancellation(self):
            raise RuntimeError("no prompt")

    background, done = Background(host=Broken()), []
    background.submit("bad", lambda: 1 / 0)
    background.submit("good", lambda: done.append(1))
    background.wait(every=0.001)
    assert done == [1]
    assert "could not be handed back: RuntimeError: no prompt" in caplog.text
