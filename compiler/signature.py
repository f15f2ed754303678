"""The structure of a call, and the key of a graph.

A call's structure is what may choose a different graph: which inputs are there, their ranks, dtypes and
devices, and every argument that is not a tensor. Sizes are not part of it: they are symbols of one graph.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)
"""The exact types a graph takes; a subclass (quantised, wrapped, fake) may compute something else."""

STATIC_TYPES = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""What an argument that is no tensor may be: a value that a key can hold."""


class Unsupported(Exception):
    """A call or region that no graph can serve; the message is the reason a person is shown."""


@dataclass(frozen=True)
class Call:
    """One call of a region, bound to the parameters of its `forward`."""

    arguments: Mapping[str, Any]
    """Every parameter by name, in the order of the signature, defaults included, context arguments left out."""
    context: Mapping[str, Any]
    """The host's bookkeeping by parameter name."""


@dataclass(frozen=True)
class Structure:
    """What of a call, sizes aside, decides which graph serves it."""

    text: str
    """Canonical form; equal texts mean that one graph can serve both calls."""
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    """Flattened arguments: `TENSOR` where a tensor goes, else the value itself."""
    context: tuple[str, ...]
    """Names of the context arguments that were passed along."""

    def fill(self, tensors: list[torch.Tensor]) -> dict[str, Any]:
        """Return the arguments with these tensors in the places of the call's own."""
        supply = iter(tensors)
        return pytree.tree_unflatten([next(supply) if leaf is TENSOR else leaf for leaf in self.leaves], self.spec)


class _Tensor:
    def __repr__(self) -> str:
        return "TENSOR"


TENSOR = _Tensor()


@lru_cache(maxsize=1024)
def forward_signature(cls: type) -> inspect.Signature:
    """Return the signature of a module class's `forward`, without self."""
    signature = inspect.signature(cls.forward)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def bind(cls: type, args: tuple, kwargs: Mapping[str, Any], context_arguments: frozenset[str]) -> Call:
    """Bind a call to the names of `forward`, so that positional and keyword calls are one structure.

    Raises Unsupported if the arguments do not fit the signature.
    """
    try:
        bound = forward_signature(cls).bind(*args, **kwargs)
    except TypeError as error:
        raise Unsupported(f"a call that does not fit {cls.__name__}.forward: {error}") from None
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    context = {name: arguments.pop(name) for name in context_arguments & arguments.keys()}
    if rest := _rest_name(cls):
        extra = arguments[rest]
        context |= {name: extra[name] for name in context_arguments & extra.keys()}
        arguments[rest] = {name: extra[name] for name in sorted(extra) if name not in context_arguments}
    return Call(arguments, context)


def call_forward(module: torch.nn.Module, arguments: Mapping[str, Any], context: Mapping[str, Any]) -> Any:
    """Call the `forward` of a module's class with arguments and context as `bind` gave them."""
    signature = forward_signature(type(module))
    ordered = {name: context.get(name, arguments.get(name)) for name in signature.parameters}
    if rest := _rest_name(type(module)):
        ordered[rest] = arguments[rest] | {n: v for n, v in context.items() if n not in signature.parameters}
    bound = inspect.BoundArguments(signature, ordered)
    return type(module).forward(module, *bound.args, **bound.kwargs)


@lru_cache(maxsize=1024)
def _rest_name(cls: type) -> str | None:
    """Return the name of `forward`'s **kwargs, if it has them."""
    parameters = forward_signature(cls).parameters.values()
    return next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD), None)


def read(call: Call, fake: bool = False) -> tuple[Structure, list[torch.Tensor]]:
    """Return a call's structure and its tensors in order.

    `fake` admits the fake tensors of a probe. Raises Unsupported on anything a graph cannot take.
    """
    leaves, spec = pytree.tree_flatten(dict(call.arguments))
    tensors, kept, described = [], [], []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if not fake and type(leaf) not in TENSOR_TYPES:
                raise Unsupported(f"a tensor of type {type(leaf).__name__}")
            if leaf.layout is not torch.strided:
                raise Unsupported(f"a tensor of layout {leaf.layout}")
            tensors.append(leaf)
            kept.append(TENSOR)
            described.append(["tensor", leaf.ndim, str(leaf.dtype), str(leaf.device)])
        elif isinstance(leaf, STATIC_TYPES):
            kept.append(leaf)
            described.append([type(leaf).__name__, repr(leaf)])
        else:
            raise Unsupported(f"an argument of type {type(leaf).__name__}")
    context = tuple(sorted(call.context))
    text = json.dumps([str(spec), described, context], separators=(",", ":"))
    return Structure(text, spec, tuple(kept), context), tensors


def graph_key(
    fingerprint: str,
    structure: Structure,
    sizes: list[list[int | None]],
    environment: Mapping[str, str],
) -> str:
    """Return the key of a graph, a hex digest that names it on any machine and any day.

    `sizes` holds, per input tensor, its static sizes, and None where the size is a symbol.
    `environment` names the backend and everything outside the region that its output depends on.
    """
    record = [fingerprint, structure.text, sizes, dict(environment)]
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
