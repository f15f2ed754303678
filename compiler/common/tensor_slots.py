"""The places where modules keep their tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

Slot = tuple[dict[str, Any], str]
"""The place where a module keeps one tensor: its `_parameters` or `_buffers`, and the name in there."""


def tensor_slots(module: nn.Module) -> Iterator[tuple[str, Slot]]:
    """Yield the dotted name and the slot of every parameter and buffer.

    A layer's tensors are sorted by name, because the order in which they were registered can be that of a file.
    """
    for name, _, slot in owned_tensor_slots(module):
        yield name, slot


def owned_tensor_slots(module: nn.Module) -> Iterator[tuple[str, nn.Module, Slot]]:
    """Yield the same, each with the layer that the tensor belongs to."""
    for path, child in module.named_modules():
        for group in (child._parameters, child._buffers):
            for name in sorted(group):
                if group[name] is not None:
                    yield f"{path}.{name}" if path else name, child, (group, name)
