"""Nodes that are added to a graph after its export."""

from __future__ import annotations

from typing import Any

from torch import fx

from ...common.torch_compat import fake_mode


def add_node(graph: fx.Graph, target: Any, first: Any, *others: Any) -> fx.Node:
    """Add a call, and compute its value for fake tensors. Nodes carry these as `meta["val"]`, as an export leaves them.

    `first` is a node, or a list of nodes.
    """
    node = graph.call_function(target, (first, *others))
    known = first if isinstance(first, fx.Node) else first[0]
    with fake_mode(known.meta["val"]):
        values = fx.map_arg(node.args, lambda each: each.meta["val"])
        node.meta["val"] = target(*values)
    return node
