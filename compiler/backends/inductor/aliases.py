"""Which nodes of an exported graph share memory, and whether other strides would change what a write reaches.

Some operators return a view for some strides and a copy for others (`reshape`). A graph that is rewritten to use other
strides may therefore share memory where the export did not, or the other way round. That matters only if something is
written there which somebody else reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...common.torch_compat import OpOverload, aliased_by, arguments_of, storage_address, written_by

_aten = torch.ops.aten
_VIEWS_BY_STRIDES = (
    _aten.view.default,
    _aten.view_as.default,
    _aten.reshape.default,
    _aten.reshape_as.default,
    _aten.flatten.using_ints,
    _aten.ravel.default,
    _aten.contiguous.default,
    _aten.as_strided.default,
)
"""Operators that return a view or a copy, or fail, depending on strides. With a memory format, others do, too."""

Family = list[fx.Node]
"""Nodes that share memory, or would for some strides, in the graph's order."""


def writes_depend_on_strides(graph: fx.Graph) -> bool:
    """Whether strides decide who sees what the graph writes. Nodes carry fake tensors as `meta["val"]`."""
    families: dict[fx.Node, Family] = {}
    for node in graph.nodes:
        for place in _nodes(written_by(node)):
            if _depends_on_strides(families[place]):
                return True
        family = [node]
        for source in node.all_input_nodes:
            if _may_share_memory(node, source):
                family = [*(each for each in families[source] if each not in family), *family]
        families.update(dict.fromkeys(family, family))
    return False


def _depends_on_strides(family: Family) -> bool:
    """Whether strides decide who sees a write to these nodes, which are all that came before it.

    They do not if each node has one user: the next one, and the last one the write. Then nobody else can see it. Where
    one place stands for several numbers, as after `expand`, a copy and a view differ all the same.
    """
    if not any(map(_is_view_by_strides, family)):
        return False
    return any(node.op != "call_function" or len(node.users) > 1 or _is_repeated(node) for node in family)


def _may_share_memory(node: fx.Node, source: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return node.op == "call_function"  # one of several results
    if source in _nodes(aliased_by(node)):
        return True
    result, given = node.meta.get("val"), source.meta.get("val")
    are_tensors = isinstance(result, torch.Tensor) and isinstance(given, torch.Tensor)
    return are_tensors and storage_address(result) == storage_address(given)  # such as an einsum of one operand


def _is_view_by_strides(node: fx.Node) -> bool:
    if node.target in _VIEWS_BY_STRIDES or arguments_of(node).get("memory_format") is not None:
        return True
    return isinstance(node.target, OpOverload) and not aliased_by(node) and _shares_memory(node)


def _shares_memory(node: fx.Node) -> bool:
    return any(_may_share_memory(node, source) for source in node.all_input_nodes)


def _is_repeated(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and any(str(stride) == "0" for stride in value.stride())


def _nodes(arguments: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(arguments, found.append)
    return found
