"""Patch functions as opaque operators: a graph calls them where the block's own code would.

A graph that was traced without a patch cannot serve a block inside which the patch acts. If the patch takes and
returns tensors of known shapes, the block gets another graph with an operator in the patch's place. On each call
the operator runs the patch function of that call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from ..common.host import PatchCall
from ..common.reason import ReasonCode, ReasonedError, Unsupported
from ..identity.context_options import Unknown
from .by_name import decode, encode
from .once import once

_REPLACEMENT = "(str hook, str constants, SymInt[] sizes, Tensor q, Tensor k, Tensor v) -> Tensor"
_OUTPUT = "(str hook, str constants, SymInt[] sizes, Tensor x) -> Tensor"


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
    if hasattr(torch.ops.compiled_graphs, "replacement_hook"):
        return
    for name, schema in (("replacement_hook", _REPLACEMENT), ("output_hook", _OUTPUT)):
        torch.library.define(f"compiled_graphs::{name}", schema)
        torch.library.impl(f"compiled_graphs::{name}", "CompositeExplicitAutograd", _run)
        torch.library.register_fake(f"compiled_graphs::{name}", _fake)


@contextmanager
def calling(call: PatchCall) -> Iterator[None]:
    """Have the operators of this thread call patches by `call`. Raises PatchFailed after the graph if a patch raised.

    The exception is kept until then, because a compiled graph need not pass it on unchanged.
    """
    running = _running()
    outer = getattr(running, "state", None)
    running.state = state = {"call": call, "error": None, "refused": ""}
    try:
        yield
    finally:
        running.state = outer
        if state["refused"]:
            raise PatchFailed(WrongOutput(ReasonCode.PATCH_RESULT, state["refused"]))
        if state["error"] is not None:
            raise PatchFailed(state["error"])


def acts(hook: str) -> bool:
    """Whether the running call has a patch for a hook that its graph need not know about."""
    state = getattr(_running(), "state", None)
    return state is not None and hook in getattr(state["call"], "unforeseen", ())


def call_patch(
    hook: str, constants: Mapping[str, Any], tensors: Sequence[torch.Tensor], shape: Sequence[int], **arguments: Any
) -> torch.Tensor:
    """Call the running call's patch for a hook. What it returns has this shape, and the first tensor's dtype."""
    running, like = _running(), tensors[0]
    state = running.state
    if state["error"] is None and not state["refused"]:
        try:
            running.state = None  # a patch may run another compiled model
            result = state["call"](hook, constants, *tensors, **arguments)
            if (result.shape, result.dtype) == (torch.Size(shape), like.dtype):
                # An operator must return a new tensor, but a patch may return one that it was given.
                inputs = {tensor.untyped_storage().data_ptr() for tensor in tensors}
                output = result.clone() if result.untyped_storage().data_ptr() in inputs else result
                return output.contiguous()
            state["refused"] = hook
        except BaseException as error:
            state["error"] = error
        finally:
            running.state = state
    return like.new_zeros(shape)


@cache
def _running() -> threading.local:
    """Return what threads run, as plain dictionaries: copies of this package share it, as they share the operators."""
    return vars(torch.ops.compiled_graphs).setdefault("running", threading.local())


def _fake(hook: str, constants: str, sizes: Sequence[int], x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def _run(hook: str, constants: str, sizes: Sequence[int] | None, *tensors: torch.Tensor) -> torch.Tensor:
    return call_patch(hook, decoded(constants, sizes), tensors, tensors[0].shape)


def placeholder(hook: str, known: Container[str]) -> Callable[..., torch.Tensor]:
    """Return the function that takes a patch's place while a region is traced.

    `known` are the options that each call brings itself. The options that the block adds become constants of the
    graph, and sizes among them are the call's. Raises Unsupported if one of those is not a plain value.
    """
    register_operators()

    def patch(*arguments: Any) -> torch.Tensor:
        *tensors, options = arguments
        constants, sizes = added_options(options, known)
        if len(tensors) == 1:
            return torch.ops.compiled_graphs.output_hook(hook, constants, sizes, *tensors)
        return torch.ops.compiled_graphs.replacement_hook(hook, constants, sizes, *tensors)

    return patch


def added_options(options: Mapping[str, Any], known: Container[str]) -> tuple[str, list[torch.SymInt]]:
    """Return the options that a block adds to those `known`, as text, and the sizes among them.

    Raises Unsupported if one is not a plain value.
    """
    added = {n: v for n, v in dict.items(options) if n not in known and not isinstance(v, Unknown)}
    for name, value in added.items():
        if not _is_plain(value):
            raise Unsupported(ReasonCode.PATCH_ARGUMENT, name)
    sizes: list[torch.SymInt] = []
    return encode(added, sizes), sizes


def decoded(constants: str, sizes: Sequence[int] | None) -> dict[str, Any]:
    """Return what `added_options` was given. An AOTInductor package gives None for sizes if there are none."""
    return decode(constants, (*(sizes or ()),))


def _is_plain(value: Any) -> bool:
    """Whether the value is a constant, a size, or a list of those, such as where the image's tokens are."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, int | float | str | None | torch.dtype | torch.SymInt)
