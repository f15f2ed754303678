"""Float8 weights with a scale, traced so that one graph serves every size."""

from __future__ import annotations

from types import MethodType

import torch
import torch.nn.functional as F
from torch import nn

from .. import comfy_compat


def multiply_weights(weightless: nn.Module) -> None:
    """Let scaled layers of a weightless copy multiply the weight by its scale, whatever the size of the input.

    ComfyUI multiplies what is smaller, weight or input (`comfy.ops.scaled_fp8_ops`, without float8 products).
    Traced, that comparison would be a limit on sizes, another one for each layer. In a graph the
    multiplication is part of the cast that the weight needs anyway.
    """
    for module in weightless.modules():
        if comfy_compat.chooses_by_size(module):
            module.__dict__[comfy_compat.FP8_FORWARD] = MethodType(_linear, module)


def _linear(self: nn.Module, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  torch's name
    scale = getattr(self, comfy_compat.FP8_SCALE).to(input.dtype)
    bias = None if self.bias is None else self.bias.to(input.dtype)
    return F.linear(input, self.weight.to(input.dtype) * scale, bias)
