"""A weightless copy of a module, which is traced in place of the module.

Tracing swaps parameters and calls `forward`. On the module itself, a thread that samples with it would see the
swap, a replaced `forward`, ours or anybody's, would be traced instead of the class's, and gigabytes of weights would
move to the device although only their shapes matter. The copy shares nothing with the module that a trace changes.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..common.host import Host

Slot = tuple[dict[str, Any], str]
"""The place where a module keeps one tensor: its `_parameters` or `_buffers`, and the name in there."""


def weightless_copy(module: nn.Module, host: Host, tensor: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Copy the tree of modules. `tensor` returns the replacement for each parameter and buffer."""
    return _copy(module, host, tensor, {})


def tensor_slots(module: nn.Module) -> Iterator[tuple[str, Slot]]:
    """Yield the dotted name and the slot of every parameter and buffer.

    A layer's tensors are sorted by name, because the order in which they were registered can be that of a file.
    """
    for path, child in module.named_modules():
        for group in (child._parameters, child._buffers):
            for name in sorted(group):
                if group[name] is not None:
                    yield f"{path}.{name}" if path else name, (group, name)


def _own_container(value: Any) -> Any:
    """Copy a container, so that a block that keeps things in it does not keep those of a trace."""
    return copy.copy(value) if type(value) in (dict, OrderedDict, list, set) else value


def _copy(module: nn.Module, host: Host, tensor: Callable, done: dict[int, nn.Module]) -> nn.Module:
    if id(module) in done:
        return done[id(module)]
    copied = done[id(module)] = module.__class__.__new__(module.__class__)
    attributes = {
        name: OrderedDict() if name.endswith("_hooks") and isinstance(value, dict) else _own_container(value)
        for name, value in module.__dict__.items()
        if name != "forward" and (name in host.traced_attributes or not host.is_volatile(name))
    }
    copied.__dict__.update(attributes)
    for group in ("_parameters", "_buffers"):
        tensors = {name: None if t is None else tensor(t) for name, t in module.__dict__[group].items()}
        copied.__dict__[group] = copy.copy(module.__dict__[group])
        copied.__dict__[group].update(tensors)
    children = {
        name: None if child is None else _copy(child, host, tensor, done) for name, child in module._modules.items()
    }
    copied.__dict__["_modules"] = copy.copy(module._modules)
    copied.__dict__["_modules"].update(children)
    return copied
