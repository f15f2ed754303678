"""Compiled Graphs: what ComfyUI imports, and the root of the Python package `compiled_graphs`."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

WEB_DIRECTORY = "./web"

V1_NAMES = ("NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS")
V3_NAMES = ("comfy_entrypoint",)


def __getattr__(name: str) -> Any:
    """Import the nodes when ComfyUI asks for them: the package also serves programs without ComfyUI.

    ComfyUI takes V1's mappings if a package has them, and asks for V3's entry point otherwise. So only one is there.
    """
    if name in (*V1_NAMES, *V3_NAMES):
        from . import nodes

        if name in (V3_NAMES if nodes.v3_schema.latest() else V1_NAMES):
            return getattr(nodes, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
