"""Each graph of a model once on random weights and inputs, compared with the uncompiled block.

No checkpoint is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..common.compare import disagreement
from ..common.errors import one_line
from ..common.host import Host
from ..common.tensor_slots import tensor_slots
from ..common.tensors import tensors_in
from ..compile_cache.graph_cache import CacheEntry
from ..identity.call_signature import call_forward
from ..identity.graph_spec import MEMORY_FORMATS, GraphSpec
from ..identity.regions import Region
from ..tracing.frame_windows import traced_window
from ..tracing.graph_request import GraphRequest
from ..tracing.weightless_copy import weightless_copy
from .compiled_model import CompiledModel

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckResult:
    """The result for one graph."""

    wrong: str = ""
    """How it differs from the uncompiled block; empty if it does not."""
    skipped: str = ""
    """Why it could not be compared."""


def check_graphs(compiled: CompiledModel, seed: int = 0) -> dict[str, CheckResult]:
    """Run each graph of a model once, and return the results by key."""
    results: dict[str, CheckResult] = {}
    with torch.inference_mode(False), torch.no_grad(), compiled.trial():
        for region, entry in compiled.graphs_by_region():
            if entry.graph.key not in results:
                generator = torch.Generator().manual_seed(seed)
                results[entry.graph.key] = _checked(region, entry, compiled.device, compiled.host, generator)
    return results


def _checked(
    region: Region, entry: CacheEntry, device: torch.device, host: Host, generator: torch.Generator
) -> CheckResult:
    spec = entry.graph.spec
    request = GraphRequest.like(entry.graph, region, device)
    if request.signature.patch_points:
        return CheckResult(skipped="it has places for patches, which a sampling brings")
    if any(isinstance(size, str) for weight in spec.weights for size in weight.shape):
        return CheckResult(skipped="it has a LoRA beside its weights, which a sampling brings")
    try:
        module = _random_copy(region.module, spec, host, device, generator)
        weights = [group[name] for _, (group, name) in tensor_slots(module)]
        inputs = _random_inputs(request, spec, generator)
        theirs = [tensor.clone() for tensor in inputs]
        arguments = request.signature.fill(theirs)
        window = traced_window(module, host, arguments)
        arguments |= window.arguments if window else {}
        expected = call_forward(module, arguments, {name: {} for name in request.signature.context})
        if window:
            expected = expected, window.left()[0]
    except Exception as error:  # code that wants more of its call than its shapes
        log.debug("%s on random weights", spec.region, exc_info=error)
        return CheckResult(skipped=f"the uncompiled block does not run on random weights ({one_line(error)})")
    try:
        found = spec.rebuild(entry.graph(weights, inputs))
        if writes := spec.frame_writes:
            result, kept = found
            found = result, writes.values(window.given, result, kept)
    except Exception as error:  # a graph that cannot run is a graph that is wrong
        return CheckResult(wrong=one_line(error))
    written = spec.mutated
    pairs = [*tensors_in(found), *(inputs[i] for i in written)], [*tensors_in(expected), *(theirs[i] for i in written)]
    return CheckResult(wrong=disagreement(*pairs, entry.graph.precision or host.precision(module)) or "")


def _random_copy(
    module: nn.Module, spec: GraphSpec, host: Host, device: torch.device, generator: torch.Generator
) -> nn.Module:
    """Return a copy of a region with random weights. Raises ValueError for weights that consist of other tensors."""
    copied = weightless_copy(module, host, lambda tensor: tensor)
    slots = dict(tensor_slots(copied))
    if list(slots) != list(spec.weight_names):
        raise ValueError("its weights are quantised")
    layouts: Mapping[str, Any] = dict(zip(spec.weight_names, spec.weight_layout, strict=True))
    for name, (group, own) in slots.items():
        shape, stride, dtype, _ = layouts[name]
        value = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        value.copy_(_weight(name, shape, dtype, generator))
        is_parameter = isinstance(group[own], nn.Parameter)
        group[own] = nn.Parameter(value, requires_grad=False) if is_parameter else value
    return copied


def _weight(name: str, shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if not _is_float(dtype):
        return torch.zeros(shape)
    drawn = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        return drawn * max(1, drawn[0].numel()) ** -0.5
    return 1 + 0.1 * drawn if name.endswith(("weight", "scale", "gamma")) else 0.02 * drawn


def _random_inputs(request: GraphRequest, spec: GraphSpec, generator: torch.Generator) -> list[torch.Tensor]:
    made: list[torch.Tensor] = []
    for shape, dtype, given in zip(request.hints, request.dtypes, spec.inputs, strict=True):
        value = torch.randn(shape, generator=generator) if _is_float(dtype) else torch.ones(shape)
        made.append(value.to(request.device, dtype, memory_format=MEMORY_FORMATS[given.memory_format]))
    return made


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
