"""Traces and probes blocks of video VAEs that keep frames (`identity.frame_window`, `identity.frame_cells`)."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import nn

from ..common.host import FrameCache, FrameCarry, FrameMemory, Host
from ..common.reason import ReasonCode, Unsupported
from ..common.tensors import empty_like
from ..common.torch_compat import FakeTensorMode, pytree, without_fake_tensors
from ..identity.call_signature import CELLS
from ..identity.frame_carry import CarryWindow
from ..identity.frame_cells import Cells, CellWindow, SharedCells
from ..identity.frame_window import FrameWrites, Window, bind_read
from .answered_values import without_answers
from .weightless_copy import weightless_copy

log = logging.getLogger(__name__)

AnyWindow = Window | CarryWindow | CellWindow
"""Where a block keeps frames between calls."""

WindowSizes = MutableMapping[str, int | None]
"""By fingerprint, how many entries of its lists a block uses, or how many cells it has; None for a block that does
something else with the lists."""


@dataclass(frozen=True)
class SeenCall:
    """A call of a block as a graph sees it."""

    args: tuple
    kwargs: Mapping[str, Any]
    window: AnyWindow | None = None
    """The block's entries in the lists of its call, or its cells, if the block and the call keep frames."""


def see(
    block: nn.Module, fingerprint: str, host: Host, sizes: WindowSizes, args: tuple, kwargs: Mapping[str, Any]
) -> SeenCall:
    """Return a call as a graph sees it.

    `sizes` remembers how many entries blocks use. Raises Unsupported if the call's list is no list
    of frames, or if the block uses it for something else.
    """
    names = host.frame_cache(type(block))
    if names is None:
        return _see_cells(block, fingerprint, host, sizes, args, kwargs)
    bound = bind_read(type(block), args, kwargs)
    if type(names) is FrameCarry and bound.arguments.get(names.given) is bound.arguments.get(names.left) is None:
        return SeenCall(args, {**kwargs, CELLS: []} if _has_video(bound) else kwargs)
    if type(names) is not FrameCarry and bound.arguments.get(names.entries) is None:
        return SeenCall(bound.args, bound.kwargs)
    if type(names) is FrameMemory:
        return _see_memory(block, names, bound)
    if fingerprint not in sizes:
        sizes[fingerprint] = _window_size(block, names, host, bound)
    size = sizes[fingerprint]
    if size is None:
        raise Unsupported(ReasonCode.WRITES_ARGUMENT)
    window = (CarryWindow if type(names) is FrameCarry else Window)(names, bound, size)
    return SeenCall(*window.call(), window)


def _see_memory(block: nn.Module, names: FrameMemory, bound: inspect.BoundArguments) -> SeenCall:
    entries = bound.arguments[names.entries]
    if type(entries) is not dict:
        raise Unsupported(ReasonCode.WRITES_ARGUMENT)
    window = CellWindow(SharedCells(block, entries))
    bound.arguments[names.entries] = None
    return SeenCall(bound.args, {**bound.kwargs, **window.argument()}, window)


def _has_video(bound: inspect.BoundArguments) -> bool:
    return any(isinstance(value, torch.Tensor) and value.ndim == 5 for value in bound.arguments.values())


def _see_cells(
    block: nn.Module, fingerprint: str, host: Host, sizes: WindowSizes, args: tuple, kwargs: Mapping[str, Any]
) -> SeenCall:
    if sizes.get(fingerprint) == 0:  # to look through a block's modules takes as long as to launch a kernel or two
        return SeenCall(args, kwargs)
    cells = Cells.of(block, host)
    sizes[fingerprint] = len(cells)
    if not len(cells):
        return SeenCall(args, kwargs)
    window = CellWindow(cells)
    return SeenCall(args, {**kwargs, **window.argument()}, window)


class TracedWindow:
    """Takes the place of a call's list and cursor while a block is traced. Nothing else in the list can be reached."""

    def __init__(self, names: FrameCache, given: list[Any]) -> None:
        self.given = list(given)
        self._entries, self._cursor = _Entries(given), [_Place(0)]
        self.arguments = {names.entries: self._entries, names.cursor: self._cursor}

    def left(self) -> tuple[list[Any], int]:
        """Return the entries that the block has left, and how far it has moved the cursor."""
        return self._entries.values(), _moved(self._cursor)


class TracedCarry:
    """Takes the place of the lists that a block takes from and puts to, while it is traced."""

    def __init__(self, names: FrameCarry, given: list[Any] | None, left: list[Any] | None) -> None:
        self.given = list(given or ())
        self._front = None if given is None else _Front(given)
        self._end = None if left is None else _End()
        self.arguments = {names.given: self._front, names.left: self._end}

    def left(self) -> tuple[list[Any], int]:
        """Return what the block has put, and how many entries it has taken: all, or its calls are not alike."""
        if self._front is not None and self._front.entries:
            raise Unsupported(ReasonCode.WRITES_ARGUMENT)
        return [] if self._end is None else self._end.entries, len(self.given)


class TracedCells:
    """The cells of a block that is traced, and what they are to hold before."""

    arguments: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, cells: Cells, given: list[Any]) -> None:
        self.given, self._cells = given, cells
        cells.write(given)

    def left(self) -> tuple[list[Any], int]:
        """Return what the block has left in the cells, and empty them: what a trace leaves is of no use."""
        if not self._cells.are_of_one_thread():
            raise Unsupported(ReasonCode.WRITES_ARGUMENT)
        left = self._cells.read()
        self._cells.write([()] * len(left))
        return left, 0


class TracedMemory:
    """Takes the place of the dictionary that a call brings while a block is traced."""

    def __init__(self, block: nn.Module, names: FrameMemory, given: list[Any]) -> None:
        self.given, self._memory = given, _Memory(block)
        self._cells = SharedCells(block, self._memory.entries)
        self._cells.write(given)
        self.arguments = {names.entries: self._memory}

    def left(self) -> tuple[list[Any], int]:
        """Return what the block has left in the dictionary, and 0: there is no cursor to move."""
        return self._cells.read(), 0


AnyTracedWindow = TracedWindow | TracedCarry | TracedCells | TracedMemory
"""Where a block that is traced keeps frames."""


def traced_window(block: nn.Module, host: Host, arguments: Mapping[str, Any]) -> AnyTracedWindow | None:
    """Return where a block that is traced keeps its frames; None if a call with these arguments keeps none."""
    names = host.frame_cache(type(block))
    if type(names) is FrameCarry:
        given, left = (arguments.get(name) for name in (names.given, names.left))
        return None if given is left is None else TracedCarry(names, given, left)
    if type(names) is FrameMemory:
        return TracedMemory(block, names, arguments[CELLS]) if CELLS in arguments else None
    if CELLS in arguments:
        return TracedCells(Cells.of(block, host), arguments[CELLS])
    given = arguments.get(names.entries) if names else None
    return None if given is None else TracedWindow(names, given)


def frame_writes(window: AnyTracedWindow, result: Any) -> tuple[FrameWrites, list[torch.Tensor]]:
    """Return what a block that returned `result` has left, and the tensors to keep, with memory of their own.

    An entry may be the last frames of a chunk. A view of it would keep the chunk alive.
    """
    writes, kept = FrameWrites.of(window.given, *window.left(), result)
    return writes, [tensor.clone() for tensor in kept]


@dataclass(frozen=True, eq=False)
class _Place:
    """A place in a list, counted from a block's first entry. Code can count on, and cannot learn where that is."""

    offset: int

    def __add__(self, places: int) -> _Place:
        return _Place(self.offset + places) if type(places) is int else NotImplemented

    __radd__ = __add__

    def _depend(self, *_: Any) -> NoReturn:
        raise Unsupported(ReasonCode.WRITES_ARGUMENT)

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __bool__ = __int__ = __index__ = _depend


class _Guarded:
    """A list or a dictionary of which a block may do nothing that its own entries do not answer."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise Unsupported(ReasonCode.WRITES_ARGUMENT)

    __len__ = __bool__ = __iter__ = __contains__ = __eq__ = _refuse
    __getitem__ = __setitem__ = __delitem__ = __add__ = __iadd__ = _refuse
    append = extend = insert = pop = clear = copy = index = count = remove = reverse = sort = _refuse
    __hash__ = None


class _Memory(_Guarded):
    """A dictionary of which each module of a block can read and write its own entry."""

    keys = values = items = popitem = setdefault = update = fromkeys = _Guarded._refuse

    def __init__(self, block: nn.Module) -> None:
        self.entries: dict[nn.Module, Any] = {}
        self._modules = frozenset(block.modules())

    def _own(self, module: Any) -> nn.Module:
        return module if module in self._modules else self._refuse()

    def __contains__(self, module: Any) -> bool:
        return self._own(module) in self.entries

    def __getitem__(self, module: Any) -> Any:
        return self.entries[self._own(module)]

    def __setitem__(self, module: Any, entry: Any) -> None:
        self.entries[self._own(module)] = entry

    def __delitem__(self, module: Any) -> None:
        del self.entries[self._own(module)]

    def get(self, module: Any, otherwise: Any = None) -> Any:
        return self.entries.get(self._own(module), otherwise)

    def pop(self, module: Any, *otherwise: Any) -> Any:
        return self.entries.pop(self._own(module), *otherwise)


class _Front(_Guarded):
    """A list from whose front entries can be taken."""

    def __init__(self, entries: list[Any]) -> None:
        self.entries = list(entries)

    def __getitem__(self, place: Any) -> Any:
        return self.entries[place] if place == 0 and self.entries else self._refuse()

    def pop(self, place: Any = -1) -> Any:
        return self.entries.pop(0) if place == 0 and self.entries else self._refuse()


class _End(_Guarded):
    """A list to whose end entries can be put."""

    def __init__(self) -> None:
        self.entries: list[Any] = []

    def append(self, entry: Any) -> None:
        self.entries.append(entry)


class _Entries(_Guarded):
    """A list of entries that can be read and written one by one."""

    def __init__(self, given: list[Any] | None = None) -> None:
        """Without given entries, each is None, and there are as many as are used."""
        self._values = dict(enumerate(given or ()))
        self._grows = given is None

    def values(self) -> list[Any]:
        """Return all entries, in order."""
        return [self._values.get(place) for place in range(1 + max(self._values, default=-1))]

    def __getitem__(self, place: Any) -> Any:
        return self._values[self._offset(place)]

    def __setitem__(self, place: Any, value: Any) -> None:
        self._values[self._offset(place)] = value

    def _offset(self, place: Any) -> int:
        offset = place.offset if type(place) is _Place else -1
        if self._grows and offset >= 0:
            self._values.setdefault(offset, None)
        if offset not in self._values:
            raise Unsupported(ReasonCode.WRITES_ARGUMENT)
        return offset


def _moved(cursor: list[Any]) -> int:
    if [type(place) for place in cursor] != [_Place]:
        raise Unsupported(ReasonCode.WRITES_ARGUMENT)
    return cursor[0].offset


def _window_size(
    block: nn.Module, names: FrameCache | FrameCarry, host: Host, bound: inspect.BoundArguments
) -> int | None:
    """Return how many entries a block uses, by running it once on fake tensors as for the first chunk of a video.

    Returns None if it wants something else of the lists.
    """
    entries, cursor, left = _Entries(), [_Place(0)], _End()
    carries = type(names) is FrameCarry
    own = {names.given: None, names.left: left} if carries else {names.entries: entries, names.cursor: cursor}
    try:
        with _fake_tensors(), host.traced_functions(is_lenient=True), without_answers():
            probed = weightless_copy(block, host, empty_like)
            host.prepare_for_tracing(probed)
            given = pytree.tree_map_only(torch.Tensor, empty_like, {**bound.arguments, **dict.fromkeys(own)})
            call = inspect.BoundArguments(bound.signature, {**given, **own})
            type(block).forward(probed, *call.args, **call.kwargs)
        return len(left.entries) if carries else max(len(entries.values()), _moved(cursor))
    except Exception as error:
        log.debug("%s uses a list of frames in an unknown way", type(block).__name__, exc_info=error)
        return None


@contextmanager
def _fake_tensors() -> Iterator[None]:
    """Make fake tensors, on a thread that may infer or make fake tensors already."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.inference_mode(False), torch.no_grad(), without_fake_tensors(), fake:
        yield
