"""The reference backend: runs an exported graph operator by operator.

It shows whether a region was traced correctly, without any code generator, and the machine needs no compiler.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import nullcontext

import torch

from ...common.torch_compat import pytree
from ...identity.graph_spec import GraphSpec
from ...tracing.export import ExportedRegion
from ..base import GiveWay, at_once


class EagerExecutable:
    """An exported program that runs operator by operator."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        self._program = program
        self._run = program.graph_module

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        return [output for output in self._run(*tensors) if output is not None]

    def to_bytes(self) -> bytes:
        self._program.example_inputs = None  # fake tensors, which torch.export cannot read back
        buffer = io.BytesIO()
        torch.export.save(self._program, buffer)
        return buffer.getvalue()


class EagerBackend:
    """Satisfies `Backend`."""

    name = "eager"
    capture_context = trial_context = nullcontext
    rounds = False

    def available(self, device: torch.device) -> str | None:
        return None

    def loads(self, device: torch.device) -> str | None:
        return None

    def environment(self, device: torch.device) -> dict[str, str]:
        return {"backend": self.name, "torch": torch.__version__, "device": device.type}

    def warm_up(self, give_way: GiveWay = at_once) -> None:
        pass

    def compile(self, exported: ExportedRegion) -> EagerExecutable:
        return EagerExecutable(exported.program)

    def load(self, data: bytes, spec: GraphSpec) -> EagerExecutable:
        program = torch.export.load(io.BytesIO(data))
        _move(program.graph_module, torch.device(spec.device))
        return EagerExecutable(program)


def _move(module: torch.fx.GraphModule, device: torch.device) -> None:
    """Have the nodes that make tensors make them on this one of several devices of a type."""

    def moved(found: torch.device) -> torch.device:
        return device if found.type == device.type and found.index is not None else found

    for node in module.graph.nodes:
        node.args, node.kwargs = pytree.tree_map_only(torch.device, moved, (node.args, node.kwargs))
    module.recompile()
