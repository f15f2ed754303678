"""Products of float32 with weights of 16 bits or fewer, on the tensor cores of NVIDIA GPUs, as exact as in float32.

ComfyUI's text encoders compute in float32 with weights of bfloat16 or float8. It casts each weight to float32, which
moves ten bytes through memory for two, and multiplies without tensor cores. But such a weight is exact in bfloat16, and
a float32 is the sum of three bfloat16 of eight digits each (Henry, Tang and Heinecke, Leveraging the bfloat16
Artificial Intelligence Datatype for Higher-Precision Computations, 2019). So the product is the sum of three whose
terms are all exact and are summed in float32. Their rows are multiplied as one matrix, so that a weight is read once.

Weights of float16 have more digits than bfloat16, and stay as they are.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import fx

from ...common.torch_compat import MissingName, mm_with_dtype, tuned_mm
from .graph_edits import add_node

PARTS = 3
"""Of a float32 of 24 binary digits, in bfloat16 of 8."""
EXACT = frozenset({torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2})
"""What bfloat16 has all values of."""
UPPER_HALF = -(1 << 16)
"""The bits of a float32 that are a bfloat16, as an int32."""
OLDEST_CAPABILITY = (8, 0)
ALIGNMENT = 8
"""Widths that are no multiple of this are slow on tensor cores."""

_aten = torch.ops.aten


def can_split(device: torch.device) -> bool:
    """Whether this GPU has such products, and this torch compiles them."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < OLDEST_CAPABILITY:
        return False
    try:
        mm_with_dtype.get()
        return "out_dtype" in inspect.signature(tuned_mm.get()).parameters
    except (MissingName, TypeError, ValueError):
        return False


def split_linears(module: fx.GraphModule) -> int:
    """Replace the linear layers of a graph that can be replaced. Return how many these are.

    Nodes carry fake tensors as `meta["val"]`, as `torch.export` leaves them.
    """
    parts: dict[fx.Node, fx.Node] = {}
    count = 0
    for node in [node for node in module.graph.nodes if node.target is _aten.linear.default]:
        found = _narrow_weight(node.args[1])
        if found is None or not _is_suited(node):
            continue
        with module.graph.inserting_before(node):
            product = _product(module.graph, node, *found, parts)
        node.replace_all_uses_with(product)
        module.graph.erase_node(node)
        count += 1
    if count:
        module.graph.eliminate_dead_code()
        module.recompile()
    return count


def _is_suited(node: fx.Node) -> bool:
    x, weight = node.args[0].meta["val"], node.args[1].meta["val"]
    if x.dtype != torch.float32 or weight.dtype != torch.float32 or x.ndim < 2:
        return False
    return all(isinstance(size, int) and size % ALIGNMENT == 0 for size in weight.shape)


def _narrow_weight(weight: Any) -> tuple[fx.Node, fx.Node | None] | None:
    """Return what a weight was cast from, and the one number that it is multiplied by, if any; None for any other."""
    if weight.target is _aten.to.dtype:
        source = weight.args[0]
        return (source, None) if source.meta["val"].dtype in EXACT else None
    if weight.target is not _aten.mul.Tensor or not all(isinstance(factor, fx.Node) for factor in weight.args):
        return None
    for one, scale in (weight.args, weight.args[::-1]):
        found = _narrow_weight(one)
        if found is not None and found[1] is None and scale.meta["val"].numel() == 1:
            return found[0], scale
    return None


def _product(
    graph: fx.Graph, node: fx.Node, weight: fx.Node, scale: fx.Node | None, parts: dict[fx.Node, fx.Node]
) -> fx.Node:
    """Add nodes for x @ (scale * weight).T + bias. x: [..., inputs], weight: [outputs, inputs], bias: [outputs]."""
    x, bias = node.args[0], node.args[2] if len(node.args) > 2 else None
    outputs = weight.meta["val"].shape[0]
    if x not in parts:
        parts[x] = _parts(graph, x)
    if weight.meta["val"].dtype != torch.bfloat16:
        weight = add_node(graph, _aten.to.dtype, weight, torch.bfloat16)
    product = add_node(graph, mm_with_dtype.get(), parts[x], add_node(graph, _aten.t.default, weight), torch.float32)
    product = add_node(graph, _aten.view.default, product, [PARTS, -1, outputs])
    large, *small = (add_node(graph, _aten.select.int, product, 0, part) for part in range(PARTS))
    result = add_node(graph, _aten.add.Tensor, large, add_node(graph, _aten.add.Tensor, *small))
    if scale is not None:
        result = add_node(graph, _aten.mul.Tensor, result, scale)
    if bias is not None:
        result = add_node(graph, _aten.add.Tensor, result, bias)
    sizes = [add_node(graph, _aten.sym_size.int, x, dim) for dim in range(x.meta["val"].ndim - 1)]
    return add_node(graph, _aten.view.default, result, [*sizes, outputs])


def _parts(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """Return the bfloat16 parts of x, the largest first: [3 * rows, inputs].

    A mask cuts each part off. Inductor removes a cast to bfloat16 and back, and nothing would be left for the others.
    """
    rest = add_node(graph, _aten.reshape.default, x, [-1, x.meta["val"].shape[-1]])
    parts = []
    for _ in range(PARTS):
        bits = add_node(graph, _aten.view.dtype, rest, torch.int32)
        bits = add_node(graph, _aten.bitwise_and.Scalar, bits, UPPER_HALF)
        part = add_node(graph, _aten.view.dtype, bits, torch.float32)
        parts.append(add_node(graph, _aten.to.dtype, part, torch.bfloat16))
        rest = add_node(graph, _aten.sub.Tensor, rest, part)
    return add_node(graph, _aten.cat.default, parts)
