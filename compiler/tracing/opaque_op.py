"""A function of tensors as an opaque operator: a graph calls it by its name instead of tracing it.

Libraries choose a kernel for the GPU inside such a function, and hand the kernel addresses. Fake tensors have none.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

_SCHEMA = "(str function, str arguments, Tensor[] tensors, SymInt[] shape, ScalarType dtype) -> Tensor"


@lru_cache(maxsize=1)
def register_operator() -> None:
    """Define `torch.ops.compiled_graphs.call_by_name`, unless another copy of this package did.

    Call this before a graph that uses it is traced, loaded or called.
    """
    if hasattr(torch.ops.compiled_graphs, "call_by_name"):
        return
    torch.library.define("compiled_graphs::call_by_name", _SCHEMA)
    torch.library.impl("compiled_graphs::call_by_name", "CompositeExplicitAutograd", _run)
    torch.library.register_fake("compiled_graphs::call_by_name", _fake)


def call_by_name(
    function: str,
    tensors: Mapping[str, torch.Tensor],
    constants: Mapping[str, Any],
    shape: Sequence[int | torch.SymInt],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Call `module:name` with these keyword arguments while a region is traced.

    `constants` are plain values and dtypes. The function returns one new tensor of this shape and dtype.
    """
    register_operator()
    values = {n: {"dtype": str(v)} if isinstance(v, torch.dtype) else v for n, v in constants.items()}
    arguments = json.dumps({"tensors": [*tensors], "constants": values})
    return torch.ops.compiled_graphs.call_by_name(function, arguments, [*tensors.values()], [*shape], dtype)


@lru_cache(maxsize=1024)
def _decoded(arguments: str) -> tuple[list[str], dict[str, Any]]:
    decoded = json.loads(arguments)
    values = decoded["constants"].items()
    constants = {n: getattr(torch, v["dtype"].removeprefix("torch.")) if type(v) is dict else v for n, v in values}
    return decoded["tensors"], constants


@lru_cache(maxsize=64)
def _resolved(name: str) -> Callable:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _run(
    function: str, arguments: str, tensors: Sequence[torch.Tensor], shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    names, constants = _decoded(arguments)
    return _resolved(function)(**dict(zip(names, tensors, strict=True)), **constants).to(dtype).contiguous()


def _fake(
    function: str,
    arguments: str,
    tensors: Sequence[torch.Tensor],
    shape: Sequence[int | torch.SymInt],
    dtype: torch.dtype,
) -> torch.Tensor:
    return tensors[0].new_empty(shape, dtype=dtype)
