"""Nodes under the ids of OneDiff's abandoned extension, so that workflows made with it open and run.

Sockets, widgets and their order are those that its workflows contain (siliconflow/onediff, `onediff_comfy_nodes`).
Each node does what our node does that its description names. It accepts inputs that mean nothing any more, and says
so. All are marked deprecated.
"""

from __future__ import annotations

import sys

from . import boosters, checks, graph_files, loaders, prompt, quantised, speedups
from .old_node import OldNode

_MODULES = (speedups, loaders, graph_files, boosters, quantised, prompt, checks)
NODES = tuple(node for module in _MODULES for node in module.NODES)


def unclaimed() -> list[type[OldNode]]:
    """Return the nodes whose ids no extension has that is loaded already.

    An extension that is loaded later takes its ids over: in ComfyUI's table the last one wins.
    """
    taken = getattr(sys.modules.get("nodes"), "NODE_CLASS_MAPPINGS", {})
    return [node for node in NODES if node.ID not in taken]
