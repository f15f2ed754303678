"""Options for tracing a block, which record what its code reads from them and writes to them.

A host passes a dictionary of bookkeeping through its blocks: which block this is, the patches, whatever extensions
add. The dictionary stays out of graphs. So a graph is right for a call only if nothing that the code read from the
dictionary decided what was traced, and only if the call leaves there what the code would have left.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch

from ..common.reason import ReasonCode, Unsupported
from .guard_expressions import evaluate

_ANY = "any option that the code does not name"


class Unknown:
    """The value of an option that differs between the calls that one graph serves.

    Code may pass it on and index it. Code that does more depends on the value, and cannot be traced.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._items: dict[Any, Unknown] = {}

    def __getitem__(self, key: Any) -> Unknown:
        return self._items.setdefault(repr(key), Unknown(self.name))

    def _depend(self, *_: Any, **__: Any) -> NoReturn:
        raise Unsupported(ReasonCode.OPTION_DECIDES, self.name)

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __bool__ = __len__ = __iter__ = _depend
    __contains__ = __int__ = __float__ = __index__ = __complex__ = __str__ = __format__ = __call__ = _depend
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _depend
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __abs__ = __round__ = _depend


class _AnyName(str):
    """Stands for every name that a call's options may have. A comparison with a name counts as a read of that name."""

    __slots__ = ("_asked",)

    def __new__(cls, asked: Callable[[str], None]) -> _AnyName:
        name = super().__new__(cls, _ANY)
        name._asked = asked
        return name

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            self._asked(other)
        return False

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def _depend(self, *_: Any, **__: Any) -> NoReturn:
        raise Unsupported(ReasonCode.OPTIONS_SEARCHED)

    startswith = endswith = find = index = split = rsplit = partition = rpartition = strip = lower = upper = _depend
    replace = removeprefix = removesuffix = __contains__ = __len__ = __getitem__ = __iter__ = __format__ = _depend


class TracedOptions(dict):
    """Takes the place of a call's options while a block is traced."""

    def __init__(self, values: Mapping[str, Any], unknown: Iterable[str] = ()) -> None:
        """`values` are the same in every call that the graph serves; those of `unknown` names differ by call."""
        entries = {**{name: Unknown(f"the transformer option {name}") for name in unknown}, **values}
        super().__init__(entries)
        self.reads: set[str] = set()
        """Names that the code read and that are absent here. A call that has one of them needs another graph."""
        self.is_copy = False
        """Whether the code made it. What is left in it does not reach the call's own options."""
        self._before = entries

    def writes(self) -> dict[str, Any]:
        """Return what the code has added or changed. Raises Unsupported if it has removed an option."""
        if gone := self._before.keys() - dict.keys(self):
            raise Unsupported(ReasonCode.OPTION_REMOVED, min(gone))
        missing = object()
        return {name: v for name, v in dict.items(self) if v is not self._before.get(name, missing)}

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401  `dict.get` would bypass these methods

    def __contains__(self, name: object) -> bool:
        self._ask(name)
        return dict.__contains__(self, name)

    def __getitem__(self, name: str) -> Any:
        if type(name) is _AnyName:
            return Unknown(_ANY)
        self._ask(name)
        return dict.__getitem__(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        raise Unsupported(ReasonCode.OPTIONS_COUNTED)

    def __bool__(self) -> bool:
        return True

    def keys(self) -> list[str]:
        return [*dict.keys(self), _AnyName(lambda name: self._ask(name))]

    def values(self) -> list[Any]:
        return [self[name] for name in self.keys()]

    def items(self) -> list[tuple[str, Any]]:
        return [(name, self[name]) for name in self.keys()]

    def copy(self) -> TracedOptions:
        """Return a copy whose reads count as reads of the call's own options."""
        own = TracedOptions({})
        dict.update(own, dict.items(self))
        own.reads, own.is_copy = self.reads, True
        return own

    __copy__ = copy

    def __or__(self, other: Mapping[str, Any]) -> TracedOptions:
        own = self.copy()
        dict.update(own, other)
        return own

    def pop(self, name: str, *default: Any) -> Any:
        self._ask(name)
        return dict.pop(self, name, *default)

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def _ask(self, name: object) -> None:
        if isinstance(name, str) and not dict.__contains__(self, name):
            self.reads.add(str(name))


class Patches(dict):
    """Takes the place of a table of patches by block. `find` returns the patch for a block's key, or None."""

    def __init__(self, find: Callable[[Any], Any | None] = lambda key: None) -> None:
        super().__init__()
        self._find = find

    def __contains__(self, key: object) -> bool:
        return self._find(key) is not None

    def __getitem__(self, key: Any) -> Any:
        return self._find(key)

    def get(self, key: Any, default: Any = None) -> Any:
        found = self._find(key)
        return default if found is None else found


def encode_writes(writes: Mapping[str, Any], size: Callable[[int | torch.SymInt], int | str]) -> str:
    """Return what a block leaves in its options as JSON, with sizes as expressions.

    `size` turns a size into a number or an expression. Raises Unsupported for a value that is not plain.
    """
    return json.dumps({name: _encode(name, value, size) for name, value in writes.items()}) if writes else ""


def decode_writes(text: str, symbols: Mapping[str, int]) -> dict[str, Any]:
    """Return what to leave in a call's options. Raises ValueError or TypeError if the text is malformed."""
    return {str(name): _decode(value, symbols) for name, value in json.loads(text).items()} if text else {}


def fresh(value: Any) -> Any:
    """Return a value that its next owner may change: a copy of a list or dictionary."""
    return copy.deepcopy(value) if type(value) in (list, dict) else value


def _encode(name: str, value: Any, size: Callable[[Any], int | str]) -> Any:
    if isinstance(value, torch.SymInt):
        return {"size": size(value)}
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return {"float": repr(value)}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(name, item, size) for item in value]}
    raise Unsupported(ReasonCode.OPTION_LEFT, f"{type(value).__name__} in the transformer option {name}")


def _decode(value: Any, symbols: Mapping[str, int]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "size":
        return int(content if isinstance(content, int) else evaluate(content, symbols))
    if kind == "float":
        return float(content)
    items = [_decode(item, symbols) for item in content]
    return items if kind == "list" else tuple(items)
