"""What a layer with a low-rank branch computes, eagerly and in a graph: layer(x) + (x @ down.T) @ up."""

from __future__ import annotations

from collections.abc import Mapping, Set
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..identity.low_rank import DOWN, UP

STEP = 16
"""Ranks are multiples of this: matrix products are fastest so, and no graph is asked for a rank below two."""


class Branch:
    """A forward hook that adds a layer's branch to its result. The layer holds the factors."""

    def __call__(self, layer: nn.Module, args: tuple, kwargs: Mapping[str, Any], result: torch.Tensor) -> torch.Tensor:
        """Return the layer's result with the branch added: [..., outputs]."""
        x = args[0] if args else kwargs["input"]
        down, up = (_in_dtype(layer._buffers[name], x.dtype) for name in (DOWN, UP))
        return result + _in_dtype(F.linear(F.linear(x, down), up.t()), result.dtype)


def attach(layer: nn.Module, down: torch.Tensor, up: torch.Tensor) -> Any:
    """Give a layer a branch. `down` is [rank, inputs], and `up` is [rank, outputs]. Return the handle of its hook."""
    layer.register_buffer(DOWN, down, persistent=False)
    layer.register_buffer(UP, up, persistent=False)
    return layer.register_forward_hook(Branch(), with_kwargs=True)


def detach(layer: nn.Module, handle: Any) -> None:
    """Take a layer's branch away."""
    handle.remove()
    for name in (DOWN, UP):
        layer._buffers.pop(name, None)
        layer._non_persistent_buffers_set.discard(name)


def trace_branches(weightless: nn.Module, sizes: Set[int]) -> None:
    """Give the layers of a weightless copy, which has the factors and no hooks, their branches.

    Their rank becomes one that is none of the call's `sizes`: tracing takes equal sizes for one symbol.
    """
    rank = next(rank for rank in count(2 * STEP, STEP) if rank not in sizes)
    for layer in weightless.modules():
        if DOWN in layer._buffers:
            attach(layer, *(_with_rank(layer._buffers[name], rank) for name in (DOWN, UP)))


def _in_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _with_rank(factor: torch.Tensor, rank: int) -> torch.Tensor:
    return torch.empty(rank, factor.shape[1], dtype=factor.dtype, device=factor.device)
