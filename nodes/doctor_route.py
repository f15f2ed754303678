"""The doctor over HTTP, for the panel."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

DOCTOR = "/compiled_graphs/doctor"


def register() -> None:
    """Add `GET /compiled_graphs/doctor` to ComfyUI's server, if there is a server and no other copy has done so.

    The answer is a list of `{"name", "text", "ok", "remedy"}`, one for each fact of `compiler.doctor`.
    """
    try:
        from aiohttp import web
        from server import PromptServer
    except ImportError:
        return
    server = getattr(PromptServer, "instance", None)
    if server is None or any(getattr(route, "path", None) == DOCTOR for route in server.routes):
        return

    @server.routes.get(DOCTOR)
    async def read_facts(request: web.Request) -> web.Response:
        return web.json_response(await asyncio.to_thread(_facts))


def _facts() -> list[dict[str, str | bool]]:
    from ..compiler.doctor import examine
    from ..compiler.hosts.comfy.doctor_facts import running

    return [asdict(fact) for fact in examine(running())]
