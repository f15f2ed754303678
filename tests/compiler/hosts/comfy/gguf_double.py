"""Layers and tensors of the kind that ComfyUI-GGUF has: bytes with a type and a shape, dequantised at each call."""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

BLOCK = 32


class Type(enum.IntEnum):
    F16 = 1
    Q4_0 = 2
    Q8_0 = 8
    IQ4_NL = 20


LEVELS = torch.tensor([-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7], dtype=torch.int8)
"""A table that code for one type reads; code for the others is beside it."""


class GGMLTensor(torch.Tensor):
    """Bytes of a file."""

    def __init__(self, *args: Any, tensor_type: Type, tensor_shape: torch.Size, patches: Any = ()) -> None:
        super().__init__()
        self.tensor_type, self.tensor_shape, self.patches = tensor_type, tensor_shape, list(patches)

    def __new__(cls, *args: Any, tensor_type: Type, tensor_shape: torch.Size, patches: Any = ()) -> GGMLTensor:
        return super().__new__(cls, *args)

    def to(self, *args: Any, **kwargs: Any) -> GGMLTensor:
        new = super().to(*args, **kwargs)
        new.tensor_type = getattr(self, "tensor_type", None)
        new.tensor_shape = getattr(self, "tensor_shape", new.size())
        new.patches = list(getattr(self, "patches", ()))
        return new

    def detach(self) -> GGMLTensor:
        return self

    @property
    def shape(self) -> torch.Size:
        return getattr(self, "tensor_shape", None) or self.size()


def is_quantized(tensor: Any) -> bool:
    return getattr(tensor, "tensor_type", None) not in (None, Type.F16)


def _q8_0(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    scale, values = torch.split(blocks, [2, BLOCK], dim=1)
    return scale.view(torch.float16).to(dtype) * values.view(torch.int8)


def _q4_0(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    scale, values = torch.split(blocks, [2, BLOCK // 2], dim=1)
    shifts = torch.tensor([0, 4], device=blocks.device, dtype=torch.uint8).reshape(1, 2, 1)
    values = (values.unsqueeze(1) >> shifts) & 0x0F
    return scale.view(torch.float16).to(dtype) * (values.reshape(-1, BLOCK).to(torch.int8) - 8)


def _by_levels(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    scale, values = torch.split(blocks, [2, BLOCK // 2], dim=1)
    shifts = torch.tensor([0, 4], device=blocks.device, dtype=torch.uint8).reshape(1, 2, 1)
    values = ((values.unsqueeze(1) >> shifts) & 0x0F).reshape(-1, BLOCK)
    return scale.view(torch.float16).to(dtype) * LEVELS.to(blocks.device)[values.long()]


functions = {Type.Q8_0: _q8_0, Type.Q4_0: _q4_0, Type.IQ4_NL: _by_levels}


def packed(weight: torch.Tensor, kind: Type) -> GGMLTensor:
    """Quantise a matrix."""
    if kind is Type.F16:
        return GGMLTensor(weight.to(torch.float16), tensor_type=kind, tensor_shape=weight.shape)
    blocks = weight.float().reshape(-1, BLOCK)
    scale = (blocks.abs().amax(1, keepdim=True) / (127 if kind is Type.Q8_0 else 7)).to(torch.float16)
    values = (blocks / scale.float().clamp(1e-8)).round()
    if kind is Type.Q8_0:
        values = values.to(torch.int8).view(torch.uint8)
    else:
        low, high = (values + 8).clamp(0, 15).to(torch.uint8).chunk(2, 1)
        values = low | high << 4
    data = torch.cat([scale.view(torch.uint8), values], 1).reshape(weight.shape[0], -1)
    return GGMLTensor(data, tensor_type=kind, tensor_shape=weight.shape)


class GGMLLinear(nn.Module):
    """A linear layer of such tensors."""

    comfy_cast_weights = True

    def __init__(self, linear: nn.Linear, kind: Type) -> None:
        super().__init__()
        self.weight = nn.Parameter(packed(linear.weight.data, kind), requires_grad=False)
        bias = None if linear.bias is None else packed(linear.bias.data, Type.F16)
        self.bias = bias if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.get_weight(self.weight.to(x.device), x.dtype)
        bias = None if self.bias is None else self.get_weight(self.bias.to(x.device), x.dtype)
        out = F.linear(x, weight, bias)
        return torch.Tensor(out) if isinstance(out, GGMLTensor) else out

    def get_weight(self, tensor: Any, dtype: torch.dtype) -> torch.Tensor:
        if not is_quantized(tensor):
            return tensor.to(dtype)
        rows = tensor.data.reshape(-1, tensor.data.shape[-1]).view(torch.uint8)
        size = 2 + (BLOCK if tensor.tensor_type is Type.Q8_0 else BLOCK // 2)
        weight = functions[tensor.tensor_type](rows.reshape(-1, size), dtype).reshape(tensor.tensor_shape)
        for factor in getattr(tensor, "patches", ()):
            weight = weight * factor
        return weight.to(dtype)
