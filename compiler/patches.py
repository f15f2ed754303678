"""Patch functions as opaque operators: a graph calls them where the block's own code would.

A patch that acts inside a block keeps the block's graph from being used. Where it takes and gives tensors of
known shapes, the block has another graph with an operator in its place, and the operator calls, each time,
the function that the person has put there by then.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol

import torch

from .options import Unknown
from .signature import Unsupported

PatchCall = Callable[..., torch.Tensor]
"""Calls the patch for a hook: f(hook, constants, *tensors) -> tensor of the shape and dtype of the first."""


class RecordedPatches(Protocol):
    """A call's patches, called once for an eager region; a graph is then given what they returned."""

    error: str
    """How what the graph gave to a patch differs from what the region gave; empty if it does not."""

    @property
    def context(self) -> Mapping[str, Any]:
        """The context arguments for the eager region."""
        ...

    def hand_over(self) -> None:
        """Leave in the call's own context what the region left in the one that it was given."""
        ...

    def __call__(self, hook: str, constants: Mapping[str, Any], *tensors: torch.Tensor) -> torch.Tensor: ...


_REPLACEMENT = "(str hook, str constants, Tensor q, Tensor k, Tensor v) -> Tensor"
_OUTPUT = "(str hook, str constants, Tensor x) -> Tensor"

_running = threading.local()


class WrongOutput(Exception):
    """A patch gave what a graph cannot take. The message is the reason a person is shown."""


class PatchFailed(Exception):
    """A patch raised `error` inside of a graph, which says nothing of the graph."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


@lru_cache(maxsize=1)
def register_operators() -> None:
    """Define the operators of `torch.ops.compiled_graphs`, unless another copy of this package did.

    Needed before a graph that uses them is traced, loaded or called.
    """
    if hasattr(torch.ops.compiled_graphs, "replacement_patch"):
        return
    for name, schema in (("replacement_patch", _REPLACEMENT), ("output_patch", _OUTPUT)):
        torch.library.define(f"compiled_graphs::{name}", schema)
        torch.library.impl(f"compiled_graphs::{name}", "CompositeExplicitAutograd", _run)
        torch.library.register_fake(f"compiled_graphs::{name}", lambda hook, constants, x, *rest: x.new_empty(x.shape))


@contextmanager
def calling(call: PatchCall) -> Iterator[None]:
    """Let the operators of this thread call patches in this way. Raises PatchFailed, after the graph, if one raised.

    A compiled graph need not let an exception through as it was.
    """
    outer = getattr(_running, "state", None)
    _running.state = state = {"call": call, "error": None}
    try:
        yield
    finally:
        _running.state = outer
        if state["error"] is not None:
            raise PatchFailed(state["error"])


def _run(hook: str, constants: str, *tensors: torch.Tensor) -> torch.Tensor:
    state = _running.state
    expected = tensors[0]
    if state["error"] is None:
        try:
            result = state["call"](hook, _decode(constants), *tensors)
            if (result.shape, result.dtype) == (expected.shape, expected.dtype):
                # An operator's result is its own, and a patch may hand on what it was given.
                theirs = {tensor.untyped_storage().data_ptr() for tensor in tensors}
                own = result.clone() if result.untyped_storage().data_ptr() in theirs else result
                return own.contiguous()
            raise WrongOutput(f"patch {hook} changes the shape or dtype")
        except BaseException as error:
            state["error"] = error
    return torch.zeros_like(expected, memory_format=torch.contiguous_format)


def stand_in(hook: str, known: Container[str]) -> Callable[..., torch.Tensor]:
    """Return what takes a patch's place while a region is traced. `known` are options that every call has anew.

    Of the options that the block adds, plain values become part of the graph. Raises Unsupported for others.
    """
    register_operators()

    def patch(*arguments: Any) -> torch.Tensor:
        *tensors, options = arguments
        added = {n: v for n, v in dict.items(options) if n not in known and not isinstance(v, Unknown)}
        constants = _encode(added)
        if len(tensors) == 1:
            return torch.ops.compiled_graphs.output_patch(hook, constants, *tensors)
        return torch.ops.compiled_graphs.replacement_patch(hook, constants, *tensors)

    return patch


def _encode(constants: Mapping[str, Any]) -> str:
    for name, value in constants.items():
        if not isinstance(value, int | float | str | None | torch.dtype) or isinstance(value, torch.SymInt):
            raise Unsupported(f"a patch that is given {name}, which is no plain value")
    return json.dumps({n: {"dtype": str(v)} if isinstance(v, torch.dtype) else v for n, v in constants.items()})


@lru_cache(maxsize=1024)
def _decode(constants: str) -> dict[str, Any]:
    values = json.loads(constants)
    return {n: getattr(torch, v["dtype"].removeprefix("torch.")) if type(v) is dict else v for n, v in values.items()}
