"""What is done when somebody queues a prompt that has nodes of this extension.

ComfyUI calls handlers of prompts before it validates a prompt, and so before it loads a checkpoint. The imports that a
first graph needs take seconds; begun here, they go on while the checkpoint loads. A validator is no place for that:
ComfyUI also asks it about prompts that it then refuses to run, and may ask it again and again. A prompt that is
refused after this has cost imports that the next one needs.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from typing import Any

from ..compiler.backends import NAMES
from . import events
from .apply_settings import apply_settings
from .prompt_server import prompt_server


def register(ours: Collection[str], with_backend: Collection[str], that_load: Collection[str] = ()) -> None:
    """Have ComfyUI's server say when a prompt is queued, if there is a server that does.

    `ours` are the ids of this extension's nodes, `with_backend` those of them that have a widget `backend`, and
    `that_load` those that load graphs from a file.
    """
    add = getattr(prompt_server(), "add_on_prompt_handler", None)
    if add is None:  # The nodes begin the warm-up themselves when they run.
        return

    def on_prompt(request: Any) -> Any:
        found = nodes_in(request, ours)
        if found:
            backends = [backend for name, inputs in found if name in with_backend if (backend := backend_of(inputs))]
            _prepare(backends, any(name in that_load for name, _ in found))
        return request

    add(on_prompt)


def nodes_in(request: Any, ours: Collection[str]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the class and the inputs of each node of ours in the body of a request, which nobody has validated."""
    prompt = request.get("prompt") if isinstance(request, Mapping) else None
    nodes = [node for node in prompt.values() if isinstance(node, Mapping)] if isinstance(prompt, Mapping) else []
    pairs = [(node.get("class_type"), node.get("inputs")) for node in nodes]
    return [(name, i) for name, i in pairs if isinstance(name, str) and name in ours and isinstance(i, Mapping)]


def backend_of(inputs: Mapping[str, Any]) -> str | None:
    """Return the backend that a node is given, or None if a link gives it or if there is no such backend."""
    name = inputs.get("backend", NAMES[0])
    return name if isinstance(name, str) and name in NAMES else None


def _prepare(backends: Collection[str], loads: bool) -> None:
    """Begin the warm-up of these backends, apply the settings, and announce changes of the registry from now on.

    `loads` says that the prompt loads graphs from a file.
    The handler runs on the server's loop, which must wait for no disk: the store may be on a network.
    """
    from ..compiler.hosts.comfy.process import registry, warm_up

    for backend in dict.fromkeys(backends):
        warm_up(backend, loads)

    def finish() -> None:
        registry().on_change = events.announce
        apply_settings()

    threading.Thread(target=finish, name="settings of compiled graphs", daemon=True).start()
