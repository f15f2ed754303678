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
        for group, name in _slots_of(child):
            yield f"{path}.{name}" if path else name, child, (group, name)


def layer_slots(module: nn.Module) -> Iterator[tuple[nn.Module, Slot]]:
    """Yield the layer and the slot of each tensor, in the same order. Four times as fast, for what runs each time."""
    for child in modules_of(module):
        for slot in _slots_of(child):
            yield child, slot


def modules_of(module: nn.Module) -> list[nn.Module]:
    """Return what `nn.Module.modules` yields, several times as fast."""
    found: dict[int, nn.Module] = {}
    rest = [module]
    while rest:
        child = rest.pop()
        if child is not None and id(child) not in found:
            found[id(child)] = child
            rest.extend(reversed(child._modules.values()))
    return list(found.values())


def _slots_of(layer: nn.Module) -> Iterator[Slot]:
    for group in (layer._parameters, layer._buffers):
        for name in sorted(group) if len(group) > 1 else group:
            if group[name] is not None:
                yield group, name
