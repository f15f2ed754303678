"""A request for one graph. Requests come from a call of the model, a file's list, or a note of an earlier process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..identity.call_signature import CallSignature, parse
from ..identity.graph_spec import GraphIdentity
from ..identity.regions import Region

MAX_HINT = 2**20
"""Upper bound for example sizes that come from a file."""
MAX_SIGNATURE = 2**18
"""Limit of characters in a call's signature that comes from a file."""


@dataclass(frozen=True)
class GraphRequest:
    """A request for one graph: a region, a call signature, and which sizes are symbols."""

    region: str
    """The name that people are shown."""
    module: nn.Module
    """Any region of this kind. Only its code, settings and shapes matter, not its values."""
    fingerprint: str
    signature: CallSignature
    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    hints: tuple[tuple[int, ...], ...]
    """Example shapes. Sizes of different symbols differ, and none is 0 or 1: tracing takes equal
    sizes for one symbol, and 0 and 1 for constants."""
    symbolic: tuple[tuple[bool, ...], ...]
    """For each size of each input, whether it is a symbol (a dynamic dimension)."""

    @property
    def sizes(self) -> list[list[int | str]]:
        """Each input's sizes as a key holds them: a number, or "s" and a symbol's hint. Tracing can depend on hints."""
        return [
            [f"s{size}" if is_symbol else size for size, is_symbol in zip(shape, symbols, strict=True)]
            for shape, symbols in zip(self.hints, self.symbolic, strict=True)
        ]

    @property
    def is_for_short_chunk(self) -> bool:
        """Whether it is for chunks of 2 or of 3 frames only. A graph for any length may serve these chunks, too."""
        inputs = zip(self.hints, self.symbolic, strict=True)
        length, is_symbol = next(((shape[2], symbols[2]) for shape, symbols in inputs if len(shape) == 5), (1, False))
        return self.signature.is_chunk and not is_symbol and 1 < length <= MAX_SHORT_CHUNK

    def without_module(self) -> GraphRequest:
        """Return a copy that keeps no model alive."""
        return replace(self, module=nn.Module())

    def with_signature(self, signature: CallSignature) -> GraphRequest | None:
        """Return the request for a call whose other arguments differ, or None if its tensors differ as well."""
        return replace(self, signature=signature) if signature.has_tensors_of(self.signature) else None

    @classmethod
    def like(cls, identity: GraphIdentity, region: Region, device: torch.device) -> GraphRequest:
        """Return the request for the graph that a file describes. The description need not be trusted.

        Raises ValueError if the description is inconsistent.
        """
        inputs = [(i.hints, i.symbolic) for i in identity.spec.inputs]
        return cls._described(region.label, region.module, identity.fingerprint, identity.signature, inputs, device)

    @classmethod
    def at(
        cls, shapes: Sequence[Sequence[int]], identity: GraphIdentity, region: Region, device: torch.device
    ) -> GraphRequest | None:
        """Return the request for a graph like another one that is traced at these shapes; None if another is empty.

        A block that keeps frames is called with chunks of several lengths. A graph for another length serves all sizes,
        so its symbols keep their examples.
        """
        has_fixed_sizes = identity.spec.has_fixed_sizes(shapes)
        if any(0 in shape for shape in shapes) and not has_fixed_sizes:
            return None
        if identity.spec.frames and not has_fixed_sizes:
            shapes = [
                [hint if is_symbol else size for size, hint, is_symbol in zip(shape, i.hints, i.symbolic, strict=True)]
                for shape, i in zip(shapes, identity.spec.inputs, strict=True)
            ]
        inputs = [
            (tuple(shape), tuple(wanted and size > 1 for size, wanted in zip(shape, spec.symbolic, strict=True)))
            for shape, spec in zip(shapes, identity.spec.inputs, strict=True)
        ]
        return cls._described(region.label, region.module, identity.fingerprint, identity.signature, inputs, device)

    @classmethod
    def of_chunk(
        cls,
        signature: CallSignature,
        shapes: Sequence[Sequence[int]],
        region: Region,
        fingerprint: str,
        device: torch.device,
        any_length: bool = True,
    ) -> GraphRequest:
        """Return the request for calls of a block that keeps frames, with all chunks of a video like this one.

        The picture's sides and the chunk's frames are symbols. How many frames were kept is fixed: what the code does
        follows from it. So is the batch, which is one video: a step of noise is for one only. Without `any_length`,
        only the sides are symbols: for chunks so short that the code does something else.
        """
        inputs = _chunk_inputs(shapes, any_length)
        return cls._described(region.label, region.module, fingerprint, signature.text, inputs, device)

    def note(self) -> dict[str, Any]:
        """Return the request without its module and device, as values that JSON can hold."""
        fields = {"region": self.region, "fingerprint": self.fingerprint, "signature": self.signature.text}
        return fields | {"inputs": list(zip(self.hints, self.symbolic, strict=True))}

    @classmethod
    def noted(cls, note: Mapping[str, Any], device: torch.device) -> GraphRequest:
        """Return the request that a note describes, without a module. The note need not be trusted.

        Raises ValueError, KeyError or TypeError if the note is inconsistent.
        """
        inputs = [(tuple(hints), tuple(symbolic)) for hints, symbolic in note["inputs"]]
        texts = [note[name] for name in ("region", "fingerprint", "signature")]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("the names are not strings")
        return cls._described(texts[0], nn.Module(), *texts[1:], inputs, device)

    @classmethod
    def _described(
        cls,
        region: str,
        module: nn.Module,
        fingerprint: str,
        signature_text: str,
        inputs: Sequence[tuple[tuple[int, ...], tuple[bool, ...]]],
        device: torch.device,
    ) -> GraphRequest:
        if len(signature_text) > MAX_SIGNATURE:
            raise ValueError("the call has more arguments than any block takes")
        signature, tensors = parse(signature_text)
        if [(len(hints), len(symbolic)) for hints, symbolic in inputs] != [(ndim, ndim) for ndim, _ in tensors]:
            raise ValueError("the inputs do not fit the signature of the call")
        sizes = [pair for hints, symbolic in inputs for pair in zip(hints, symbolic, strict=True)]
        if not all(type(size) is int and type(is_symbol) is bool for size, is_symbol in sizes):
            raise ValueError("the example sizes are not numbers")
        if not all(2 * is_symbol <= size < MAX_HINT for size, is_symbol in sizes):  # a symbol is at least 2
            raise ValueError("no tensor has these example sizes")
        return cls(
            region=region,
            module=module,
            fingerprint=fingerprint,
            signature=signature,
            device=device,
            dtypes=tuple(dtype for _, dtype in tensors),
            hints=tuple(hints for hints, _ in inputs),
            symbolic=tuple(symbolic for _, symbolic in inputs),
        )


MAX_SHORT_CHUNK = 3
"""A chunk of so few frames may be too short for a convolution over time, and the block's code then does without."""
_LENGTH = 22
"""The frames of a chunk while it is traced, or one more. No side of a map has that length meanwhile."""
MAX_PADDING = 9
"""A map whose side is that of the chunk, or some times as long, and fewer rows besides is padded."""
_CHUNKS = ((40, 56), (72, 104))
"""Height and width by which chunks of videos are traced. They divide by 8."""


def _chunk_inputs(
    shapes: Sequence[Sequence[int]], any_length: bool = True
) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
    """Return example sizes for a chunk, which is the first input with 5 dimensions, and for what comes with it."""
    place = next((i for i, shape in enumerate(shapes) if len(shape) == 5), None)
    if place is None:
        return [(tuple(shape), (False,) * len(shape)) for shape in shapes]
    chunk, others = shapes[place], [*shapes[:place], *shapes[place + 1 :]]
    length = _example_length(chunk[2], others) if any_length and chunk[2] > 1 else None
    lengths = [length if i == place else None for i in range(len(shapes))]
    ways = [
        [_with_sides(shape, own, chunk, *sides) for shape, own in zip(shapes, lengths, strict=True)]
        for sides in _CHUNKS
    ]
    return next((inputs for inputs in ways if not _has_side(inputs, length or chunk[2])), ways[0])


def _example_length(frames: int, others: Sequence[Sequence[int]]) -> int:
    """Return how many frames a chunk has while it is traced: as even or odd as its own, and more than a block keeps.

    Blocks keep two frames, and Inductor may take a chunk's length for their number. A graph for a GPU that was traced
    with chunks of two frames failed where a chunk had 21. A map as long as the chunk keeps the chunk's own length.
    """
    comes_with_map = any(len(shape) == 5 and shape[2] == frames for shape in others)
    return frames if frames > MAX_SHORT_CHUNK and comes_with_map else _LENGTH + frames % 2


def _with_sides(
    shape: Sequence[int], length: int | None, chunk: Sequence[int], height: int, width: int
) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Return an input's example sizes, and which are symbols. With a `length`, its frames are one."""
    symbols = {} if length is None else {2: length}
    if len(shape) == 5:
        symbols |= _in_proportion(3, shape, chunk, height) | _in_proportion(4, shape, chunk, width)
    sizes = tuple(symbols.get(axis, size) for axis, size in enumerate(shape))
    return sizes, tuple(axis in symbols for axis in range(len(shape)))


def _has_side(inputs: Sequence[tuple[Sequence[int], Sequence[bool]]], frames: int) -> bool:
    """Whether a map has a side of this length. Tracing would take it and the number of frames for one size."""
    return any(frames in shape[3:] and any(symbols[3:]) for shape, symbols in inputs)


def _in_proportion(axis: int, shape: Sequence[int], chunk: Sequence[int], side: int) -> dict[int, int]:
    """Return the example size of a map's side: as long as the chunk's, in proportion to it or with padding, as in the
    call.
    """
    own, other = shape[axis], chunk[axis]
    if other < 3:  # too short to tell twice as long from two longer
        return {}
    if own < 2:  # none, or one value for the whole map, such as a step of noise
        return {}
    times, padding = divmod(own, other)
    if times and 0 < padding < MAX_PADDING:
        return {axis: times * side + padding}
    if own < other < own + MAX_PADDING and other % own:
        return {axis: side + own - other}
    if own % other and other % own:
        return {}
    size, rest = divmod(side * own, other)
    return {axis: size} if size > 1 and not rest else {}
