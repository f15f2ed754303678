"""A function of tensors as an opaque operator: a graph calls it by its name instead of tracing it.

Libraries choose a kernel for the GPU inside such a function, and hand the kernel addresses. Fake tensors have none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .by_name import decode, encode, function_now
from .once import once

_SCHEMA = "(str function, str[] names, str constants, Tensor[] tensors, SymInt[] shape, ScalarType dtype) -> Tensor"


@once
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

    `constants` are plain values and dtypes. The function returns one new tensor of this shape and dtype. The first
    tensor says on which device.
    """
    register_operator()
    return torch.ops.compiled_graphs.call_by_name(
        function, [*tensors], encode(constants), [*tensors.values()], [*shape], dtype
    )


def _run(
    function: str,
    names: Sequence[str],
    constants: str,
    tensors: Sequence[torch.Tensor],
    shape: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    arguments = dict(zip(names, tensors, strict=True))
    return function_now(function)(**arguments, **decode(constants)).to(dtype).contiguous()


def _fake(
    function: str,
    names: Sequence[str],
    constants: str,
    tensors: Sequence[torch.Tensor],
    shape: Sequence[int | torch.SymInt],
    dtype: torch.dtype,
) -> torch.Tensor:
    return tensors[0].new_empty(shape, dtype=dtype)
