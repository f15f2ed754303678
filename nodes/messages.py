"""What nodes say to the person, and which workflow they speak for."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..compiler.hosts.comfy.request import Request

log = logging.getLogger(__name__)

REGISTRY_EVENT = "compiled_graphs.registry"
"""Websocket event without data: the registry has changed; `web/registry_panel.js` reads it again."""
MOMENT = 0.3
"""Seconds whose changes are announced together."""
EVENT = "compiled_graphs.status"
"""Websocket event `{"node": id, "text": text}`; `web/compiled_graphs.js` listens."""


def show(node_id: str, text: str) -> None:
    """Show a text on a node, wherever the frontend is."""
    log.info("Node %s: %s", node_id, text)
    server = _server()
    if server is not None and node_id:
        server.send_sync(EVENT, {"node": str(node_id), "text": text})
    announce()


def progress(node_id: str, text: str) -> None:
    """Show on a node how far it is. The text that it shows in the end takes the place of this one."""
    server = _server()
    if server is not None and node_id:
        server.send_sync(EVENT, {"node": str(node_id), "text": text})


class _Announcer:
    """Tells every frontend that the registry has changed, once for all that changes within a moment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits = False

    def __call__(self) -> None:
        """Return at once; the event follows."""
        with self._lock:
            if self._waits or _server() is None:
                return
            self._waits = True
        timer = threading.Timer(MOMENT, self._send)
        timer.daemon = True
        timer.start()

    def _send(self) -> None:
        with self._lock:
            self._waits = False
        _server().send_sync(REGISTRY_EVENT, {})


announce = _Announcer()


def running_workflow(prompt: Mapping[str, Any] | None, extra_pnginfo: Mapping[str, Any] | None) -> Callable[[], str]:
    """Return a function that names the workflow that runs when it is called.

    That is the one a node was run for, until ComfyUI hands the node's cached output to another workflow; then
    only the server's queue knows.
    """
    own = workflow_id(prompt, extra_pnginfo)
    names: dict[str, str] = {}

    def name() -> str:
        queue = prompt_queue()
        try:
            (item,) = queue.currently_running.values()
            _, prompt_id, current, extra, *_ = getattr(item, "queue_tuple", item)
        except (AttributeError, TypeError, ValueError):  # no server, another kind of queue, several workers
            return own
        if prompt_id not in names:
            names.clear()
            names[prompt_id] = workflow_id(current, extra.get("extra_pnginfo"))
        return names[prompt_id]

    return name


def prompt_queue() -> Any:
    """Return the queue of ComfyUI's server, or None if there is no server."""
    return getattr(_server(), "prompt_queue", None)


def _server() -> Any:
    try:
        from server import PromptServer
    except ImportError:
        return None
    return getattr(PromptServer, "instance", None)


def request(
    backend: str, verify: bool, node_id: str, prompt: Mapping[str, Any] | None, extra_pnginfo: Mapping[str, Any] | None
) -> Request:
    """Return what a node wants, with its node and workflow to speak for."""
    from ..compiler.hosts.comfy.request import Request

    return Request(
        backend,
        verify,
        str(node_id),
        running_workflow(prompt, extra_pnginfo),
        on_change=lambda changed: show(node_id, changed),
        on_progress=lambda text: progress(node_id, text),
    )


def workflow_id(prompt: Mapping[str, Any] | None, extra_pnginfo: Mapping[str, Any] | None) -> str:
    """Return the id the frontend gives a workflow, or a fingerprint of an API prompt's topology.

    The fingerprint takes node classes and links and leaves values out, so that a new seed or prompt text
    is the same workflow.
    """
    workflow = (extra_pnginfo or {}).get("workflow") or {}
    if identity := workflow.get("id"):
        return str(identity)
    topology = {
        node_id: [node.get("class_type"), {k: v for k, v in node.get("inputs", {}).items() if isinstance(v, list)}]
        for node_id, node in (prompt or {}).items()
    }
    return hashlib.sha256(json.dumps(topology, sort_keys=True).encode()).hexdigest()[:16]
