"""The call signature, and the cache key of a graph.

A call's signature holds everything that can require another graph: which inputs are present, their ranks, dtypes
and devices, and every argument that is not a tensor. Sizes are not part of it: they are dynamic dimensions of a graph.

An int that follows the sizes of a call is a size, too: a number of tokens, the place where a reference begins. A graph
takes such an int as the length of an otherwise unused tensor, so that it is a dynamic dimension like any other. An int
of an object that is a size of the object's own tensor is read off that tensor.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MappingProxyType, NoneType
from typing import Any

import torch

from ..common.host import Host
from ..common.inner_tensors import TENSOR_TYPES
from ..common.reason import ReasonCode, Unsupported
from ..common.torch_compat import pytree
from .object_arguments import (
    Dimension,
    NamedFunction,
    NamedMember,
    Packed,
    Unpacking,
    contents,
    from_json,
    function_name,
    named_member,
    packed,
    to_json,
)

_STATICS: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    type(None): (lambda value: value, lambda value: None),
    bool: (lambda value: value, bool),
    int: (lambda value: value, int),
    float: (repr, float),
    str: (lambda value: value, str),
    torch.dtype: (str, lambda text: _torch_constant(text, torch.dtype)),
    torch.device: (str, torch.device),
    torch.layout: (str, lambda text: _torch_constant(text, torch.layout)),
    torch.memory_format: (str, lambda text: _torch_constant(text, torch.memory_format)),
}
STATIC_TYPES = tuple(_STATICS)
"""Types of arguments, besides tensors, that a cache key can hold: they can be written to JSON and read back."""


CELLS = "cells of frames"
"""Under this name, which no parameter can have, a call that is given a chunk of a video holds what its block keeps in
cells (`frame_cells`). It holds an empty list if the block hands its frames on instead (`frame_carry`)."""

_ANY_HOST = Host()


@dataclass(frozen=True)
class Call:
    """One call of a region, bound to the parameters of its `forward`."""

    arguments: Mapping[str, Any]
    """Every parameter by name, in the order of the signature, with defaults and without context arguments.

    Objects are packed.
    """
    context: Mapping[str, Any]
    """The host's bookkeeping, by parameter name."""


@dataclass(frozen=True)
class CallSignature:
    """Everything about a call, except sizes, that decides which graph serves it: the call signature."""

    text: str
    """The canonical form. One graph can serve two calls with equal texts."""
    spec: pytree.TreeSpec
    """The arguments' nesting."""
    leaves: tuple[Any, ...]
    """The flattened arguments: `TENSOR` and `SIZE` in place of tensors and of ints that are sizes, else the value."""
    context: tuple[str, ...]
    """Names of the context arguments that were passed."""
    patch_points: str = ""
    """Which of the host's patches act inside the region, as operators of its graph."""

    @property
    def is_chunk(self) -> bool:
        """Whether the call is given a chunk of a video, of any length."""
        return CELLS in self.spec.context

    @property
    def unpatched(self) -> str:
        """The text of the same call without patches."""
        return _text(json.loads(self.text)[:2])

    def has_tensors_of(self, other: CallSignature) -> bool:
        """Whether another call has its tensors in the same places, with the same ranks, dtypes and devices."""
        one, another = (
            {place: part for place, part in _walked(json.loads(each.text)[0]) if part[0] in ("tensor", "size")}
            for each in (self, other)
        )
        return one == another

    def fill(self, tensors: list[torch.Tensor]) -> dict[str, Any]:
        """Return the arguments with these tensors in place of the call's own."""
        return pytree.tree_unflatten(self.flat(tensors), self.spec)

    def flat(self, tensors: list[torch.Tensor]) -> list[Any]:
        """Return the leaves of the arguments with these tensors in place, and lengths of tensors for sizes."""
        supply = iter(tensors)
        filled = {TENSOR: lambda: next(supply), SIZE: lambda: next(supply).shape[0]}
        return [filled[leaf]() if leaf is TENSOR or leaf is SIZE else leaf for leaf in self.leaves]

    def has_unchanged_arguments(self, arguments: Mapping[str, Any], tensors: list[torch.Tensor]) -> bool:
        """Whether a call has left its arguments unchanged. `tensors` are those that it was given.

        Blocks of video VAEs write frames to lists that they are given.
        """
        leaves, spec = pytree.tree_flatten(dict(arguments))
        if spec != self.spec:
            return False
        pairs = zip(leaves, self.flat(tensors), self.leaves, strict=True)
        return all(one is was for one, was, leaf in pairs if leaf is not SIZE)  # an int cannot be written to


class _Marker:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


TENSOR, SIZE = _Marker("TENSOR"), _Marker("SIZE")

Place = tuple[Any, ...]
"""Where a value stands in a call's arguments: keys of dictionaries, numbers of items."""
SizePlaces = Mapping[Place, Dimension | None]
"""Where ints are sizes, each with the size of its object's tensor that it is, if it is one."""
SIZES = range(2, 2**24)
"""Ints that may be sizes. Tracing takes 0 and 1 for constants."""


@dataclass(frozen=True)
class _Size:
    """An int that is a size."""

    tensor: torch.Tensor


@lru_cache(maxsize=1024)
def forward_signature(cls: type) -> inspect.Signature:
    """Return the signature of a module class's `forward`, without `self`."""
    signature = inspect.signature(cls.forward)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def bind(cls: type, args: tuple, kwargs: Mapping[str, Any], context_arguments: frozenset[str]) -> Call:
    """Bind a call to the parameter names of `forward`, so that positional and keyword calls have one signature.

    Raises Unsupported if the arguments do not fit the signature.
    """
    cells = {name: value for name, value in kwargs.items() if name == CELLS}
    try:
        bound = forward_signature(cls).bind(*args, **{n: value for n, value in kwargs.items() if n != CELLS})
    except TypeError as error:
        raise Unsupported(ReasonCode.CALL_MISFIT, f"{cls.__name__}.forward: {error}") from None
    bound.apply_defaults()
    arguments = {name: packed(value, cls) for name, value in bound.arguments.items()}
    context = {name: arguments.pop(name) for name in context_arguments & arguments.keys()}
    if rest := _rest_name(cls):
        extra = arguments[rest]
        context |= {name: extra[name] for name in context_arguments & extra.keys()}
        arguments[rest] = {name: extra[name] for name in sorted(extra) if name not in context_arguments}
    return Call(arguments | cells, context)


def describe(value: Any, tensors: list[torch.Tensor], block: type = NoneType) -> Any:
    """Return a hashable that is equal for arguments that agree down to sizes and strides. Appends to `tensors`.

    `block` is the class that the arguments are for. Raises Unsupported for a value that no key can hold.
    """
    kind = type(value)
    if kind in TENSOR_TYPES:
        tensors.append(value)
        return value.shape, value.stride(), value.dtype, value.device
    if kind in (tuple, list):
        return kind, *[describe(item, tensors, block) for item in value]
    if kind is dict:
        return kind, *[(key, describe(item, tensors, block)) for key, item in value.items()]
    if isinstance(value, torch.Tensor):
        raise Unsupported(ReasonCode.TENSOR_TYPE, kind.__name__)
    if kind in STATIC_TYPES:  # a subclass may mean something else
        return kind, repr(value) if kind is float else value  # 0.0 and -0.0 are equal
    if name := function_name(value):
        return kind, name
    if member := named_member(value):
        return kind, member
    found = contents(value, block)
    if found is None:
        raise Unsupported(ReasonCode.ARGUMENT_TYPE, kind.__name__)
    names, values = found
    inner = NoneType if names else block  # what an object with attributes of its own holds is no object
    return kind, names, *[describe(item, tensors, inner) for item in values]


def call_forward(
    module: torch.nn.Module,
    arguments: Mapping[str, Any],
    context: Mapping[str, Any],
    operator_for: Callable[[str], Callable] = _ANY_HOST.operator_for,
) -> Any:
    """Call the `forward` of a module's class with the arguments and the context that `bind` returned.

    `operator_for` returns what takes the place of a function that the block is given. Raises Unsupported if the block
    writes to an object that it is given, if one's class is not what it was, or if nothing can take a function's place.
    """
    signature, unpacked = forward_signature(type(module)), Unpacking(type(module), operator_for)
    arguments = {name: unpacked(value) for name, value in arguments.items()}
    ordered = {name: context.get(name, arguments.get(name)) for name in signature.parameters}
    if rest := _rest_name(type(module)):
        ordered[rest] = arguments[rest] | {n: v for n, v in context.items() if n not in signature.parameters}
    bound = inspect.BoundArguments(signature, ordered)
    result = type(module).forward(module, *bound.args, **bound.kwargs)
    unpacked.check()
    return result


@lru_cache(maxsize=1024)
def _rest_name(cls: type) -> str | None:
    """Return the name of `forward`'s **kwargs, if it has them."""
    parameters = forward_signature(cls).parameters.values()
    return next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD), None)


def read(
    call: Call, fake: bool = False, patch_points: str = "", sizes: SizePlaces = MappingProxyType({})
) -> tuple[CallSignature, list[torch.Tensor]]:
    """Return a call's signature and its tensors in order.

    `fake` allows fake tensors, and `patch_points` come from `Host.patch_points`. Ints at the places of `sizes` are
    sizes. The number of a GPU is left out, so that GPUs of a kind share graphs; a second GPU in one call is named.
    Raises Unsupported for an argument that no graph can take.
    """
    arguments = _with_sizes(dict(call.arguments), sizes) if sizes else dict(call.arguments)
    leaves, spec = pytree.tree_flatten(arguments)
    leaves = [leaf.tensor if type(leaf) is _Size else leaf for leaf in leaves]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    for tensor in tensors:
        if not fake and type(tensor) not in TENSOR_TYPES:
            raise Unsupported(ReasonCode.TENSOR_TYPE, type(tensor).__name__)
        if tensor.layout is not torch.strided:
            raise Unsupported(ReasonCode.TENSOR_LAYOUT, str(tensor.layout))
    context = tuple(sorted(call.context))
    home = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
    record = [_outline(arguments, home), context, *([patch_points] if patch_points else [])]
    kept = tuple(_marker(leaf) for leaf in pytree.tree_leaves(arguments))
    return CallSignature(_text(record), spec, kept, context, patch_points), tensors


def parse(text: str) -> tuple[CallSignature, list[tuple[int, torch.dtype]]]:
    """Return the signature that a text describes, and the rank and dtype of each tensor. Executes nothing.

    Raises ValueError if `read` cannot have made the text, or if it holds a container that JSON cannot rebuild.
    """
    try:
        outline, context, *patch_points = json.loads(text)
        tensors: list[tuple[int, torch.dtype]] = []
        leaves, spec = pytree.tree_flatten(_fill_in(outline, tensors))
        return CallSignature(text, spec, tuple(leaves), tuple(map(str, context)), "".join(patch_points)), tensors
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"not the signature of a call ({type(error).__name__})") from None


def _text(record: list[Any]) -> str:
    return json.dumps(record, separators=(",", ":"))


def _marker(leaf: Any) -> Any:
    return SIZE if type(leaf) is _Size else TENSOR if isinstance(leaf, torch.Tensor) else leaf


def size_places(one: Call, other: Call) -> dict[Place, Dimension | None]:
    """Return where two calls differ, if they differ only in ints besides tensors: these follow the calls' sizes."""
    (outline, *rest), (other_outline, *other_rest) = (
        json.loads(read(call, fake=True)[0].text) for call in (one, other)
    )
    places = _differing_ints(outline, other_outline) if rest == other_rest else None
    return {place: _dimension(place, one, other) for place in places or ()}


def _dimension(place: Place, *calls: Call) -> Dimension | None:
    """Return the size of its object's tensor that an int is in all calls; None if it is none."""
    common: set[Dimension] | None = None
    for call in calls:
        *outer, index = place
        value: Any = call.arguments
        for key in outer:
            value = (value.values if type(value) is Packed else value)[key]
        found = Dimension.all_of(value.values, value.values[index]) if type(value) is Packed else []
        common = set(found) if common is None else common & set(found)
    return min(common, default=None, key=lambda found: (found.position, found.axis))


def places_of_sizes(text: str) -> dict[Place, Dimension | None]:
    """Return where a signature has sizes."""
    parts = [(place, part) for place, part in _walked(json.loads(text)[0]) if part[0] in ("size", "dimension")]
    return {place: Dimension(*part[2:]) if part[0] == "dimension" else None for place, part in parts}


def with_sizes(text: str, sizes: SizePlaces) -> str:
    """Return the text of a signature in which ints at these places are sizes."""
    outline, *rest = json.loads(text)
    for place, part in _walked(outline):
        if place not in sizes or part[0] != "int":
            continue
        if dimension := sizes[place]:
            part[:] = _outline(dimension)
        elif part[1] in SIZES:
            part[:] = ["size", 1]
    return json.dumps([outline, *rest], separators=(",", ":"))


def covers(text: str, plain: str) -> bool:
    """Whether a signature is that of a call, or would be if some ints of the call were sizes."""
    return text == plain or with_sizes(plain, places_of_sizes(text)) == text


def _walked(outline: list, place: Place = ()) -> Iterator[tuple[Place, list]]:
    """Yield each part of an outline with its place."""
    yield place, outline
    for key, item in _items_of(outline):
        yield from _walked(item, (*place, key))


def _items_of(outline: list) -> list[tuple[Any, list]]:
    kind, content = outline[0], outline[1]
    if not isinstance(content, list):
        return []
    return [(_fill_in(key, []), item) for key, item in content] if kind == "dict" else list(enumerate(content))


def _differing_ints(one: list, other: list, place: Place = ()) -> list[Place] | None:
    """Return the places of ints that differ; None if anything else does."""
    if one == other:
        return []
    if one[0] == other[0] == "int":
        return [place] if one[1] in SIZES and other[1] in SIZES else None
    items, others = _items_of(one), _items_of(other)
    if not items or one[0] != other[0] or one[2:] != other[2:] or [k for k, _ in items] != [k for k, _ in others]:
        return None
    found: list[Place] = []
    for (key, item), (_, changed) in zip(items, others, strict=True):
        places = _differing_ints(item, changed, (*place, key))
        if places is None:
            return None
        found += places
    return found


def _with_sizes(arguments: dict[str, Any], sizes: SizePlaces) -> dict[str, Any]:
    """Return arguments in which ints at these places are sizes."""
    device = next((leaf.device for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)), None)

    def size(value: int, dimension: Dimension | None, siblings: tuple) -> Any:
        if dimension is not None:
            return dimension if dimension.of(siblings) == value else value
        if value in SIZES and device is not None:
            return _Size(torch.empty(value, dtype=torch.uint8, device=device))
        return value

    def replaced(value: Any, place: Place, siblings: tuple = ()) -> Any:
        if type(value) is int and place in sizes:
            return size(value, sizes[place], siblings)
        if type(value) is dict:
            return {key: replaced(item, (*place, key)) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(replaced(item, (*place, i), siblings) for i, item in enumerate(value))
        if type(value) is Packed:
            return value._replace(values=replaced(value.values, place, value.values))
        return value

    return replaced(arguments, ())


def _outline(value: Any, home: torch.device | None = None) -> list:
    """Return a value as JSON: its type and its content. Of tensors on the device `home`, only its type is named."""
    inside = partial(_outline, home=home)
    if type(value) is _Size:
        return ["size", value.tensor.ndim]
    if type(value) is Dimension:
        return ["dimension", None, value.position, value.axis]
    if isinstance(value, torch.Tensor):
        device = home.type if home is not None and value.device == home else str(value.device)
        return ["tensor", value.ndim, str(value.dtype), device]
    if type(value) in STATIC_TYPES:
        return [type(value).__name__, _STATICS[type(value)][0](value)]
    if type(value) is dict:
        return ["dict", [[inside(key), inside(item)] for key, item in value.items()]]
    if type(value) in (list, tuple):
        return [type(value).__name__, [inside(item) for item in value]]
    if type(value) is NamedFunction:
        return ["function", value.name]
    if type(value) is NamedMember:
        return ["member", value.name, value.cls, value.digest]
    if type(value) is Packed:
        return to_json(value, inside)
    children, spec = pytree.tree_flatten(value, is_leaf=lambda item: item is not value)
    if len(children) == 1 and children[0] is value:
        raise Unsupported(ReasonCode.ARGUMENT_TYPE, type(value).__name__)
    return [str(spec), [inside(child) for child in children]]


def _fill_in(outline: list, tensors: list[tuple[int, torch.dtype]]) -> Any:
    kind, content = outline[0], outline[1]
    if kind == "tensor":
        tensors.append((content, _torch_constant(outline[2], torch.dtype)))
        return TENSOR
    if kind == "size":
        tensors.append((1, torch.uint8))
        return SIZE
    if kind == "dimension":
        return Dimension(int(outline[2]), int(outline[3]))
    if kind == "dict":
        return {_fill_in(key, tensors): _fill_in(item, tensors) for key, item in content}
    if kind in ("list", "tuple"):
        items = [_fill_in(item, tensors) for item in content]
        return tuple(items) if kind == "tuple" else items
    if kind == "function":
        return NamedFunction(str(content))
    if kind == "member":
        return NamedMember(str(outline[2]), str(outline[3]), str(content))
    if kind == "object":
        return from_json(content, *outline[2:], read=lambda item: _fill_in(item, tensors))
    return {static.__name__: read for static, (_, read) in _STATICS.items()}[kind](content)


def _torch_constant(text: str, kind: type) -> Any:
    value = getattr(torch, text.removeprefix("torch."))
    if not isinstance(value, kind):
        raise TypeError(f"{text} is not a {kind.__name__}")
    return value


def graph_key(
    fingerprint: str,
    signature: CallSignature,
    sizes: list[list[int | str]],
    environment: Mapping[str, str],
) -> str:
    """Return the cache key of a graph: a hex digest that is the same on every machine and every day.

    `sizes` holds each input tensor's sizes, as `GraphRequest.sizes` returns them.
    `environment` names the backend and everything outside the region that the compiled graph depends on.
    """
    record = [fingerprint, signature.text, sizes, dict(environment)]
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


class ContextArguments:
    """The arguments of a class's `forward` that carry the host's bookkeeping, never data."""

    def __init__(self, cls: type, names: frozenset[str]) -> None:
        self.names = names
        self._cls = cls
        parameters = forward_signature(cls).parameters if names else ()
        self.places = {index: name for index, name in enumerate(parameters) if name in names}
        """Their positions."""

    def of(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of a call, by name."""
        found = {name: args[i] for i, name in self.places.items() if i < len(args)}
        return found | {name: kwargs[name] for name in self.names & kwargs.keys()}

    def replaced(self, args: tuple, kwargs: Mapping[str, Any], context: Mapping[str, Any]) -> tuple[tuple, dict]:
        """Return a call's arguments with others in the place of these."""
        places = self.places
        args = tuple(context[places[i]] if i in places else value for i, value in enumerate(args))
        return args, {**kwargs, **{name: context[name] for name in context.keys() & kwargs.keys()}}

    def token(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple[tuple, list[torch.Tensor]]:
        """Return what tells a call from others by its remaining arguments, and the tensors among those."""
        tensors: list[torch.Tensor] = []
        names, places, cls = self.names, self.places, self._cls
        token = (
            tuple([None if i in places else describe(value, tensors, cls) for i, value in enumerate(args)]),
            tuple([(name, name in names or describe(value, tensors, cls)) for name, value in kwargs.items()]),
        )
        return token, tensors
