"""Maps of videos stay in channels_last_3d inside a graph.

Inductor gives an operator's result the strides that PyTorch's own operator would give it, and chooses a memory format
itself only for images. PyTorch pads and concatenates maps of videos into contiguous ones. So a graph transposed the map
before each convolution and after it, in kernels that read memory in the wrong order: padding ten frames of 480x848 took
37 ms on an H100, and the VAEs of LTX-2 and HunyuanVideo 1.5 ran at half of their uncompiled speed.

Here these operators see the channels as the last dimension, and convolutions take maps in channels_last_3d.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ...common.torch_compat import OpOverload, is_mutable
from .aliases import writes_depend_on_strides
from .graph_edits import add_node

CHANNELS_TO_END, AND_BACK = [0, 2, 3, 4, 1], [0, 4, 1, 2, 3]
"""Permutations of [batch, channels, frames, height, width]."""
RANK = 5

_aten = torch.ops.aten
_CONVOLUTIONS = (_aten.conv3d.default, _aten.conv3d.padding)
_COPIES_WHERE_NEEDED = {_aten.view.default: _aten.reshape.default, _aten.view_as.default: _aten.reshape_as.default}
"""By the view that fails for strides which a map does not have in the export."""


def keep_channels_last(module: fx.GraphModule) -> int:
    """Have pads, concatenations and convolutions of videos' maps keep channels_last_3d. Return how many these are.

    A graph that convolves no frames stays as it is, and so does one in which strides decide who sees a write, or what
    `as_strided` reads. Nodes carry fake tensors as `meta["val"]`, as `torch.export` leaves them.
    """
    graph, count = module.graph, 0
    if not any(node.target in _CONVOLUTIONS for node in graph.nodes):
        return 0
    if writes_depend_on_strides(graph) or any(map(_reads_by_strides, graph.nodes)):
        return 0
    for node in graph.nodes:
        if node.target in _COPIES_WHERE_NEEDED:
            node.target = _COPIES_WHERE_NEEDED[node.target]
        elif node.target is _aten.as_strided.default:
            with graph.inserting_before(node):
                node.args = (add_node(graph, _aten.contiguous.default, node.args[0]), *node.args[1:])
    for node in [node for node in graph.nodes if node.target in _REWRITES and _is_map(node)]:
        with graph.inserting_before(node):
            result = _REWRITES[node.target](graph, node)
        if result is None:
            continue
        count += 1
        if result is not node:
            node.replace_all_uses_with(result)
            graph.erase_node(node)
    if count:
        graph.eliminate_dead_code()
        module.recompile()
    return count


def _reads_by_strides(node: fx.Node) -> bool:
    """Whether an operator reads memory by strides of the export, which a map may not have here.

    `as_strided` does not if it only repeats the layout of a contiguous result, as `group_norm_by_channel` has its
    factors computed once.
    """
    if node.target is not _aten.as_strided.default:
        return str(node.target).startswith("aten.as_strided")
    source, read = node.args[0], node.meta.get("val")
    value, target = source.meta.get("val"), source.target
    is_result = isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags and not is_mutable(target)
    if value is None or read is None or not is_result or not value.is_contiguous():
        return True
    return _layout(value) != _layout(read)


def _layout(tensor: torch.Tensor) -> list[Any]:
    """Return a tensor's sizes and strides. Comparing symbols themselves would add guards."""
    return [*map(str, (*tensor.shape, *tensor.stride(), tensor.storage_offset()))]


def _is_map(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.ndim == RANK


def _convolution(graph: fx.Graph, node: fx.Node) -> fx.Node:
    x = add_node(graph, _aten.contiguous.default, node.args[0], memory_format=torch.channels_last_3d)
    node.args = (x, *node.args[1:])
    return node


def _concatenation(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    maps, dim = (*node.args, 0)[:2]
    if not all(map(_is_map, maps)):  # PyTorch leaves out empty tensors of one dimension
        return None
    maps = [add_node(graph, _aten.permute.default, each, CHANNELS_TO_END) for each in maps]
    joined = add_node(graph, _aten.cat.default, maps, CHANNELS_TO_END.index(dim % RANK))
    return add_node(graph, _aten.permute.default, joined, AND_BACK)


def _pad(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    x, sides, mode, value = (*node.args, *("constant", None)[len(node.args) - 2 :])
    if len(sides) > 6 or not any(sides) or not all(isinstance(side, int) and side >= 0 for side in sides):
        return None
    x = add_node(graph, _aten.permute.default, x, CHANNELS_TO_END)
    if mode == "constant":
        padded = add_node(graph, _aten.constant_pad_nd.default, x, [0, 0, *sides], value or 0)
    elif mode in _MODES:
        padded = _padded_by_index(graph, x, sides, mode)
    else:
        return None
    return add_node(graph, _aten.permute.default, padded, AND_BACK)


def _copy(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Copy a few frames of a map. Inductor takes out a copy that changes no strides, and all frames stay in memory."""
    part = node.args[0]
    if part.target is not _aten.slice.Tensor or node.kwargs:
        return None
    last = add_node(graph, _aten.permute.default, part, CHANNELS_TO_END)
    copy = add_node(graph, _aten._unsafe_index.Tensor, last, [None, _numbers(graph, last, 1)])
    return add_node(graph, _aten.permute.default, copy, AND_BACK)


def _padded_by_index(graph: fx.Graph, x: fx.Node, sides: Sequence[int], mode: str) -> fx.Node:
    """Have a map [batch, frames, rows, columns, channels] padded. `sides` begin with those of the columns."""
    places: list[fx.Node | None] = [None]
    for dim, around in enumerate((sides[4:], sides[2:4], sides[:2]), 1):
        if not any(around) and not any(places):
            places.append(None)  # all of these
            continue
        index = _numbers(graph, x, dim)
        if any(around):
            row = add_node(
                graph, _aten.pad.default, add_node(graph, _aten.unsqueeze.default, index, 0), [*around], mode
            )
            index = add_node(graph, _aten.squeeze.dim, row, 0)
        places.append(add_node(graph, _aten.view.default, index, [-1, *[1] * (3 - dim)]))
    return add_node(graph, _aten._unsafe_index.Tensor, x, places)


def _numbers(graph: fx.Graph, x: fx.Node, dim: int) -> fx.Node:
    """Return 0, 1, 2, ... for a dimension."""
    size = add_node(graph, _aten.sym_size.int, x, dim)
    return add_node(graph, _aten.arange.default, size, like=x, device=x.meta["val"].device)


_MODES = ("replicate", "reflect", "circular")
_REWRITES: dict[Any, Callable[[fx.Graph, fx.Node], fx.Node | None]] = {
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
    _aten.cat.default: _concatenation,
    _aten.pad.default: _pad,
    _aten.clone.default: _copy,
}
