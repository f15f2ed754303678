"""Metrics over HTTP, for Prometheus and what else reads its format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .own_threads import Busy, in_own_thread
from .prompt_server import has_route, prompt_server

if TYPE_CHECKING:
    from aiohttp import web

METRICS = "/compiled_graphs/metrics"


def register() -> None:
    """Add `GET /compiled_graphs/metrics` to ComfyUI's server, if there is one and no other copy has done so."""
    server = prompt_server()
    if server is None or has_route(server, METRICS):
        return

    from aiohttp import web

    @server.routes.get(METRICS)
    async def read_metrics(request: web.Request) -> web.Response:
        from ..compiler.registry.metrics import CONTENT_TYPE

        try:
            text = await in_own_thread(_text)
        except Busy as reason:
            raise web.HTTPServiceUnavailable(text=str(reason)) from None
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})


def _text() -> str:
    from ..compiler.common.counters import totals
    from ..compiler.hosts.comfy import process
    from ..compiler.registry.metrics import exposition, metrics

    registry = process.registry()
    return exposition(metrics(totals, registry.cache.sizes(), registry.disk()))
