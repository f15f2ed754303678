"""Float8 weights with a scale, traced so that one graph serves every size."""

from __future__ import annotations

import inspect
from types import MethodType

import torch
import torch.nn.functional as F
from torch import nn


def multiply_weights(twin: nn.Module) -> None:
    """Let scaled layers of a skeleton multiply the weight by its scale, whatever the size of the input.

    ComfyUI multiplies what is smaller, weight or input (`comfy.ops.scaled_fp8_ops`, without float8 products).
    Traced, that comparison would be a limit on sizes, another one for each layer. In a graph the
    multiplication is part of the cast that the weight needs anyway.
    """
    for module in twin.modules():
        if _chooses_by_size(module):
            module.__dict__["forward_comfy_cast_weights"] = MethodType(_linear, module)


def _chooses_by_size(module: nn.Module) -> bool:
    function = getattr(type(module), "forward_comfy_cast_weights", None)
    if getattr(module, "scale_weight", None) is None or not inspect.isfunction(function):
        return False
    return inspect.getclosurevars(function).nonlocals.get("fp8_matrix_mult") is False


def _linear(self: nn.Module, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  torch's name
    scale = self.scale_weight.to(input.dtype)
    bias = None if self.bias is None else self.bias.to(input.dtype)
    return F.linear(input, self.weight.to(input.dtype) * scale, bias)
