"""The warm-up that begins when ComfyUI's server starts, where something was compiled before."""

from __future__ import annotations

import asyncio
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
from aiohttp import web


@pytest.fixture
def modules(monkeypatch):
    """`server_start` and `process`, with a stand-in for ComfyUI's folders; and the backends that are warmed up."""
    monkeypatch.setitem(sys.modules, "folder_paths", sys.modules.get("folder_paths") or ModuleType("folder_paths"))
    from compiled_graphs.compiler.hosts.comfy import process
    from compiled_graphs.web_server import server_start

    warmed = []
    monkeypatch.setattr(process, "warm_up", lambda backend="auto": warmed.append(backend))
    return server_start, process, warmed


@pytest.mark.parametrize("keys", [set(), {"a" * 64}], ids=["nothing compiled yet", "compiled before"])
def test_only_what_has_compiled_is_warmed_up(modules, monkeypatch, keys):
    server_start, process, warmed = modules
    app = web.Application()
    monkeypatch.setattr(server_start, "prompt_server", lambda: SimpleNamespace(app=app))
    store = SimpleNamespace(keys=lambda: keys)
    monkeypatch.setattr(process, "registry", lambda: SimpleNamespace(cache=SimpleNamespace(store=store)))
    server_start.register()
    assert warmed == []
    asyncio.run(_start(app))
    for thread in threading.enumerate():
        if thread.name == "warm up after the start":
            thread.join()
    assert warmed == (["auto"] if keys else [])


def test_a_server_that_runs_already_is_left_alone(modules, monkeypatch):
    server_start, _, _ = modules
    app = web.Application()
    app.freeze()
    for server in (None, SimpleNamespace(), SimpleNamespace(app=app)):
        monkeypatch.setattr(server_start, "prompt_server", lambda server=server: server)
        server_start.register()


async def _start(app):
    runner = web.AppRunner(app)
    await runner.setup()
    await runner.cleanup()
