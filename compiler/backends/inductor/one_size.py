"""Operators whose kernels Inductor makes for the example's sizes only, though tracing left the sizes open.

Their lowerings need a number where they get a symbol. They take the example's, and note that in the shape environment
of the trace. A graph from one of Inductor's caches has no such note. So graphs with these operators are refused, by
name, and what the environment says after a compile is looked at as well (`ExportedRegion.spec_now`).
"""

from __future__ import annotations

import re
from typing import Any

import torch

from ...common.reason import ReasonCode, Unsupported
from ...common.torch_compat import arguments_of

_POOLS = re.compile(r"aten\._?(?P<kind>adaptive_avg|adaptive_max|fractional_max|avg|max)_pool(?P<rank>[123])d")


def refuse_one_size(module: torch.fx.GraphModule) -> None:
    """Raise Unsupported if a graph has an operator that would be compiled for one of its sizes only."""
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            if node.op == "call_function" and _is_for_one_size(node):
                raise Unsupported(ReasonCode.ONE_SIZE, str(node.target).removesuffix(".default"))


def _is_for_one_size(node: torch.fx.Node) -> bool:
    name, given = str(node.target), arguments_of(node)
    value = getattr(given.get("self"), "meta", {}).get("val")
    if not isinstance(value, torch.Tensor):
        return False
    if name.startswith("aten.diagonal."):  # its length is the lesser of two sizes, as it is in the example
        return _is_open(value.shape[given[dim]] for dim in ("dim1", "dim2"))
    if name.startswith("aten.glu."):
        return _is_open(value.shape[given["dim"] :][:1])
    found = _POOLS.match(name)
    if found is None or not _is_open(value.shape[-int(found["rank"]) :]):
        return False
    if found["kind"] in ("avg", "max"):
        return bool(given.get("ceil_mode"))
    size = given["output_size"]
    return any(each != 1 for each in (size if isinstance(size, list | tuple) else [size]))


def _is_open(sizes: Any) -> bool:
    return any(isinstance(size, torch.SymInt) for size in sizes)
