"""What the extension answers over HTTP: the registry, and what the panel's buttons do with it.

A request that takes longer than a moment is served on a thread of its own, so that ComfyUI goes on answering.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..compiler.common import bounded_json
from ..compiler.common.words import say, translations
from ..compiler.hosts.comfy import graph_folder
from ..compiler.storage.graph_file import GraphFileError
from .events import prompt_queue, texts
from .own_threads import Busy, in_own_thread
from .prompt_server import has_route, prompt_server

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger(__name__)

REGISTRY = "/compiled_graphs/registry"
TEXTS = "/compiled_graphs/texts"
SAVE = "/compiled_graphs/save"
DROP = "/compiled_graphs/drop"
MAX_REQUEST = 2**16
"""Bytes of a request: the longest has three names."""

_FILE_NAME = r"\w[\w .-]{0,99}"


class Refused(Exception):
    """A request is not served. It has an HTTP status, and its text is the sentence for the person."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence


def register() -> bool:
    """Add the routes to ComfyUI's server, if there is a server.

    `GET /compiled_graphs/registry?language=zh` reports, and changes nothing. It explains reasons in that language.
    Changes are announced over the websocket. `GET /compiled_graphs/texts?workflow=ID` returns what the nodes of a
    workflow said last, by their ids: `{"text", "translations"}`.

    `POST /compiled_graphs/save` with `{"workflow", "role", "name"}` writes a graph file as Save Graph does, and
    `POST /compiled_graphs/drop` with `{"workflow"}` takes a workflow's graphs out of memory. Both answer with
    `{"text"}`, or with `{"error"}` and a status of 400 and more; each is one sentence for people, and `translations`
    has it in other languages.

    Returns False if the path is taken, which means that another copy of this extension was loaded first:
    two handlers for one path would keep ComfyUI from starting, and two copies would count apart.
    """
    server = prompt_server()
    if server is None:
        return True
    if has_route(server, REGISTRY):
        log.warning("Compiled Graphs is installed twice; this copy is not used: %s", Path(__file__).parent.parent)
        return False

    from aiohttp import web

    @server.routes.get(REGISTRY)
    async def read_registry(request: web.Request) -> web.Response:
        language = request.query.get("language", "en")
        try:
            return web.json_response(await in_own_thread(_report, language))
        except Busy as reason:
            raise web.HTTPServiceUnavailable(text=str(reason)) from None

    @server.routes.get(TEXTS)
    async def read_texts(request: web.Request) -> web.Response:
        return web.json_response(texts.of(request.query.get("workflow", "")))

    @server.routes.post(SAVE)
    async def save(request: web.Request) -> web.Response:
        return await _answer(request, _save)

    @server.routes.post(DROP)
    async def drop(request: web.Request) -> web.Response:
        return await _answer(request, _drop)

    return True


async def _answer(request: web.Request, serve: Callable[[Any], str]) -> web.Response:
    from aiohttp import web

    try:
        # A page of another site can make a browser post a form here, but no JSON.
        if request.content_type != "application/json":
            raise Refused(400, "The request is not JSON: its content type is to be application/json.")
        text = await in_own_thread(serve, _parse(await _body(request)))
    except Busy as reason:
        told = {"error": str(reason), "translations": translations(reason.args[0])}
        return web.json_response(told, status=503)
    except Refused as reason:
        told = {"error": reason.sentence, "translations": translations(reason.sentence)}
        return web.json_response(told, status=reason.status)
    return web.json_response({"text": text, "translations": translations(text)})


async def _body(request: web.Request) -> bytes:
    data = b""
    async for part in request.content.iter_chunked(MAX_REQUEST):
        data += part
        if len(data) > MAX_REQUEST:
            raise Refused(413, f"The request has more than {MAX_REQUEST} bytes.")
    return data


def _parse(data: bytes) -> Mapping[str, Any]:
    try:
        fields = bounded_json.parse(data)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise Refused(400, "The request is to be a JSON object in UTF-8.")
    return fields


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise Refused(400, f"The request lacks '{name}', which is to be a text.")
    return value


def _report(language: str) -> dict[str, Any]:
    from ..compiler.hosts.comfy.process import registry

    return registry().report(language)


def _save(fields: Mapping[str, Any]) -> str:
    from ..compiler.hosts.comfy.process import registry

    workflow, role, name = (_text(fields, field) for field in ("workflow", "role", "name"))
    if not re.fullmatch(_FILE_NAME, name):
        raise Refused(400, say("A file name has letters, digits, spaces, '.', '-' and '_', at most 100."))
    model = (registry().models(workflow) or {}).get(role)
    if model is None:
        sentence = say(
            "No '{role}' of workflow '{workflow}' is in memory. Queue the workflow first.", role=role, workflow=workflow
        )
        raise Refused(404, sentence)
    if not (graphs := model.graphs()):
        raise Refused(404, say("'{role}' has no compiled graphs yet. Queue the workflow first.", role=role))
    try:
        return graph_folder.write(graphs, name)
    except GraphFileError as reason:
        raise Refused(500, reason.args[0]) from None


def _drop(fields: Mapping[str, Any]) -> str:
    from ..compiler.hosts.comfy.process import registry

    workflow, home = _text(fields, "workflow"), registry()
    if home.models(workflow) is None:
        raise Refused(404, say("There is no workflow '{workflow}' in memory. It has not run yet.", workflow=workflow))
    keys = home.keep(workflow)  # This can take seconds, so the queue is not held meanwhile.
    with _no_prompt_running():
        count = home.evict(workflow, keys)
    return say("{count} graphs freed. The next prompt loads them from disk.", count=count)


@contextmanager
def _no_prompt_running() -> Iterator[None]:
    """Keep ComfyUI from beginning a prompt. Raises Refused while one runs.

    A model that runs may replay CUDA graphs of its steps, which need what the compiled graphs have loaded.
    """
    queue = prompt_queue()
    if not hasattr(queue, "mutex") or not hasattr(queue, "currently_running"):
        raise Refused(
            409, say("This ComfyUI does not tell whether a prompt is running. Restart it to free its memory.")
        )
    with queue.mutex:
        if queue.currently_running:
            raise Refused(409, say("A prompt is running. Free the graphs when it has ended."))
        yield
