"""The tensors in nested values."""

from __future__ import annotations

from typing import Any

import torch

from .torch_compat import pytree


def empty_like(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Return a tensor of the same shape, strides and dtype, with any values, on its device or on another one."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device or tensor.device)


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested tuples, lists and dictionaries, in their order."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
