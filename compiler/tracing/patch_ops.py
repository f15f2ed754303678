"""Patch functions as opaque operators: a graph calls them where the block's own code would.

A graph that was traced without a patch cannot serve a block inside which the patch acts. If the patch takes and
returns tensors of known shapes, the block gets another graph with an operator in the patch's place. On each call
the operator runs the patch function of that call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..common.host import PatchCall
from ..common.reason import ReasonCode, ReasonedError, Unsupported
from ..identity.context_options import Unknown
from .by_name import decode, encode
from .once import once

_REPLACEMENT = "(str hook, str constants, SymInt[] sizes, Tensor q, Tensor k, Tensor v) -> Tensor"
_OUTPUT = "(str hook, str constants, SymInt[] sizes, Tensor x) -> Tensor"

_running = threading.local()


class WrongOutput(ReasonedError):
    """A patch returned what a graph cannot take."""


class PatchFailed(Exception):
    """A patch raised `error` inside a graph. The graph itself is not at fault."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


@once
def register_operators() -> None:
    """Define the operators of `torch.ops.compiled_graphs`, unless another copy of this package did.

    Call this before a graph that uses them is traced, loaded or called.
    """
    if hasattr(torch.ops.compiled_graphs, "replacement_patch"):
        return
    for name, schema in (("replacement_patch", _REPLACEMENT), ("output_patch", _OUTPUT)):
        torch.library.define(f"compiled_graphs::{name}", schema)
        torch.library.impl(f"compiled_graphs::{name}", "CompositeExplicitAutograd", _run)
        torch.library.register_fake(f"compiled_graphs::{name}", _fake)


@contextmanager
def calling(call: PatchCall) -> Iterator[None]:
    """Have the operators of this thread call patches by `call`. Raises PatchFailed after the graph if a patch raised.

    The exception is kept until then, because a compiled graph need not pass it on unchanged.
    """
    outer = getattr(_running, "state", None)
    _running.state = state = {"call": call, "error": None}
    try:
        yield
    finally:
        _running.state = outer
        if state["error"] is not None:
            raise PatchFailed(state["error"])


def _fake(hook: str, constants: str, sizes: Sequence[int], x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def _run(hook: str, constants: str, sizes: Sequence[int] | None, *tensors: torch.Tensor) -> torch.Tensor:
    """Call a patch. `sizes` are None instead of empty in an AOTInductor package."""
    state = _running.state
    expected = tensors[0]
    if state["error"] is None:
        try:
            result = state["call"](hook, decode(constants, (*(sizes or ()),)), *tensors)
            if (result.shape, result.dtype) == (expected.shape, expected.dtype):
                # An operator must return a new tensor, but a patch may return one that it was given.
                inputs = {tensor.untyped_storage().data_ptr() for tensor in tensors}
                output = result.clone() if result.untyped_storage().data_ptr() in inputs else result
                return output.contiguous()
            raise WrongOutput(ReasonCode.PATCH_RESULT, hook)
        except BaseException as error:
            state["error"] = error
    return torch.zeros_like(expected, memory_format=torch.contiguous_format)


def placeholder(hook: str, known: Container[str]) -> Callable[..., torch.Tensor]:
    """Return the function that takes a patch's place while a region is traced.

    `known` are the options that each call brings itself. The options that the block adds become constants of the
    graph, and sizes among them are the call's. Raises Unsupported if one of those is not a plain value.
    """
    register_operators()

    def patch(*arguments: Any) -> torch.Tensor:
        *tensors, options = arguments
        added = {n: v for n, v in dict.items(options) if n not in known and not isinstance(v, Unknown)}
        for name, value in added.items():
            if not _is_plain(value):
                raise Unsupported(ReasonCode.PATCH_ARGUMENT, name)
        sizes: list[torch.SymInt] = []
        constants = encode(added, sizes)
        if len(tensors) == 1:
            return torch.ops.compiled_graphs.output_patch(hook, constants, sizes, *tensors)
        return torch.ops.compiled_graphs.replacement_patch(hook, constants, sizes, *tensors)

    return patch


def _is_plain(value: Any) -> bool:
    """Whether the value is a constant, a size, or a list of those, such as where the image's tokens are."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, int | float | str | None | torch.dtype | torch.SymInt)
