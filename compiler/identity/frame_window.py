"""The part of a list that one block of a video VAE reads and writes to keep frames between the chunks of a video.

All blocks share the list, and a cursor says where a block's own entries begin. A graph sees these entries only, from a
cursor of 0: so equal blocks at different places of the list have one graph for each state of their entries.
"""

from __future__ import annotations

import dis
import inspect
import json
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ..common.host import FrameCache
from ..common.reason import ReasonCode, Unsupported
from ..common.torch_compat import pytree
from .call_signature import forward_signature

PLAIN = (type(None), bool, int, str)
"""Types of values, besides tensors, that a block may leave in its entries."""

_LOOKING_AT_ALL = frozenset({"locals", "vars", "dir", "eval", "exec", "_getframe"})
"""What reads parameters without naming them."""

_KEPT, _GIVEN, _RESULT, _PLAIN, _TUPLE = "kept", "given", "result", "plain", "tuple"
_SOURCES = {_KEPT: int, _GIVEN: int, _RESULT: type(None), _PLAIN: PLAIN, _TUPLE: list}


@dataclass(frozen=True)
class FrameWrites:
    """What a block leaves in its entries, or in its cells, and how far it moves the cursor."""

    moved: int
    entries: tuple[tuple[str, Any], ...]
    """Where each entry comes from: an output of the graph beside the result, what stood at a place before, the
    result itself, a plain value, or a tuple of these."""

    @classmethod
    def of(cls, given: Sequence[Any], left: Sequence[Any], moved: int, result: Any) -> tuple[FrameWrites, list]:
        """Return what a block that returned `result` did to its entries, and the tensors that are to be kept.

        Raises Unsupported for an entry that no graph can leave there.
        """
        kept: list[torch.Tensor] = []
        given = pytree.tree_leaves(list(given))
        return cls(moved, tuple([_source(entry, given, result, kept) for entry in left])), kept

    def values(self, given: Sequence[Any], result: Any, kept: Sequence[torch.Tensor]) -> list[Any]:
        """Return the entries after a call: from those before, the result, and the outputs beside it."""
        tensors = {_KEPT: kept, _GIVEN: pytree.tree_leaves(list(given))}
        return [_value(source, value, tensors, result) for source, value in self.entries]

    def to_text(self) -> str:
        """Return this as JSON."""
        return json.dumps([self.moved, self.entries])

    @classmethod
    def from_text(cls, text: str) -> FrameWrites:
        """Return what a text describes. Raises ValueError if `to_text` cannot have made it."""
        try:
            moved, entries = json.loads(text)
            found = tuple([_read(source, value) for source, value in entries])
            is_sound = type(moved) is int
        except (LookupError, RecursionError, TypeError, ValueError):
            is_sound = False
        if not is_sound:
            raise ValueError("not what a block leaves in a list")
        return cls(moved, found)


def _read(source: str, value: Any) -> tuple[str, Any]:
    """Return one entry as `_source` makes it. Raises LookupError, TypeError or ValueError if it cannot have made it."""
    if not isinstance(value, _SOURCES[source]):
        raise ValueError("not a source of an entry")
    return source, [_read(*part) for part in value] if source == _TUPLE else value


def _value(source: str, value: Any, tensors: Mapping[str, Sequence[Any]], result: Any) -> Any:
    # No closure that names itself: it would keep these maps of a video until the garbage collector runs.
    if source == _TUPLE:
        return tuple([_value(*part, tensors, result) for part in value])
    if source == _RESULT:
        return result
    return value if source == _PLAIN else tensors[source][value]


def _source(entry: Any, given: Sequence[Any], result: Any, kept: list[torch.Tensor]) -> tuple[str, Any]:
    if isinstance(entry, torch.Tensor):
        places = [place for place, tensor in enumerate(given) if tensor is entry]
        if places:
            return _GIVEN, places[0]
        if entry is result:
            return _RESULT, None
        kept.append(entry)
        return _KEPT, len(kept) - 1
    if type(entry) is tuple:
        return _TUPLE, [_source(part, given, result, kept) for part in entry]
    if type(entry) not in PLAIN:
        raise Unsupported(ReasonCode.WRITES_ARGUMENT)
    return _PLAIN, entry


class Window:
    """A block's entries in a call's list."""

    def __init__(self, names: FrameCache, bound: inspect.BoundArguments, size: int) -> None:
        """`bound` comes from `bind_read`, and `size` is how many entries the block uses.

        Raises Unsupported if the call has no list and cursor with such entries.
        """
        entries, cursor = bound.arguments[names.entries], bound.arguments.get(names.cursor)
        if type(entries) is not list or type(cursor) is not list or [type(place) for place in cursor] != [int]:
            raise Unsupported(ReasonCode.WRITES_ARGUMENT)
        self._names, self._bound = names, bound
        self._entries: list[Any] = entries
        self._cursor: list[int] = cursor
        self._start = self._cursor[0]
        if not 0 <= self._start <= len(self._entries) - size:
            raise Unsupported(ReasonCode.WRITES_ARGUMENT)
        self.given = tuple(self._entries[self._start : self._start + size])
        """The entries before the call."""

    def call(self) -> tuple[tuple, dict[str, Any]]:
        """Return the call's arguments with a list of these entries only: a copy, which nobody else has."""
        own = {self._names.entries: list(self.given), self._names.cursor: [0]}
        bound = inspect.BoundArguments(self._bound.signature, {**self._bound.arguments, **own})
        return bound.args, bound.kwargs

    def now(self) -> tuple[list[Any], int]:
        """Return the entries as they are, and how far the cursor has moved."""
        return self._entries[self._start : self._start + len(self.given)], self._cursor[0] - self._start

    def write(self, values: Sequence[Any], moved: int) -> None:
        """Leave in the list and the cursor what the block would have left there."""
        self._entries[self._start : self._start + len(self.given)] = values
        self._cursor[0] = self._start + moved

    def accepts(self, values: Sequence[Any]) -> bool:
        """Whether these can be what the block leaves."""
        return len(values) == len(self.given)

    def reset(self) -> None:
        """Leave the list and the cursor as they were."""
        self.write(self.given, 0)


def bind_read(cls: type, args: tuple, kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
    """Bind a call, without the arguments that the code of `forward` does not read.

    All blocks of these VAEs are given the list, and whether a chunk is the last one. Blocks that need neither have one
    graph for all. Raises Unsupported if the arguments do not fit.
    """
    try:
        bound = forward_signature(cls).bind(*args, **kwargs)
    except TypeError as error:
        raise Unsupported(ReasonCode.CALL_MISFIT, f"{cls.__name__}.forward: {error}") from None
    for name in bound.arguments.keys() & _unread(cls, getattr(cls.forward, "__code__", None)):
        del bound.arguments[name]
    return bound


@lru_cache(maxsize=256)
def _unread(cls: type, code: types.CodeType | None) -> frozenset[str]:
    """Return the parameters with defaults that no instruction of a class's `forward` mentions."""
    parameters = {n: p for n, p in forward_signature(cls).parameters.items() if p.default is not p.empty}
    if code is None or not parameters.keys() <= set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]):
        return frozenset()  # a wrapper, which hands on what it does not read
    if not _LOOKING_AT_ALL.isdisjoint(code.co_names):
        return frozenset()
    mentioned: set[Any] = set()
    for instruction in dis.get_instructions(code):
        value = instruction.argval
        mentioned.update(value if isinstance(value, tuple) else [value] if isinstance(value, str) else [])
    return frozenset(parameters.keys() - mentioned)
