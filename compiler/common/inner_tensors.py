"""Weights that consist of other tensors: a quantised weight has values, scales, perhaps a codebook.

A graph takes the inner tensors as inputs. The layout says how they are to be read, and is part of a region's identity.
So one graph serves every checkpoint of a layout. (torch calls such a weight a traceable wrapper subclass.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)
"""The exact types that a graph takes. A subclass (quantised, wrapped, fake) may compute something else."""


@dataclass(frozen=True)
class InnerTensors:
    """What a weight consists of."""

    names: tuple[str, ...]
    """One of an empty name is the weight itself, in a class of its own."""
    tensors: tuple[torch.Tensor, ...]
    layout: tuple[Any, ...]
    """Everything else that decides what the weight means: plain values, dtypes and classes."""

    @property
    def form(self) -> tuple[Any, ...]:
        """The layout, with the dtype and shape of each tensor."""
        return self.layout, *((tensor.dtype, tensor.shape) for tensor in self.tensors)


Look = Callable[[torch.Tensor], InnerTensors | None]
"""Returns what a tensor consists of; None for one that stands for itself (`Host.inner_tensors`)."""


def plain_tensors(tensors: Iterable[torch.Tensor | None], look: Look) -> list[torch.Tensor | None]:
    """Return the tensors, with inner ones in the place of those that consist of others. Raises what `look` raises."""
    plain: list[torch.Tensor | None] = []
    for tensor in tensors:
        inner = None if tensor is None else look(tensor)
        plain.extend([tensor] if inner is None else inner.tensors)
    return plain


def plain_names(named: Iterable[tuple[str, torch.Tensor]], look: Look) -> list[str]:
    """Return the names of these tensors, in the order of `plain_tensors`: `qkv.weight`, or `qkv.weight.scale`."""
    names: list[str] = []
    for name, tensor in named:
        inner = look(tensor)
        names.extend([name] if inner is None else [f"{name}.{part}" if part else name for part in inner.names])
    return names


class _Alias:
    """A tensor of torch's own class that was made for one of another class."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.plain = tensor.as_subclass(torch.Tensor)
        self._tensor = weakref.ref(tensor, partial(_forget, id(tensor)))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether both still have the same memory: hosts move weights by replacing the data of a tensor."""
        return self._tensor() is tensor and self.plain.data_ptr() == tensor.data_ptr()


_aliases: dict[int, _Alias] = {}


def _forget(identity: int, reference: weakref.ref) -> None:
    if identity in _aliases and _aliases[identity]._tensor is reference:
        del _aliases[identity]


def plain_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of torch's own class with the memory of one of another class: the same one at each call."""
    known = _aliases.get(id(tensor))
    if known is None or not known.holds(tensor):
        known = _aliases[id(tensor)] = _Alias(tensor)
    return known.plain
