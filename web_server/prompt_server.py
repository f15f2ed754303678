"""ComfyUI's server, where one runs: the nodes are also imported without it."""

from __future__ import annotations

from typing import Any


def prompt_server() -> Any:
    """Return the PromptServer of this process, or None if it has none."""
    try:
        from server import PromptServer
    except ImportError:
        return None
    return getattr(PromptServer, "instance", None)


def has_route(server: Any, path: str) -> bool:
    """Whether an extension has added a route for this path already."""
    return any(getattr(route, "path", None) == path for route in server.routes)
