"""Calls of networks, and work that runs their code ahead of time: neither sees the other."""

from __future__ import annotations

import threading

import pytest
from compiled_graphs.compiler.tracing.call_lock import CallLock


def test_exclusive_work_waits_for_a_running_call():
    lock, order, inside, go = CallLock(), [], threading.Event(), threading.Event()

    def look_ahead():
        with lock.exclusive():
            order.append("ahead")

    def call():
        with lock.shared(), lock.shared():
            inside.set()
            go.wait()
            order.append("call")

    caller = threading.Thread(target=call)
    caller.start()
    inside.wait()
    looker = threading.Thread(target=look_ahead)
    looker.start()
    go.set()
    caller.join()
    looker.join()
    assert order == ["call", "ahead"]


def test_a_call_that_looks_ahead_waits_for_calls_on_other_devices():
    lock, order, inside, go = CallLock(), [], threading.Event(), threading.Event()

    def call():
        with lock.shared():
            inside.set()
            go.wait()
            order.append("other device")

    def call_and_look_ahead():
        with lock.shared():
            go.set()
            # What it calls meanwhile is its own.
            with lock.exclusive(), lock.shared(), lock.released(), lock.exclusive():
                order.append("ahead")
            order.append("call")

    other, looker = threading.Thread(target=call), threading.Thread(target=call_and_look_ahead)
    other.start()
    inside.wait()
    looker.start()
    looker.join()
    other.join()
    assert order == ["other device", "ahead", "call"]
    with lock.exclusive():  # everything was released
        pass


def test_two_calls_may_look_ahead_at_the_same_time():
    lock, order, both = CallLock(), [], threading.Barrier(2)

    def call():
        with lock.shared():
            both.wait()
            with lock.exclusive():
                order.append("begin")
                order.append("end")

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order == ["begin", "end"] * 2


def test_a_call_that_waits_for_a_job_lets_others_look_ahead():
    lock = CallLock()
    ahead = []

    def look_ahead():
        with lock.exclusive():
            ahead.append(True)

    with lock.shared(), lock.released():
        looker = threading.Thread(target=look_ahead)
        looker.start()
        looker.join()
    assert ahead


def test_exclusive_work_that_is_interrupted_while_it_waits_leaves_the_lock_to_others():
    lock, inside, go = CallLock(), threading.Event(), threading.Event()

    def call():
        with lock.shared():
            inside.set()
            go.wait()

    caller = threading.Thread(target=call)
    caller.start()
    inside.wait()
    wait_for = lock._change.wait_for

    def interrupted(predicate):
        if not predicate():
            raise KeyboardInterrupt
        wait_for(predicate)

    lock._change.wait_for = interrupted
    with pytest.raises(KeyboardInterrupt), lock.exclusive():
        pass
    lock._change.wait_for = wait_for
    go.set()
    caller.join()
    with lock.exclusive():
        pass
