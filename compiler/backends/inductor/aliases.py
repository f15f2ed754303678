"""Which nodes of an exported graph share memory, and whether other strides would change what a write reaches.

Some operators return a view for some strides and a copy for others (`reshape`). A graph that is rewritten to use other
strides may therefore share memory where the export did not, or the other way round. That matters only if something is
written there which somebody else reads.
"""

from __future__ import annotations

from collections.abc import Container
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

_DROPOUTS = (
    _aten.dropout.default,
    _aten.alpha_dropout.default,
    _aten.feature_dropout.default,
    _aten.feature_alpha_dropout.default,
)
"""Operators that return what they are given, outside of training. Nothing in an exported graph says so."""

Families = dict[fx.Node, set[fx.Node]]
"""By a node: those that it shares memory with, and the node itself."""


def writes_depend_on_strides(graph: fx.Graph) -> bool:
    """Whether strides decide who sees what the graph writes. Nodes carry fake tensors as `meta["val"]`."""
    certain: Families = {}
    possible: Families = {}
    for node in graph.nodes:
        for place in _nodes(written_by(node)):
            if _depends_on_strides(possible[place], certain[place], seen=possible):
                return True
        sources = [source for source in node.all_input_nodes if _may_share_memory(node, source)]
        _join(possible, node, sources)
        _join(certain, node, [] if _is_view_by_strides(node) else sources)
    return False


def _join(families: Families, node: fx.Node, sources: list[fx.Node]) -> None:
    family = {node}.union(*(families[source] for source in sources))
    families.update(dict.fromkeys(family, family))


def _depends_on_strides(possible: set[fx.Node], certain: set[fx.Node], seen: Container[fx.Node]) -> bool:
    """Whether strides decide who sees a write. `seen` are the nodes before it.

    The nodes that share the written memory for sure see it in any case. Of the others, some may be used afterwards.
    And where one place stands for several numbers, as after `expand`, writing to a copy is not like writing to a view.
    """
    others = possible - certain
    if any(node.op != "call_function" or any(user not in seen for user in node.users) for node in others):
        return True
    return bool(others) and any(map(_is_repeated, possible))


def _may_share_memory(node: fx.Node, source: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return node.op == "call_function"  # one of several results
    if node.target in _DROPOUTS or source in _nodes(aliased_by(node)):
        return True
    result, given = node.meta.get("val"), source.meta.get("val")
    are_tensors = isinstance(result, torch.Tensor) and isinstance(given, torch.Tensor)
    return are_tensors and storage_address(result) == storage_address(given)  # such as an einsum of one operand


def _is_view_by_strides(node: fx.Node) -> bool:
    if node.target in _VIEWS_BY_STRIDES or arguments_of(node).get("memory_format") is not None:
        return True
    is_silent = isinstance(node.target, OpOverload) and not aliased_by(node)
    return is_silent and any(_may_share_memory(node, source) for source in node.all_input_nodes)


def _is_repeated(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and any(str(stride) == "0" for stride in value.stride())


def _nodes(arguments: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(arguments, found.append)
    return found
