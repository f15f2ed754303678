"""A weightless copy of a module, which is traced in place of the module.

Tracing swaps parameters and calls `forward`. On the module itself, a thread that samples with it would see the
swap, a replaced `forward`, ours or anybody's, would be traced instead of the class's, and gigabytes of weights would
move to the device although only their shapes matter. The copy shares nothing with the module that a trace changes.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..common.host import Host
from ..common.reason import Unsupported


def weightless_copy(module: nn.Module, host: Host, tensor: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Copy the tree of modules. `tensor` returns the replacement for each parameter and buffer, inner ones included.

    It is given a tensor of the dtype in which the weight reaches the layer, which is not always that of its file.
    """
    return _copy(module, host, tensor, {})


def _own_container(value: Any) -> Any:
    """Copy a container, so that a block that keeps things in it does not keep those of a trace."""
    return copy.copy(value) if type(value) in (dict, OrderedDict, list, set) else value


def _in_its_dtype(module: nn.Module, name: str, tensor: torch.Tensor, host: Host) -> torch.Tensor:
    dtype = host.weight_dtype(module, name, tensor)
    if dtype == tensor.dtype:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")


def _replaced(module: nn.Module, name: str, weight: torch.Tensor, host: Host, tensor: Callable) -> torch.Tensor:
    try:
        inner = host.inner_tensors(weight)
    except Unsupported:  # the region is eager, whatever its copy holds
        inner = None
    if inner is None:
        return tensor(_in_its_dtype(module, name, weight, host))
    return host.with_inner_tensors(weight, [tensor(part) for part in inner.tensors])


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
    if host.frame_cells in module.__dict__:
        copied.__dict__[host.frame_cells] = {}
    for group in ("_parameters", "_buffers"):
        tensors = {
            name: None if t is None else _replaced(module, name, t, host, tensor)
            for name, t in module.__dict__[group].items()
        }
        copied.__dict__[group] = copy.copy(module.__dict__[group])
        copied.__dict__[group].update(tensors)
    children = {
        name: None if child is None else _copy(child, host, tensor, done) for name, child in module._modules.items()
    }
    copied.__dict__["_modules"] = copy.copy(module._modules)
    copied.__dict__["_modules"].update(children)
    return copied
