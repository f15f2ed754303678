"""Dataclasses among the arguments of a block, such as the shift, scale and gate of a modulation (Flux 2, Chroma).

pytree does not know them. While a call is looked at, a `Packed` takes the place of each, and pytree takes that apart
as a tuple. The block itself gets dataclasses again.

A class is named in signatures by its module, its name and a digest of its source. Nothing is imported for a name, and
no code of the class runs to make an object.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from ..common.reason import ReasonCode, Unsupported
from .source import functions_in, read_source

_GENERATED = frozenset(
    {"__init__", "__repr__", "__eq__", "__hash__", "__lt__", "__le__", "__gt__", "__ge__", "__setattr__", "__delattr__"}
    | {"__replace__", "__getstate__", "__setstate__", "__annotate__", "__annotate_func__"}
)
"""What `dataclass` adds to a class. None of it computes anything in a block."""


class Packed(NamedTuple):
    """A dataclass as a container of its fields' values. pytree knows named tuples."""

    cls: str
    """The module and the qualified name, with a colon between."""
    digest: str
    """Of the class's source."""
    values: tuple[Any, ...]


@lru_cache(maxsize=256)
def field_names(cls: type) -> tuple[str, ...] | None:
    """Return the fields of a plain dataclass; None for any other class.

    A plain one has no methods that act on an object, so reading its fields is all that a block can do.
    """
    if not dataclasses.is_dataclass(cls) or "<locals>" in cls.__qualname__:
        return None
    bases = [base for base in cls.__mro__ if base is not object]
    entries = [(name, value) for base in bases for name, value in vars(base).items()]
    if any(_acts_on_objects(name, value) for name, value in entries):
        return None
    return tuple(field.name for field in dataclasses.fields(cls))


def values_of(value: Any, names: Iterable[str]) -> list[Any]:
    """Return the values of a dataclass's fields. Raises Unsupported if the object holds anything else."""
    names = tuple(names)
    if vars(value).keys() - set(names) if hasattr(value, "__dict__") else False:
        raise Unsupported(ReasonCode.ARGUMENT_TYPE, type(value).__name__)
    return [getattr(value, name) for name in names]


def packed(value: Any) -> Any:
    """Return a value with a `Packed` in place of each dataclass in it, and in the tuples in it.

    Lists and dictionaries stay what they are: a block may write to them.
    """
    if type(value) is tuple:
        items = tuple(map(packed, value))
        return items if any(one is not other for one, other in zip(items, value, strict=True)) else value
    names = field_names(type(value))
    if names is None:
        return value
    cls = type(value)
    values = tuple(map(packed, values_of(value, names)))
    return Packed(f"{cls.__module__}:{cls.__qualname__}", _digest(cls), values)


class Unpacking:
    """Makes dataclasses again, for one call of a block."""

    def __init__(self) -> None:
        self._made: list[tuple[Any, tuple[str, ...], list[Any]]] = []

    def __call__(self, value: Any) -> Any:
        """Return a value as the block gets it. Raises Unsupported if a class is not what it was."""
        if type(value) is tuple:
            items = tuple(map(self, value))
            return items if any(one is not other for one, other in zip(items, value, strict=True)) else value
        if not isinstance(value, Packed):
            return value
        cls = _class_of(value)
        names, values = field_names(cls), [self(item) for item in value.values]
        made = cls.__new__(cls)
        for name, item in zip(names, values, strict=True):
            object.__setattr__(made, name, item)
        self._made.append((made, names, values))
        return made

    def check(self) -> None:
        """Raise Unsupported if the block has written to one of them: a graph would not."""
        for made, names, values in self._made:
            if any(one is not other for one, other in zip(values_of(made, names), values, strict=True)):
                raise Unsupported(ReasonCode.WRITES_ARGUMENT)


def to_json(value: Packed, of: Callable[[Any], list]) -> list:
    """Return a packed dataclass as JSON; `of` returns that of a value in it."""
    return ["dataclass", [of(item) for item in value.values], value.cls, value.digest]


def from_json(content: list, cls: str, digest: str, read: Callable[[list], Any]) -> Packed:
    """Return what an outline describes; `read` does that for a value in it. Looks no class up."""
    return Packed(str(cls), str(digest), tuple(read(item) for item in content))


def _acts_on_objects(name: str, value: Any) -> bool:
    if isinstance(value, classmethod | staticmethod) or name in _GENERATED:
        return False
    return bool(functions_in(value))


def _class_of(value: Packed) -> type:
    """Return the class that is loaded under the name. Raises Unsupported if it is another one by now."""
    module, _, name = value.cls.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    names = field_names(found) if isinstance(found, type) else None
    if names is None or len(names) != len(value.values) or _digest(found) != value.digest:
        raise Unsupported(ReasonCode.ARGUMENT_TYPE, name)
    return found


@lru_cache(maxsize=256)
def _digest(cls: type) -> str:
    sources = [read_source(base).digest for base in cls.__mro__ if base is not object]
    return hashlib.sha256(" ".join(sources).encode()).hexdigest()[:16]
