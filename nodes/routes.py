"""What the extension answers over HTTP."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

REGISTRY = "/compiled_graphs/registry"


def register() -> None:
    """Add `GET /compiled_graphs/registry` to ComfyUI's server, once, if there is a server.

    A second copy of the extension finds the route taken and leaves it: two handlers for one path would
    keep ComfyUI from starting.
    """
    try:
        from aiohttp import web
        from server import PromptServer
    except ImportError:
        return
    server = getattr(PromptServer, "instance", None)
    if server is None or any(getattr(route, "path", None) == REGISTRY for route in server.routes):
        return

    @server.routes.get(REGISTRY)
    async def read_registry(request: web.Request) -> web.Response:
        from ..compiler.hosts.comfy import registry

        return web.json_response(registry().report())
