"""A compiled graph is a stateless function of (weights, inputs). Its spec says what it accepts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Protocol

import torch

from ..common.torch_compat import pytree
from .context_options import decode_writes
from .frame_window import FrameWrites
from .guard_expressions import evaluate

MEMORY_FORMATS = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}

MAX_ELEMENTS = 2**31 - 1
"""Limit of elements of one tensor in a compiled GPU graph: its kernels index with 32 bits."""

FEW_FRAMES = 4
"""A graph is checked at each of these numbers of frames. Blocks keep two frames of a chunk, or three."""

# A size of this form gives its symbol a value: "s0", or "3*s0" where frames are folded into the batch.
_SYMBOL = re.compile(r"(?:(?P<factor>\d+)\*)?(?P<name>[A-Za-z_]\w*)")


def element_limit(elements: str) -> str:
    """Return the guard that keeps a tensor's number of elements, an expression, within what kernels can index."""
    return f"{elements} <= {MAX_ELEMENTS}"


@dataclass(frozen=True)
class WeightSpec:
    """One parameter or buffer of a region."""

    name: str
    shape: tuple[int | str, ...]
    """The rank of a low-rank branch (`low_rank`) is a symbol."""
    stride: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class InputSpec:
    """One tensor of a region's call."""

    sizes: tuple[int | str, ...]
    """A fixed size is a number. Any other size is an expression over the graph's symbols."""
    dtype: str
    memory_format: str
    """The memory format that the graph was compiled for: a key of `MEMORY_FORMATS`."""
    hints: tuple[int, ...] = ()
    """Sizes of the example that the graph was traced with."""
    symbolic: tuple[bool, ...] = ()
    """Whether tracing was asked to make each size a symbol."""


@dataclass(frozen=True)
class GraphSpec:
    """The contract of a graph: plain data, the same for every backend."""

    region: str
    """Name of the region's class, for people."""
    device: str
    weights: tuple[WeightSpec, ...]
    inputs: tuple[InputSpec, ...]
    guards: tuple[str, ...]
    """Relations between symbols that tracing and compilers rely on."""
    mutated: tuple[int, ...]
    """Indices of the inputs that the region writes to."""
    outputs: tuple[bool, ...]
    """Whether each leaf of the region's result is a tensor. Any other leaf is None."""
    tree: str
    """Structure of the region's result, as `torch.utils._pytree.treespec_dumps` writes it."""
    reads: tuple[str, ...] = ()
    """Options that the code asked for and that the traced call did not have. Calls that have one run eagerly."""
    writes: str = ""
    """The values that the code leaves in its call's options, as `context_options.encode_writes` writes them."""
    frames: str = ""
    """What the code leaves in its frame cache, as `FrameWrites.to_text` writes it; empty for a call without one."""

    @cached_property
    def frame_writes(self) -> FrameWrites | None:
        """What the code leaves in its frame cache. `rebuild` then returns the result, and the tensors to keep there.

        Raises ValueError if the text is malformed.
        """
        return FrameWrites.from_text(self.frames) if self.frames else None

    def left_behind(self, shapes: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Return the values that a call with these input shapes leaves in its options."""
        return decode_writes(self.writes, self._bind_symbols(shapes) or {})

    @cached_property
    def weight_layout(self) -> list[tuple[tuple[int | str, ...], tuple[int, ...], torch.dtype, torch.device]]:
        """Shape, stride, dtype and device of each weight, as torch has them."""
        device = torch.device(self.device)
        return [(w.shape, w.stride, getattr(torch, w.dtype.removeprefix("torch.")), device) for w in self.weights]

    @cached_property
    def weight_names(self) -> tuple[str, ...]:
        """The name of each weight in its region. Calls match their weights to the graph's by these names."""
        return tuple(weight.name for weight in self.weights)

    @cached_property
    def _ranks(self) -> dict[str, list[int]]:
        """The symbols among the sizes of weights, and which weights have each as their first size."""
        ranks: dict[str, list[int]] = {}
        for place, weight in enumerate(self.weights):
            if weight.shape and isinstance(weight.shape[0], str):
                ranks.setdefault(weight.shape[0], []).append(place)
        return ranks

    def agrees_on_ranks(self, weights: Sequence[torch.Tensor]) -> bool:
        """Whether each symbol has one value in these weights."""
        return all(len({weights[place].shape[0] for place in places}) == 1 for places in self._ranks.values())

    @cached_property
    def _tree(self) -> pytree.TreeSpec:
        return pytree.treespec_loads(self.tree)

    def fits(self, shapes: Sequence[Sequence[int]]) -> bool:
        """Whether a call with these input shapes is one of those the graph was traced for."""
        return self._fits(shapes, self.guards)

    def is_exceeded_by(self, shapes: Sequence[Sequence[int]]) -> bool:
        """Whether a call with these input shapes has too many elements in a tensor, and else is one for the graph.

        Then no other graph can serve it.
        """
        return not self.fits(shapes) and self._fits(shapes, [g for g in self.guards if g not in self._element_limits])

    def _fits(self, shapes: Sequence[Sequence[int]], guards: Iterable[str]) -> bool:
        symbols = self._bind_symbols(shapes)
        if symbols is None:
            return False
        try:
            return all(evaluate(guard, symbols) for guard in guards) and all(
                size == (evaluate(expected, symbols) if isinstance(expected, str) else expected)
                for spec, shape in zip(self.inputs, shapes, strict=True)
                for expected, size in zip(spec.sizes, shape, strict=True)
            )
        except (ArithmeticError, AttributeError, NameError, TypeError, ValueError):
            return False

    @cached_property
    def _element_limits(self) -> frozenset[str]:
        return frozenset(guard for guard in self.guards if guard.endswith(element_limit("")))

    def has_fixed_sizes(self, shapes: Sequence[Sequence[int]]) -> bool:
        """Whether a call with these input shapes has the sizes that tracing was asked to leave fixed.

        Tracing takes 0 for a constant, so no symbol is 0.
        """
        return all(
            size > 0 if is_symbol else size == hint
            for spec, shape in zip(self.inputs, shapes, strict=True)
            for size, hint, is_symbol in zip(shape, spec.hints, spec.symbolic, strict=True)
        )

    def tells_symbols_of(self, shapes: Sequence[Sequence[int]]) -> bool:
        """Whether the graph tells which sizes of a call with these input shapes are symbols.

        One for videos with sound does not tell it of those without. One for a step that all frames share does not tell
        it of a step for each frame.
        """
        return self._is_empty_in_same_places(shapes) and not self._fixes_larger_size_at_one(shapes)

    def _fixes_larger_size_at_one(self, shapes: Sequence[Sequence[int]]) -> bool:
        """Whether a size that the graph fixes at 1 is larger in a call with these input shapes: it may be a symbol."""
        sizes = (
            pair
            for spec, shape in zip(self.inputs, shapes, strict=True)
            for pair in zip(shape, spec.hints, spec.symbolic, strict=True)
        )
        return any(size > 1 == hint and not is_symbol for size, hint, is_symbol in sizes)

    def _is_empty_in_same_places(self, shapes: Sequence[Sequence[int]]) -> bool:
        """Whether a call with these input shapes is empty where the example is, and only there."""
        return all(
            (size == 0) == (hint == 0)
            for spec, shape in zip(self.inputs, shapes, strict=True)
            for size, hint in zip(shape, spec.hints, strict=True)
        )

    def small_sizes(self, shapes: Sequence[Sequence[int]]) -> frozenset[str]:
        """Return the symbols of this call whose sizes are so small that a graph which is right at others may be wrong.

        Tracing assumes that every symbol is 2 or more. A convolution over time leaves less of a chunk of few frames.
        """
        bound = (self._bind_symbols(shapes) or {}).items()
        return frozenset(
            f"{name} = {size}"
            for name, size in bound
            if size == 1 or (size <= FEW_FRAMES and self.frames and name in self._lengths)
        )

    def few_frames(self, shapes: Sequence[Sequence[int]]) -> frozenset[str]:
        """Return those small sizes that are numbers of frames: code of videos often does something else for these."""
        return frozenset(size for size in self.small_sizes(shapes) if size.split()[0] in self._lengths)

    @cached_property
    def _lengths(self) -> frozenset[str]:
        """The symbols that are numbers of frames."""
        sizes = [str(spec.sizes[2]) for spec in self.inputs if len(spec.sizes) == 5]
        return frozenset(match["name"] for size in sizes if (match := _SYMBOL.fullmatch(size)))

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Put output tensors into the structure that the region returns."""
        supply = iter(tensors)
        return pytree.tree_unflatten([next(supply) if is_tensor else None for is_tensor in self.outputs], self._tree)

    def _bind_symbols(self, shapes: Sequence[Sequence[int]]) -> dict[str, int] | None:
        symbols: dict[str, int] = {}
        if len(shapes) != len(self.inputs):
            return None
        for spec, shape in zip(self.inputs, shapes, strict=True):
            if len(spec.sizes) != len(shape):
                return None
            for expected, size in zip(spec.sizes, shape, strict=True):
                match = _SYMBOL.fullmatch(str(expected))
                if match is None:
                    continue
                factor, name = int(match["factor"] or 1), match["name"]
                if size < 1 or size % factor or symbols.setdefault(name, size // factor) != size // factor:
                    return None
        return symbols


class Executable(Protocol):
    """A backend's compiled form of a region. It takes weights and inputs, flat and in order."""

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]: ...

    def to_bytes(self) -> bytes:
        """Return bytes from which the same backend's `load` makes an equal executable."""
        ...


@dataclass(frozen=True)
class GraphIdentity:
    """The fields that identify a graph in memory and on disk: its key, what it was made for, and its contract."""

    key: str
    fingerprint: str
    """Fingerprint of the kind of region."""
    signature: str
    """The call signature, as text."""
    backend: str
    environment: Mapping[str, str]
    """Versions and device that the executable was built for, as `Backend.environment` returned them."""
    spec: GraphSpec

    def identity(self) -> dict[str, Any]:
        """Return these fields by name."""
        return {field.name: getattr(self, field.name) for field in fields(GraphIdentity)}


@dataclass(frozen=True, eq=False)
class CompiledGraph(GraphIdentity):
    """A graph that can be called. It holds no weights."""

    executable: Executable
    is_foreign: bool = False
    """Whether somebody else signed the file that it came from. It is not copied out of that: trust can be withdrawn."""

    @property
    def precision(self) -> torch.dtype | None:
        """The dtype that the graph computes in, if that is coarser than its inputs. Otherwise None."""
        return getattr(self.executable, "precision", None)

    @property
    def grows(self) -> bool:
        """Whether its executable's bytes grow while it is used. Bytes that were written earlier may be out of date."""
        return hasattr(self.executable, "has_grown")

    def has_grown(self, data: bytes | None = None) -> bool:
        """Return whether its executable's bytes hold more by now than these, which were written earlier.

        By default these are the bytes that it was loaded from.
        """
        return self.grows and self.executable.has_grown(data)

    def __call__(self, weights: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the region's output tensors, in the order of `spec.outputs`."""
        return self.executable(*weights, *inputs)
