"""Events over ComfyUI's websocket: what nodes tell the person, and for which workflow they speak."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..compiler.common.words import translations
from .prompt_server import prompt_server

if TYPE_CHECKING:
    from ..compiler.hosts.comfy.request import Request

log = logging.getLogger(__name__)

REGISTRY_EVENT = "compiled_graphs.registry"
"""Websocket event without data: the registry has changed. `web/registry_panel.js` reads the registry again."""
MOMENT = 0.3
"""Seconds: changes that follow one another within them are announced together."""
EVENT = "compiled_graphs.status"
"""Websocket event `{"node", "workflow", "text", "translations"}`; `web/compiled_graphs.js` listens.

`translations` has the text in other languages.
"""


class NodeTexts:
    """What nodes said last, by workflow, for a page that is opened or loaded again."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, dict[str, str]] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, workflow: str, node_id: str, text: str) -> None:
        """Remember what a node says now."""
        with self._lock:
            self._texts.setdefault(workflow, {})[node_id] = text
            self._texts.move_to_end(workflow)
            while len(self._texts) > MAX_WORKFLOWS:
                self._texts.popitem(last=False)

    def of(self, workflow: str) -> dict[str, dict[str, Any]]:
        """Return what the nodes of a workflow said last, as JSON-able data by their ids."""
        with self._lock:
            texts = dict(self._texts.get(workflow, {}))
        return {node_id: _told(text) for node_id, text in texts.items()}


NO_ID = "00000000-0000-0000-0000-000000000000"
"""What the frontend gives a workflow that it made of a prompt in API format."""
MAX_WORKFLOWS = 64
"""Workflows whose texts are remembered: the latest."""

texts = NodeTexts()


def show(node_id: str, text: str, workflow: str = "") -> None:
    """Show a text on a node in every frontend. The workflow is the one that runs, unless another is named."""
    workflow = workflow or _running_workflow()
    log.info("Node %s: %s", node_id, text)
    texts.put(workflow, str(node_id), text)
    progress(node_id, text, workflow)
    announce()


def progress(node_id: str, text: str, workflow: str = "") -> None:
    """Show on a node how far it is. The text that `show` shows in the end replaces this one."""
    server = prompt_server()
    if server is not None and node_id:
        place = {"node": str(node_id), "workflow": workflow or _running_workflow()}
        server.send_sync(EVENT, place | _told(text))


def _told(text: str) -> dict[str, Any]:
    return {"text": str(text), "translations": translations(text)}


class _Announcer:
    """Tells every frontend that the registry has changed, once for all changes within a moment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits = False

    def __call__(self) -> None:
        """Return at once; the event follows."""
        with self._lock:
            if self._waits or prompt_server() is None:
                return
            self._waits = True
        timer = threading.Timer(MOMENT, self._send)
        timer.daemon = True
        timer.start()

    def _send(self) -> None:
        with self._lock:
            self._waits = False
        prompt_server().send_sync(REGISTRY_EVENT, {})


announce = _Announcer()


class RunningWorkflow:
    """Names the workflow that runs when it is called.

    At first that is the workflow that the node ran for. Later ComfyUI may hand the node's cached output to another
    workflow, and only the server's queue knows which.
    """

    def __init__(self, own: str) -> None:
        self._own = own
        self.last = own
        """The answer to the last call."""

    def __call__(self) -> str:
        self.last = _running_workflow(self._own)
        return self.last


def _running_workflow(otherwise: str = "") -> str:
    """Return the workflow that the server's queue runs just now."""
    queue = prompt_queue()
    try:
        (item,) = queue.currently_running.values()
        _, prompt_id, current, extra, *_ = getattr(item, "queue_tuple", item)
    except (
        AttributeError,
        TypeError,
        ValueError,
    ):  # There is no server, another kind of queue, or more than one worker.
        return otherwise
    if prompt_id not in _names:
        _names.clear()
        _names[prompt_id] = workflow_id(current, extra.get("extra_pnginfo") if isinstance(extra, Mapping) else None)
    return _names.get(prompt_id, otherwise)


_names: dict[str, str] = {}
"""The workflow of the prompt that ran last."""


def prompt_queue() -> Any:
    """Return the queue of ComfyUI's server, or None if there is no server."""
    return getattr(prompt_server(), "prompt_queue", None)


def request(
    backend: str,
    verify: bool,
    node_id: str,
    prompt: Mapping[str, Any] | None,
    extra_pnginfo: Mapping[str, Any] | None,
    tell: Callable[[str, str], Any],
) -> Request:
    """Return the request of a node, which also says for which workflow it runs.

    `tell` shows a text that has changed, in a workflow.
    """
    from ..compiler.hosts.comfy.request import Request

    workflow = RunningWorkflow(workflow_id(prompt, extra_pnginfo))
    return Request(
        backend,
        verify,
        str(node_id),
        workflow,
        on_change=lambda changed: tell(changed, workflow.last),
        on_progress=lambda text: progress(node_id, text, workflow.last),
    )


def workflow_id(prompt: Mapping[str, Any] | None, extra_pnginfo: Any) -> str:
    """Return the id the frontend gives a workflow, or a fingerprint of an API prompt's topology.

    The fingerprint takes node classes and links and leaves values out: with a new seed or prompt text it is the same
    workflow. ComfyUI passes on whatever a client sent as `extra_pnginfo`.
    """
    workflow = extra_pnginfo.get("workflow") if isinstance(extra_pnginfo, Mapping) else None
    identity = str(workflow.get("id") or "") if isinstance(workflow, Mapping) else ""
    if identity and identity != NO_ID:
        return identity
    topology = {
        node_id: [node.get("class_type"), {k: v for k, v in node.get("inputs", {}).items() if isinstance(v, list)}]
        for node_id, node in (prompt or {}).items()
    }
    return hashlib.sha256(json.dumps(topology, sort_keys=True).encode()).hexdigest()[:16]
