"""Weights that consist of other tensors: a quantised weight has values, scales, perhaps a codebook.

A graph takes the inner tensors as inputs. The layout says how they are to be read, and is part of a region's identity.
So one graph serves every checkpoint of a layout. (torch calls such a weight a traceable wrapper subclass.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
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
    owner: torch.Tensor | None = None
    """The weight, if the tensors are new at each look and only share its memory."""

    @property
    def is_the_weight(self) -> bool:
        """Whether this is the weight itself. A region with it is the same as one with a weight of a plain class."""
        return self.names == ("",)

    @property
    def form(self) -> tuple[Any, ...]:
        """The layout, with the dtype and shape of each tensor."""
        return self.layout, *((tensor.dtype, tensor.shape) for tensor in self.tensors)


Look = Callable[[torch.Tensor], InnerTensors | None]
"""Returns what a tensor consists of; None for one that stands for itself (`Host.inner_tensors`)."""


def plain_tensors(tensors: Iterable[torch.Tensor | None], look: Look) -> list[torch.Tensor | None]:
    """Return the tensors, with inner ones in the place of those that consist of others. Raises what `look` raises."""
    return plain_and_owners(tensors, look)[0]


def plain_and_owners(tensors: Iterable[torch.Tensor | None], look: Look) -> tuple[list, list]:
    """Return the same, and for each of them the tensor that lasts as long as its memory."""
    plain: list[torch.Tensor | None] = []
    owners: list[torch.Tensor | None] = []
    for tensor in tensors:
        inner = None if tensor is None else look(tensor)
        found = [tensor] if inner is None else inner.tensors
        plain.extend(found)
        owners.extend(found if inner is None or inner.owner is None else [inner.owner] * len(found))
    return plain, owners


def plain_names(named: Iterable[tuple[str, torch.Tensor]], look: Look) -> list[str]:
    """Return the names of these tensors, in the order of `plain_tensors`: `qkv.weight`, or `qkv.weight.scale`."""
    names: list[str] = []
    for name, tensor in named:
        inner = look(tensor)
        names.extend([name] if inner is None else [f"{name}.{part}" if part else name for part in inner.names])
    return names
