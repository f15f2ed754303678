"""The tensors in nested values."""

from __future__ import annotations

from typing import Any

import torch

from .torch_compat import pytree


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested tuples, lists and dictionaries, in their order."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
