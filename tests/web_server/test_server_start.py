"""The warm-up that begins when ComfyUI's server starts, where something was compiled before."""

from __future__ import annotations

import asyncio
import sys
import threading
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
    monkeypatch.setattr(server_start, "_warm_up", begun.set)
    server_start.register()
    assert not begun.is_set()
    asyncio.run(_start(app))
    assert begun.wait(10)


def test_a_server_that_runs_already_is_left_alone(server_start, monkeypatch):
    app = web.Application()
    app.freeze()
    for server in (None, SimpleNamespace(), SimpleNamespace(app=app)):
        monkeypatch.setattr(server_start, "prompt_server", lambda server=server: server)
        server_start.register()


async def _start(app):
    runner = web.AppRunner(app)
    await runner.setup()
    await runner.cleanup()
