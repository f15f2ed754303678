"""Requests that wait for a folder that does not answer keep nobody else waiting."""

from __future__ import annotations

import asyncio
import threading

import pytest
from compiled_graphs.web_server import own_threads
from compiled_graphs.web_server.own_threads import MAX_REQUESTS, Busy, in_own_thread


def fail():
    raise OSError("the folder is gone")


def test_what_work_returns_and_raises():
    assert asyncio.run(in_own_thread(max, 1, 2)) == 2
    with pytest.raises(OSError, match="the folder is gone"):
        asyncio.run(in_own_thread(fail))


def test_work_that_hangs_leaves_asyncios_threads_free_and_has_a_limit():
    goes_on, begun = threading.Event(), threading.Semaphore(0)

    def hang():
        begun.release()
        goes_on.wait()

    async def ask():
        waiting = [asyncio.ensure_future(in_own_thread(hang)) for _ in range(MAX_REQUESTS)]
        for _ in range(MAX_REQUESTS):
            await asyncio.to_thread(begun.acquire)
        with pytest.raises(Busy, match="does not answer"):
            await in_own_thread(max, 1, 2)
        waiting[0].cancel()  # whoever asked has gone
        goes_on.set()
        await asyncio.wait(waiting)
        assert all(own_threads._free.acquire(timeout=10) for _ in range(MAX_REQUESTS))
        own_threads._free.release(MAX_REQUESTS)
        assert await in_own_thread(max, 1, 2) == 2

    asyncio.run(ask())


def test_a_thread_that_does_not_start_is_not_counted(monkeypatch):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    async def ask():
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fail)
            for _ in range(2 * MAX_REQUESTS):
                with pytest.raises(RuntimeError, match="can't start new thread"):
                    await in_own_thread(max, 1, 2)
        assert await in_own_thread(max, 1, 2) == 2

    asyncio.run(ask())
