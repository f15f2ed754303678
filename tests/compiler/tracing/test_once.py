"""A function that defines operators runs once, and other threads wait for its end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from threading import Event

from compiled_graphs.compiler.tracing.once import once


def test_other_threads_wait_until_the_function_has_ended():
    begun, may_end, runs = Event(), Event(), []

    @once
    def define():
        runs.append(1)
        begun.set()
        may_end.wait(10)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(define)
        assert begun.wait(10)
        second = pool.submit(define)
        assert wait([second], timeout=0.2).not_done
        may_end.set()
        assert not wait([first, second], timeout=10).not_done
    assert runs == [1]
