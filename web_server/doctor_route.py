"""The doctor over HTTP, for the panel."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from .own_threads import Busy, in_own_thread
from .prompt_server import has_route, prompt_server

if TYPE_CHECKING:
    from aiohttp import web

DOCTOR = "/compiled_graphs/doctor"


def register() -> None:
    """Add `GET /compiled_graphs/doctor?language=zh` to ComfyUI's server, if it is there and no other copy has done so.

    The answer is a list of `{"name", "text", "ok", "remedy", "present"}`, one for each fact of `registry.doctor`.
    """
    server = prompt_server()
    if server is None or has_route(server, DOCTOR):
        return

    from aiohttp import web

    @server.routes.get(DOCTOR)
    async def read_facts(request: web.Request) -> web.Response:
        try:
            return web.json_response(await in_own_thread(_facts, request.query.get("language", "en")))
        except Busy as reason:
            raise web.HTTPServiceUnavailable(text=str(reason)) from None


def _facts(language: str) -> list[dict[str, str | bool]]:
    from ..compiler.hosts.comfy.doctor_facts import running
    from ..compiler.registry.doctor import examine, in_words

    return [asdict(in_words(fact, language)) for fact in examine(running())]
