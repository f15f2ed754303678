"""A copy of a module without its weights, to trace in place of the module.

Tracing swaps parameters and calls `forward`. Done on the module itself, another thread that samples with
it would see the swap, a `forward` that we or anybody else replaced would trace itself, and gigabytes
would move to the device only to be looked at. A skeleton shares nothing that a trace touches.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .host import Host

Slot = tuple[dict[str, Any], str]
"""Where a module keeps one tensor: its `_parameters` or `_buffers`, and the name in there."""


def skeleton(module: nn.Module, host: Host, tensor: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Copy the tree of modules; `tensor` makes each parameter's and buffer's stand-in."""
    return _copy(module, host, tensor, {})


def tensor_slots(module: nn.Module) -> Iterator[tuple[str, Slot]]:
    """Yield the dotted name and the slot of every parameter and buffer.

    A layer's tensors are sorted by name: they come in whatever order they were registered in, which can be a file's.
    """
    for path, child in module.named_modules():
        for group in (child._parameters, child._buffers):
            for name in sorted(group):
                if group[name] is not None:
                    yield f"{path}.{name}" if path else name, (group, name)


def _own(value: Any) -> Any:
    """A block that remembers things in a container must not remember what a trace put there."""
    return copy.copy(value) if type(value) in (dict, OrderedDict, list, set) else value


def _copy(module: nn.Module, host: Host, tensor: Callable, done: dict[int, nn.Module]) -> nn.Module:
    if id(module) in done:
        return done[id(module)]
    twin = done[id(module)] = module.__class__.__new__(module.__class__)
    attributes = {
        name: OrderedDict() if name.endswith("_hooks") and isinstance(value, dict) else _own(value)
        for name, value in module.__dict__.items()
        if name != "forward" and (name in host.traced_attributes or not host.is_volatile(name))
    }
    twin.__dict__.update(attributes)
    for group in ("_parameters", "_buffers"):
        tensors = {name: None if t is None else tensor(t) for name, t in module.__dict__[group].items()}
        twin.__dict__[group] = copy.copy(module.__dict__[group])
        twin.__dict__[group].update(tensors)
    children = {
        name: None if child is None else _copy(child, host, tensor, done) for name, child in module._modules.items()
    }
    twin.__dict__["_modules"] = copy.copy(module._modules)
    twin.__dict__["_modules"].update(children)
    return twin
