"""Objects among the arguments of a block, such as the shift, scale and gate of a modulation (Flux 2, Chroma).

pytree does not know them. While a call is looked at, a `Packed` takes the place of each, and pytree takes that apart
as a tuple. The block itself gets objects again.

Two sorts of class can be taken apart. A plain dataclass, or a class that only makes its objects (`GuideAttentionMask`
of LTX-Video), has no code that acts on them. Any other class must stand beside the block, in its module, and the
block's code must name it: then the fingerprint of the block holds the code of the class, too (`CompressedTimestep` of
LTX-2). Such an object holds tensors and plain values.

A class is named in signatures by its module, its name and a digest of its source. Nothing is imported for a name, and
no code of the class runs to make an object.

A function that stands in a module under its own name, such as the attention function that text encoders hand to their
blocks, is a `NamedFunction`. The host says which operator takes its place in a graph.

A member of a plain enumeration is a `NamedMember` (`MemoryState` of SeedVR2). All members and their values are in the
signature, so that a block cannot read anything else off it.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

from ..common.reason import ReasonCode, Unsupported
from .libraries import LIBRARIES
from .source import functions_in, read_source

_GENERATED = frozenset(
    {"__init__", "__repr__", "__eq__", "__hash__", "__lt__", "__le__", "__gt__", "__ge__", "__setattr__", "__delattr__"}
    | {"__replace__", "__getstate__", "__setstate__", "__annotate__", "__annotate_func__"}
)
"""What `dataclass` adds to a class. None of it computes anything in a block."""
_FROM_THE_STATEMENT = frozenset(
    {"__module__", "__qualname__", "__doc__", "__slots__", "__firstlineno__", "__static_attributes__"}
    | {"__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__"}
)
"""What a class statement adds to its class."""
_PLAIN_VALUES = (type(None), bool, int, float, str)


class Packed(NamedTuple):
    """An object as a container of its values. pytree knows named tuples."""

    cls: str
    """The module and the qualified name, with a colon between."""
    digest: str
    """Of the class's source."""
    values: tuple[Any, ...]
    names: tuple[str, ...] = ()
    """The attributes that hold the values; none for a plain dataclass, whose class says it."""


@dataclass(frozen=True)
class NamedFunction:
    """Stands for a function that a block is given."""

    name: str
    """The module and the qualified name, with a colon between."""


def function_name(value: Any) -> str | None:
    """Return the name of a function if it is what stands in its module under that name now; None for all else."""
    if type(value) is not types.FunctionType:
        return None
    is_there = getattr(sys.modules.get(value.__module__), value.__qualname__, None) is value
    return f"{value.__module__}:{value.__qualname__}" if is_there else None


@dataclass(frozen=True)
class NamedMember:
    """Stands for a member of an enumeration that a block is given."""

    cls: str
    """The module and the qualified name, with a colon between."""
    digest: str
    """Of all members and their values."""
    name: str


def named_member(value: Any) -> NamedMember | None:
    """Return what stands for a value if it is a member of an enumeration that only names plain values."""
    cls: type = type(value)
    if not isinstance(value, enum.Enum) or (digest := _members_digest(cls)) is None:
        return None
    # A combination of flags has no name of its own. A class that was loaded again has other members of the same names.
    is_there = cls.__members__.get(value.name) is value and _loaded(_name_of(cls)) is cls
    return NamedMember(_name_of(cls), digest, value.name) if is_there else None


@lru_cache(maxsize=256)
def _members_digest(cls: type[enum.Enum]) -> str | None:
    """Return a digest of an enumeration's members; None if it has code, or anything else besides them."""
    if type(cls) is not enum.EnumMeta or any(base.__module__ not in ("enum", "builtins") for base in cls.__mro__[1:]):
        return None
    others = {name: entry for name, entry in vars(cls).items() if name not in cls.__members__}
    has_more = any(name[0] != "_" or name[-1] != "_" for name in others)
    has_code = any(function.__module__ != "enum" for entry in others.values() for function in functions_in(entry))
    values = {name: member.value for name, member in cls.__members__.items()}
    if has_more or has_code or not all(type(value) in _PLAIN_VALUES for value in values.values()):
        return None
    record = repr(([base.__qualname__ for base in cls.__mro__], values))
    return hashlib.sha256(record.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Dimension:
    """Stands for an int of an object that is a size of a tensor in the same object, whatever the call."""

    position: int
    """Of the tensor among the values."""
    axis: int

    def of(self, values: Sequence[Any]) -> Any:
        """Return the int, given the object's values; None if they have no such tensor."""
        tensor = values[self.position] if self.position < len(values) else None
        has_axis = isinstance(tensor, torch.Tensor) and self.axis < tensor.ndim
        return tensor.shape[self.axis] if has_axis else None

    @classmethod
    def all_of(cls, values: Sequence[Any], size: int) -> list[Dimension]:
        """Return all the places where tensors among these values have a size."""
        tensors = [(i, value) for i, value in enumerate(values) if isinstance(value, torch.Tensor)]
        return [cls(i, axis) for i, tensor in tensors for axis, found in enumerate(tensor.shape) if found == size]


@lru_cache(maxsize=256)
def field_names(cls: type) -> tuple[str, ...] | None:
    """Return the fields of a plain dataclass; None for any other class.

    A plain one has no methods that act on an object, so reading its fields is all that a block can do.
    """
    if not dataclasses.is_dataclass(cls) or "<locals>" in cls.__qualname__:
        return None
    bases = [base for base in cls.__mro__ if base.__module__ not in ("builtins", "abc", "typing")]
    entries = [(name, value) for base in bases for name, value in vars(base).items()]
    names = tuple(field.name for field in dataclasses.fields(cls))
    if any(_acts_on_objects(name, value) or _is_read_of_the_class(name, value, names) for name, value in entries):
        return None
    return names


@lru_cache(maxsize=256)
def only_holds(cls: type) -> bool:
    """Whether a class has nothing but a constructor and slots: reading its attributes is all that a block can do."""
    if type(cls) is not type or cls.__bases__ != (object,) or "<locals>" in cls.__qualname__:
        return False
    if cls.__module__.partition(".")[0] in LIBRARIES:
        return False
    entries = {name: value for name, value in vars(cls).items() if name not in _FROM_THE_STATEMENT}
    slots = {name for name, value in entries.items() if isinstance(value, types.MemberDescriptorType)}
    return bool(slots) and entries.keys() - slots <= {"__init__"}


@lru_cache(maxsize=1024)
def is_beside(cls: type, block: type) -> bool:
    """Whether a class stands in the module of a block whose code names it, and its objects are their attributes.

    Nothing of C may be in such an object, and no code of the class may run when it is read, copied or dropped.
    """
    if type(cls) is not type or issubclass(cls, nn.Module) or "<locals>" in cls.__qualname__ or hasattr(cls, "__del__"):
        return False
    if cls.__new__ is not object.__new__ or cls.__getattribute__ is not object.__getattribute__:
        return False
    if cls.__module__.partition(".")[0] in LIBRARIES:  # no fingerprint holds their code
        return False
    homes = [base for base in block.__mro__ if base.__module__ == cls.__module__]
    return any(value is cls for base in homes for value in _named_by(base))


def _named_by(cls: type) -> Iterator[Any]:
    """Yield what the names in a class's code stand for now."""
    for first, *rest in read_source(cls).names:
        value = getattr(sys.modules.get(cls.__module__), first, None)
        for part in rest:
            value = getattr(value, part, None) if isinstance(value, types.ModuleType | type) else None
        yield value


def contents(value: Any, block: type) -> tuple[tuple[str, ...], tuple[Any, ...]] | None:
    """Return the names and values of an object that a block is given; None if it is none that can be taken apart.

    Raises Unsupported if a plain dataclass holds anything besides its fields.
    """
    if (names := field_names(type(value))) is not None:
        return (), _values_of(value, names)
    if only_holds(type(value)) or is_beside(type(value), block):
        names = _attribute_names(value)
        return names, tuple(getattr(value, name) for name in names)
    return None


def _values_of(value: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
    """Return the values of an object's attributes. Raises Unsupported if it holds anything else."""
    if vars(value).keys() - set(names) if hasattr(value, "__dict__") else False:
        raise Unsupported(ReasonCode.ARGUMENT_TYPE, type(value).__name__)
    return tuple([getattr(value, name) for name in names])


def _attribute_names(value: Any) -> tuple[str, ...]:
    held = [name for name in _slots(type(value)) if hasattr(value, name)]
    return tuple(sorted({*held, *getattr(value, "__dict__", ())}))


@lru_cache(maxsize=256)
def _slots(cls: type) -> tuple[str, ...]:
    entries = [(name, entry) for base in cls.__mro__ for name, entry in vars(base).items()]
    return tuple(name for name, entry in entries if isinstance(entry, types.MemberDescriptorType))


def packed(value: Any, block: type) -> Any:
    """Return a value with a `Packed` in place of each object in it, and in the tuples in it; likewise for functions.

    Lists and dictionaries stay what they are: a block may write to them.
    """
    if type(value) is tuple:
        items = tuple([packed(item, block) for item in value])
        return items if any(one is not other for one, other in zip(items, value, strict=True)) else value
    if name := function_name(value):
        return NamedFunction(name)
    if member := named_member(value):
        return member
    found = contents(value, block)
    if found is None:
        return value
    names, values = found
    if not names:  # an object with attributes of its own may lead back to itself: what it holds is no object
        values = tuple([packed(item, block) for item in values])
    return Packed(_name_of(type(value)), _digest(type(value)), values, names)


def _name_of(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


class Unpacking:
    """Makes objects again, for one call of a block."""

    def __init__(self, block: type, operator_for: Callable[[str], Callable]) -> None:
        """`operator_for` returns what takes the place of a function, by its name."""
        self._block = block
        self._operator_for = operator_for
        self._made: list[tuple[Any, tuple[str, ...], list[Any]]] = []

    def __call__(self, value: Any) -> Any:
        """Return a value as the block gets it. Raises Unsupported if a class is not what it was."""
        if type(value) is tuple:
            items = tuple(map(self, value))
            return items if any(one is not other for one, other in zip(items, value, strict=True)) else value
        if isinstance(value, NamedFunction):
            return self._operator_for(value.name)
        if isinstance(value, NamedMember):
            return _member(value)
        if not isinstance(value, Packed):
            return value
        cls = _class_of(value, self._block)
        names, values = value.names or field_names(cls), [self(item) for item in value.values]
        values = [item.of(values) if type(item) is Dimension else item for item in values]
        made = cls.__new__(cls)
        for name, item in zip(names, values, strict=True):
            object.__setattr__(made, name, item)
        self._made.append((made, names, values))
        return made

    def check(self) -> None:
        """Raise Unsupported if the block has written to one of them: a graph would not."""
        for made, names, values in self._made:
            given = dict(zip(names, values, strict=True))
            if set(_attribute_names(made)) != set(given) or any(getattr(made, n) is not v for n, v in given.items()):
                raise Unsupported(ReasonCode.WRITES_ARGUMENT)


def to_json(value: Packed, of: Callable[[Any], list]) -> list:
    """Return a packed object as JSON; `of` returns that of a value in it."""
    names = [list(value.names)] if value.names else []
    return ["object", [of(item) for item in value.values], value.cls, value.digest, *names]


def from_json(
    content: list, cls: str, digest: str, names: Sequence[str] = (), *, read: Callable[[list], Any]
) -> Packed:
    """Return what an outline describes; `read` does that for a value in it. Looks no class up."""
    return Packed(str(cls), str(digest), tuple(read(item) for item in content), tuple(map(str, names)))


def _acts_on_objects(name: str, value: Any) -> bool:
    if isinstance(value, classmethod | staticmethod) or name in _GENERATED:
        return False
    return bool(functions_in(value))


def _is_read_of_the_class(name: str, value: Any, names: Sequence[str]) -> bool:
    """Whether a class's entry is a value that all objects share. No key holds it."""
    is_method = bool(functions_in(value)) or isinstance(value, types.MemberDescriptorType | type)
    return not (is_method or name in names or (name[:2] == "__" and name[-2:] == "__") or name == "_abc_impl")


def _class_of(value: Packed, block: type) -> type:
    """Return the class that is loaded under the name. Raises Unsupported if it is another one by now."""
    found = _loaded(value.cls)
    if found is None or not _fits(value, found, block) or _digest(found) != value.digest:
        raise Unsupported(ReasonCode.ARGUMENT_TYPE, value.cls.partition(":")[2])
    return found


def _member(named: NamedMember) -> enum.Enum:
    """Return the member that is loaded under the name.

    Raises Unsupported if its class is another one by now, or has no such member: a file may name any.
    """
    found = _loaded(named.cls)
    is_same = found is not None and issubclass(found, enum.Enum) and _members_digest(found) == named.digest
    if not is_same or named.name not in found.__members__:
        raise Unsupported(ReasonCode.ARGUMENT_TYPE, named.cls.partition(":")[2])
    return found.__members__[named.name]


def _loaded(cls: str) -> type | None:
    """Return the class that is loaded under a name. Imports nothing."""
    module, _, name = cls.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None


def _fits(value: Packed, cls: type, block: type) -> bool:
    if value.names:
        return len(value.names) == len(value.values) and (only_holds(cls) or is_beside(cls, block))
    names = field_names(cls)
    return names is not None and len(names) == len(value.values)


@lru_cache(maxsize=256)
def _digest(cls: type) -> str:
    sources = [read_source(base).digest for base in cls.__mro__ if base is not object]
    return hashlib.sha256(" ".join(sources).encode()).hexdigest()[:16]
