"""Inductor with the matrix products of large linear layers in float8: faster on Ada and Hopper, and less exact.

The graph rounds both factors of a product to float8 at every call, and each row has a scale of its own (Micikevicius et
al., FP8 Formats for Deep Learning, 2022). So the weights stay unchanged: a LoRA takes effect in the next step, and
nobody keeps a second copy of the model up to date. torchao's quantised tensors replace a model's weights, so they
cannot be used here. Rounding a weight costs as much time as a thousand rows save, or more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from ...common.torch_compat import FOR_FLOAT8, missing, scaled_mm, size_hint
from ...common.words import say
from ...identity.graph_spec import GraphSpec
from ...tracing.export import ExportedRegion
from .artifacts import Artifact
from .backend import InductorBackend
from .graph_edits import add_node

DTYPE = torch.float8_e4m3fn
MIN_WEIGHTS = 2**20
"""Weights of the smallest layer that is quantized."""
MIN_ROWS = 512
"""Rows of the smallest product that is quantized, in the example that a graph is traced with.

In that example, an image of 1024x1024 has seven times as many rows, and texts have tens of rows.
"""
OLDEST_CAPABILITY = (8, 9)

_aten = torch.ops.aten
_CASTS = (_aten.to.dtype, _aten.to.device, _aten.detach.default)


class Float8Executable:
    """An executable that knows whether any of its products is rounded. If none is, it must be as exact as any other."""

    def __init__(self, executable: Artifact, is_rounded: bool) -> None:
        self._executable = executable
        self.precision = DTYPE if is_rounded else None

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        return self._executable(*tensors)

    def to_bytes(self) -> bytes:
        return bytes([self.precision is not None]) + self._executable.to_bytes()

    def has_grown(self, data: bytes | None = None) -> bool:
        return self._executable.has_grown(None if data is None else data[1:])


class Float8Backend(InductorBackend):
    """Satisfies `Backend`."""

    name = "inductor_fp8"
    rounds = True

    def loads(self, device: torch.device) -> str | None:
        if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < OLDEST_CAPABILITY:
            return say(
                "Products in float8 need an NVIDIA GPU of the Ada generation or newer: choose the backend inductor."
            )
        return missing(*FOR_FLOAT8) or super().loads(device)

    def compile(self, exported: ExportedRegion) -> Float8Executable:
        count = quantize_linears(exported.program.graph_module)
        return Float8Executable(super().compile(exported), count > 0)

    def load(self, data: bytes, spec: GraphSpec) -> Float8Executable:
        return Float8Executable(super().load(data[1:], spec), data[0] > 0)


def quantize_linears(module: fx.GraphModule) -> int:
    """Make the large linear layers of a graph multiply in float8. Return how many there are.

    Nodes carry fake tensors as `meta["val"]`, as `torch.export` leaves them.
    """
    chosen = [node for node in module.graph.nodes if node.target is _aten.linear.default and _is_worth_it(node)]
    for node in chosen:
        with module.graph.inserting_before(node):
            product = _product(module.graph, *node.args, *([None] if len(node.args) == 2 else []))
        node.replace_all_uses_with(product)
        module.graph.erase_node(node)
    module.recompile()
    return len(chosen)


def _is_worth_it(node: fx.Node) -> bool:
    x, weight = node.args[0].meta["val"], node.args[1].meta["val"]
    if x.dtype not in (torch.float16, torch.bfloat16) or x.dtype != weight.dtype or x.ndim < 3:
        return False
    if not _is_input(node.args[1]) or isinstance(weight.shape[0], torch.SymInt):  # a low-rank branch
        return False
    if weight.shape[0] % 16 or weight.shape[1] % 16 or weight.numel() < MIN_WEIGHTS:
        return False
    return math.prod(_hint(size) for size in x.shape[:-1]) >= MIN_ROWS


def _is_input(weight: fx.Node) -> bool:
    """Whether a weight is one of the graph's, cast at most. One that the graph dequantises was rounded before."""
    while weight.target in _CASTS:
        weight = weight.args[0]
    return weight.op == "placeholder"


def _hint(size: int | torch.SymInt) -> int:
    return size_hint(size) if isinstance(size, torch.SymInt) else size


def _product(graph: fx.Graph, x: fx.Node, weight: fx.Node, bias: fx.Node | None) -> fx.Node:
    """Add nodes for x @ weight.T + bias. x: [..., inputs], weight: [outputs, inputs], bias: [outputs]."""
    like = x.meta["val"]
    outputs, inputs = weight.meta["val"].shape
    rows, row_scales = _rounded(graph, add_node(graph, _aten.reshape.default, x, [-1, inputs]))
    columns, column_scales = _rounded(graph, weight)
    columns, column_scales = (add_node(graph, _aten.t.default, each) for each in (columns, column_scales))
    # With a scale per row, every kernel can return bfloat16, but only some can return float16.
    options = (None, None, torch.bfloat16, True)
    result = add_node(graph, scaled_mm.get(), rows, columns, row_scales, column_scales, *options)
    result = add_node(graph, _aten.to.dtype, result, like.dtype)
    if bias is not None:
        result = add_node(graph, _aten.add.Tensor, result, bias)
    sizes = [add_node(graph, _aten.sym_size.int, x, dim) for dim in range(like.ndim - 1)]
    return add_node(graph, _aten.reshape.default, result, [*sizes, outputs])


def _rounded(graph: fx.Graph, rows: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return [n, k] as float8, and the factors that scale its rows back: [n, 1]."""
    wide = add_node(graph, _aten.to.dtype, rows, torch.float32)
    largest = add_node(graph, _aten.amax.default, add_node(graph, _aten.abs.default, wide), [1], True)
    limit = torch.finfo(DTYPE).max
    scales = add_node(graph, _aten.div.Tensor, add_node(graph, _aten.clamp_min.default, largest, 1e-12), limit)
    scaled = add_node(graph, _aten.clamp.default, add_node(graph, _aten.div.Tensor, wide, scales), -limit, limit)
    return add_node(graph, _aten.to.dtype, scaled, DTYPE), scales
