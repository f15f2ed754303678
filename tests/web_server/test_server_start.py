"""The warm-up that begins when ComfyUI's server starts, where something was compiled before."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest
from aiohttp import web


@pytest.fixture
def server_start(monkeypatch):
    """The module, with a stand-in for ComfyUI's folders."""
    monkeypatch.setitem(sys.modules, "folder_paths", sys.modules.get("folder_paths") or ModuleType("folder_paths"))
    from compiled_graphs.web_server import server_start

    return server_start


def test_the_warm_up_begins_when_the_server_starts(server_start, monkeypatch):
    app, begun = web.Application(), threading.Event()
    monkeypatch.setattr(server_start, "prompt_server", lambda: SimpleNamespace(app=app))
    monkeypatch.setattr(server_start, "_warm_up", lambda loaded: begun.set())
    server_start.register()
    assert not begun.is_set()
    asyncio.run(_start(app))  # which does not wait for what is never loaded
    assert begun.wait(10)


@pytest.mark.parametrize("fails", [False, True])
def test_a_server_can_listen_when_its_graphs_are_loaded(server_start, monkeypatch, fails):
    from compiled_graphs.compiler.hosts.comfy import process

    app, told, order = web.Application(), threading.Event(), []

    def warm_up_as_before(give_way):
        time.sleep(0.1)
        order.append("loaded")
        if fails:
            raise OSError("the store is gone")
        return False

    def prepare_workers():
        assert told.wait(10)  # the server does not wait for this
        order.append("workers")

    monkeypatch.setenv(server_start.LISTEN, "warm")
    monkeypatch.setattr(server_start, "prompt_server", lambda: SimpleNamespace(app=app))
    monkeypatch.setattr(process, "warm_up_as_before", warm_up_as_before)
    monkeypatch.setattr(process, "prepare_workers", prepare_workers)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    server_start.register()
    asyncio.run(_start(app))
    order.append("listens")
    told.set()
    assert order[:2] == ["loaded", "listens"]


def test_another_value_is_told_and_changes_nothing(server_start, monkeypatch, caplog):
    app = web.Application()
    monkeypatch.setenv(server_start.LISTEN, "1")
    monkeypatch.setattr(server_start, "prompt_server", lambda: SimpleNamespace(app=app))
    monkeypatch.setattr(server_start, "_warm_up", lambda loaded: None)
    server_start.register()
    asyncio.run(_start(app))  # which does not wait
    assert 'COMPILED_GRAPHS_LISTEN is "1"' in caplog.text


def test_a_server_that_runs_already_is_left_alone(server_start, monkeypatch):
    app = web.Application()
    app.freeze()
    for server in (None, SimpleNamespace(), SimpleNamespace(app=app)):
        monkeypatch.setattr(server_start, "prompt_server", lambda server=server: server)
        server_start.register()


def test_the_warm_up_gives_way_to_prompts(server_start, monkeypatch):
    from compiled_graphs.compiler.hosts.comfy import process

    done, left = [], iter([2, 1, 0, 1, 0, 0])
    queue = SimpleNamespace(get_tasks_remaining=lambda: done.append(next(left)) or done[-1])
    monkeypatch.setattr(server_start, "prompt_server", lambda: SimpleNamespace(prompt_queue=queue))
    monkeypatch.setattr(server_start, "PAUSE", 0)
    monkeypatch.setattr(process, "prepare_workers", lambda: done.append("workers"))

    def warm_up_as_before(give_way):
        for part in ("imports", "graphs"):
            give_way()
            done.append(part)
        return True

    monkeypatch.setattr(process, "warm_up_as_before", warm_up_as_before)
    server_start._warm_up(threading.Event())
    assert done == [2, 1, 0, "imports", 1, 0, "graphs", 0, "workers"]


def test_workers_are_prepared_at_once_where_nothing_was_compiled(server_start, monkeypatch):
    from compiled_graphs.compiler.hosts.comfy import process

    done = []
    monkeypatch.setattr(server_start, "prompt_server", lambda: pytest.fail("nothing gives way"))
    monkeypatch.setattr(process, "warm_up_as_before", lambda give_way: False)
    monkeypatch.setattr(process, "prepare_workers", lambda: done.append("workers"))
    server_start._warm_up(threading.Event())
    assert done == ["workers"]


@pytest.mark.parametrize("server", [None, SimpleNamespace(), SimpleNamespace(prompt_queue=SimpleNamespace())])
def test_a_server_without_a_queue_does_not_delay_the_warm_up(server_start, monkeypatch, server):
    monkeypatch.setattr(server_start, "prompt_server", lambda: server)
    server_start._wait_for_prompts()


async def _start(app):
    runner = web.AppRunner(app)
    await runner.setup()
    await runner.cleanup()


def test_a_server_does_not_wait_for_its_graphs_for_ever(server_start, monkeypatch, caplog):
    app = web.Application()
    monkeypatch.setenv(server_start.LISTEN, "warm")
    monkeypatch.setattr(server_start, "MAX_WAIT", 0.1)
    monkeypatch.setattr(server_start, "prompt_server", lambda: SimpleNamespace(app=app))
    monkeypatch.setattr(server_start, "_warm_up", lambda loaded: None)
    server_start.register()
    asyncio.run(_start(app))
    assert "listens before its graphs are loaded" in caplog.text
