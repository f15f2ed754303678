"""Moves an artifact to another GPU of the machine.

Inductor writes the GPU's number into an artifact: into the Python code that launches the kernels, and into the
description of each kernel. The machine code itself is the same for all GPUs of a kind. So an artifact that was compiled
on one GPU runs on another one once the numbers are exchanged. Launched with the old numbers it would read addresses of
another GPU, which ends the process: a place that is not understood raises `CannotMove`.
"""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import replace
from typing import Any

from ...common.torch_compat import BytesReader, BytesWriter, CompiledTritonKernels, MissingName, standalone_compile
from .artifact_content import ArtifactContent

_PLACES = re.compile(r"(_DeviceGuard\(|set_device\(|get_raw_stream\(|type='cuda', index=|'cuda:|\"cuda:)(\d+)")
"""Where generated code has a GPU's number."""
_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)
_OTHER_PLACES = re.compile(r"cuda:\d|\bindex=\d|[Dd]evice(?:_idx|_index)?[(=]\s*\d")
"""What looks like a GPU's number."""


class CannotMove(Exception):
    """This artifact cannot be moved to another GPU."""


def can_move() -> bool:
    """Whether this torch makes artifacts that can be moved (since 2.10)."""
    try:
        names = inspect.signature(standalone_compile.get()).parameters
        return "aot" in names and all(name.get() for name in (BytesReader, BytesWriter, CompiledTritonKernels))
    except MissingName:
        return False


def moved(data: bytes, index: int) -> bytes:
    """Return an artifact for the GPU with this number. Raises CannotMove, and what unpickling raises.

    This unpickles `data`, so callers pass only bytes that they trust.
    """
    if f"_DeviceGuard({index})".encode() in data:  # its code is in it as text, and is for one GPU
        return data
    if not can_move():
        raise CannotMove("this torch makes artifacts for one GPU only")
    content = ArtifactContent.read(data)
    if content is None:
        raise CannotMove("its format is another one")
    if not content.graphs:
        raise CannotMove("it has no graph")
    if all(set(graph.device_idxs) <= {index} for graph in content.graphs):
        return data
    for graph in content.graphs:
        _move(graph, index)
    return content.to_bytes()


def moved_source(source: str, index: int) -> str:
    """Return generated code with another GPU's number. Raises CannotMove if it has numbers in places unknown here."""
    code = _COMMENT.sub("", source)
    if unknown := _OTHER_PLACES.search(_PLACES.sub("", code)):
        raise CannotMove(f"its code has a GPU's number in a place that is not known: {unknown.group()}")
    if len({number for _, number in _PLACES.findall(code)}) > 1:
        raise CannotMove("it runs on several GPUs")
    return _PLACES.sub(rf"\g<1>{index}", source)


def _move(graph: Any, index: int) -> None:
    """Exchange the number in one compiled graph (torch._inductor.output_code.CompiledFxGraph)."""
    if graph.constants and any(getattr(value, "is_cuda", False) for value in graph.constants.values()):
        raise CannotMove("it holds tensors")
    key, source = CompiledTritonKernels.get().key, graph.source_code
    keys = {key(kernel): key(moved_source(kernel, index)) for kernel in _kernels(source)}
    graph.source_code = moved_source(source, index)
    graph.cache_key = f"{graph.cache_key}g{index}"  # names the file that the code is written to
    graph.device_idxs = type(graph.device_idxs)([index])
    bundle = graph._triton_bundle
    if bundle is None:
        return
    for launcher in bundle.static_autotuners:
        _move_kernel(launcher.kernel, index)
    graph._triton_bundle = replace(
        bundle,
        kernel_artifacts=[replace(artifact, device=index) for artifact in bundle.kernel_artifacts],
        static_autotuners=[
            replace(each, cache_key=keys.get(each.cache_key, each.cache_key)) for each in bundle.static_autotuners
        ],
    )


def _move_kernel(kernel: Any, index: int) -> None:
    """Exchange the number in a kernel that was compiled (CachingAutotuner)."""
    kernel.triton_meta["device"] = index
    kernel.device_props = kernel.device_props._replace(index=index)
    for result in kernel.compile_results:
        result.compile_meta["device"] = index


def _kernels(source: str) -> list[str]:
    """Return the code of each kernel, as the generated code hands it to `async_compile.triton`."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [
        call.args[1].value for call in calls
        if getattr(call.func, "attr", "") == "triton" and isinstance(call.args[1], ast.Constant)
    ]  # fmt: skip
