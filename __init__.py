"""Compiled Graphs: what ComfyUI imports, and the root of the Python package `compiled_graphs`."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

WEB_DIRECTORY = "./web"

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS", "WEB_DIRECTORY"]


def __getattr__(name: str) -> Any:
    """Import the nodes when ComfyUI asks for them: the package also serves programs without ComfyUI."""
    if name in ("NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"):
        from . import nodes

        return getattr(nodes, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
