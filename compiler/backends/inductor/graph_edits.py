"""Nodes that are added to a graph after its export."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...common.torch_compat import fake_mode, in_python


def add_node(graph: fx.Graph, target: Any, *args: Any, like: fx.Node | None = None, **kwargs: Any) -> fx.Node:
    """Add a call, and compute its value for fake tensors. Nodes carry these as `meta["val"]`, as an export leaves them.

    `like` is a node with a tensor, for a call whose arguments have none.
    """
    node = graph.call_function(target, args, kwargs)
    nodes = node.all_input_nodes if like is None else [like]
    known = next(each.meta["val"] for each in nodes if isinstance(each.meta["val"], torch.Tensor))
    with fake_mode(known), in_python():
        values = fx.map_arg(node.args, lambda each: each.meta["val"])
        node.meta["val"] = target(*values, **kwargs)
    return node
