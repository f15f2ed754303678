"""What the extension answers over HTTP."""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger(__name__)

REGISTRY = "/compiled_graphs/registry"


def register() -> bool:
    """Add `GET /compiled_graphs/registry` to ComfyUI's server, if there is a server.

    Returns False if the path is taken, which means that another copy of this extension was loaded first:
    two handlers for one path would keep ComfyUI from starting, and two copies would count apart.
    """
    try:
        from aiohttp import web
        from server import PromptServer
    except ImportError:
        return True
    server = getattr(PromptServer, "instance", None)
    if server is None:
        return True
    if any(getattr(route, "path", None) == REGISTRY for route in server.routes):
        log.warning("Compiled Graphs is installed twice; this copy is not used: %s", Path(__file__).parent.parent)
        return False

    @server.routes.get(REGISTRY)
    async def read_registry(request: web.Request) -> web.Response:
        from ..compiler.hosts.comfy import registry

        return web.json_response(registry().report())

    return True
