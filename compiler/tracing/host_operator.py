"""A function of the host as an operator that graphs call by its name, such as attention over several processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch

Attention = Callable[..., torch.Tensor]


def as_operator(function: Attention, name: str, result: Attention | None = None) -> Attention:
    """Register a function of tensors as a torch operator; return what blocks call in its place.

    `name` is "NAMESPACE::OPERATOR". A graph does not look into the operator, so the function may exchange data with
    other processes. `result` returns an empty tensor in the form of the function's result; by default it is like the
    first tensor. Each process registers it before it compiles or loads graphs that call it. A name is registered once.
    Raises ValueError if the name has another form, and what torch raises for one that is taken.
    """
    namespace, separator, operator = name.partition("::")
    if not (separator and namespace.isidentifier() and operator.isidentifier()):
        raise ValueError(f'"{name}" is no name of an operator: write "NAMESPACE::OPERATOR"')
    parameters = ", ".join(f"Tensor {parameter}" for parameter in inspect.signature(function).parameters)

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        made = function(*tensors).contiguous()
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        return made.clone() if made.untyped_storage().data_ptr() in given else made

    registered = torch.library.custom_op(name, run, mutates_args=(), schema=f"({parameters}) -> Tensor")
    registered.register_fake(result or _like_first)
    return getattr(getattr(torch.ops, namespace), operator)


def _like_first(first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(first, memory_format=torch.contiguous_format)
