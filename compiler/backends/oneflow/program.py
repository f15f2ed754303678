"""This module turns an exported graph into plain data that can be read without torch."""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from ...common.reason import ReasonCode, Unsupported
from ...common.torch_compat import InputKind, OpOverload, OutputKind
from ...tracing.export import ExportedRegion
from .operators import OPERATORS

DTYPES = {
    str(dtype): str(dtype).removeprefix("torch.")
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
"""The dtypes that OneFlow has, with its names for them. OneFlow 0.9.0 lacks kernels for bfloat16."""
GPU_ONLY = {"float16"}

_WHOLE = ("linear", "nan_to_num", "rms_norm", "scaled_dot_product_attention", "silu")
"""Operators that are not decomposed: OneFlow has them, or they translate better as a whole."""


def portable(exported: ExportedRegion) -> bytes:
    """Return an exported graph as JSON.

    `inputs` are names, the weights' first. `nodes` are in order, each with its name, operator, arguments and keyword
    arguments. `results` are the values to compute. `outputs` are the region's tensors, each a result or an input.
    `writes` are pairs of an input and the result that is written to it, by number. Raises Unsupported, with its name,
    for an operator or dtype that OneFlow lacks.
    """
    _check_dtypes(exported)
    table = torch.export.default_decompositions()
    for name in _WHOLE:
        table.pop(getattr(torch.ops.aten, name).default, None)
    program = exported.program.run_decompositions(table)
    if any(spec.kind is not InputKind.USER_INPUT for spec in program.graph_signature.input_specs):
        raise Unsupported(ReasonCode.ONEFLOW_CONSTANT)
    inputs = [node.name for node in program.graph.nodes if node.op == "placeholder"]
    ends = _Ends(program, inputs)
    nodes = _needed(program.graph, ends.nodes)
    if unknown := sorted({_target(node) for node in nodes} - OPERATORS.keys()):
        raise Unsupported(ReasonCode.ONEFLOW_OPERATOR, unknown[0])
    fields = {
        "inputs": inputs,
        "weights": [[DTYPES[weight.dtype], list(weight.shape)] for weight in exported.spec.weights],
        "nodes": [[n.name, _target(n), _encode(n.args), {k: _encode(v) for k, v in n.kwargs.items()}] for n in nodes],
        "results": [{"node": node.name} for node in ends.nodes],
        "outputs": ends.outputs,
        "writes": ends.writes,
    }
    return json.dumps(fields, separators=(",", ":")).encode()


class _Ends:
    """The values that the graph must compute, and whether each is returned or written to an input."""

    def __init__(self, program: torch.export.ExportedProgram, inputs: list[str]) -> None:
        self.nodes: list[torch.fx.Node] = []
        self.outputs: list[dict[str, int]] = []
        self.writes: list[tuple[int, int]] = []
        written: dict[torch.fx.Node, int] = {}
        values = program.graph.output_node().args[0]
        for spec, value in zip(program.graph_signature.output_specs, values, strict=True):
            if spec.kind is OutputKind.USER_INPUT_MUTATION:
                written[value] = inputs.index(spec.target)
                self.writes.append((written[value], self._result(value)))
            elif isinstance(value, torch.fx.Node):
                is_input = value in written or value.op == "placeholder"
                place = written[value] if value in written else inputs.index(value.name) if is_input else None
                self.outputs.append({"input": place} if is_input else {"result": self._result(value)})

    def _result(self, node: torch.fx.Node) -> int:
        if node not in self.nodes:
            self.nodes.append(node)
        return self.nodes.index(node)


def _check_dtypes(exported: ExportedRegion) -> None:
    spec = exported.spec
    for dtype in sorted({item.dtype for item in (*spec.weights, *spec.inputs)}):
        if dtype not in DTYPES:
            raise Unsupported(ReasonCode.ONEFLOW_DTYPE, dtype.removeprefix("torch."))
        if DTYPES[dtype] in GPU_ONLY and not spec.device.startswith("cuda"):
            raise Unsupported(ReasonCode.ONEFLOW_CPU_DTYPE, DTYPES[dtype])


def _needed(graph: torch.fx.Graph, results: list[torch.fx.Node]) -> list[torch.fx.Node]:
    """Return the nodes that results depend on, in order. Nodes that only check sizes or metadata are left out."""
    wanted = set(results)
    for node in reversed(graph.nodes):
        if node in wanted:
            wanted.update(node.all_input_nodes)
    return [node for node in graph.nodes if node in wanted and node.op == "call_function"]


def _target(node: torch.fx.Node) -> str:
    target = node.target
    return str(target) if isinstance(target, OpOverload) else f"{target.__module__}.{target.__name__}"


def _encode(value: Any) -> Any:
    if isinstance(value, torch.fx.Node):
        return {"node": value.name}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    if isinstance(value, torch.dtype):
        return {"dtype": DTYPES.get(str(value)) or str(value)}
    if isinstance(value, torch.device):
        return {"device": ""}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if isinstance(value, torch.layout | torch.memory_format):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise Unsupported(ReasonCode.ONEFLOW_ARGUMENT, type(value).__name__)
