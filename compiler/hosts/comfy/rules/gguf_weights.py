"""Weights of GGUF files (city96's ComfyUI-GGUF): the file's bytes are inputs of a graph, which dequantises them.

The extension's tensors are bytes with a type and a shape, and its layers dequantise them at each call by torch's
functions. While a region is traced, an object that is no tensor takes such a tensor's place, so that its class does
not stand between the layer's code and the export.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....common.inner_tensors import InnerTensors
from ....common.reason import ReasonCode, Unsupported

CLASS = "GGMLTensor"
PLAIN_TYPES = frozenset({"None", "F32", "F16"})
"""Types that torch has: such a tensor stands for itself."""
TYPES = frozenset({"BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K"})
"""Types that the extension dequantises by functions that can be traced."""


@dataclass(eq=False)
class TracedBytes:
    """Takes the place of one of the extension's tensors while a region is traced."""

    data: torch.Tensor
    """The file's bytes: [rows, bytes of a row]."""
    tensor_type: Any
    tensor_shape: torch.Size
    patches: Sequence[Any] = ()

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight, which is not that of the bytes."""
        return self.tensor_shape

    @property
    def device(self) -> torch.device:
        """The device of the bytes."""
        return self.data.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the bytes."""
        return self.data.dtype

    def to(self, *args: Any, **kwargs: Any) -> TracedBytes:
        """Return the same: a region is traced on the device that it runs on. Bytes have no other dtype."""
        if kwargs.keys() - {"device", "non_blocking"} or any(isinstance(value, torch.dtype) for value in args):
            raise Unsupported(ReasonCode.WEIGHT_OPERATION, "to")
        return self


def is_known(cls: type) -> bool:
    """Whether a class is that of the extension's tensors, or of what takes the place of one."""
    return cls is TracedBytes or (cls.__name__ == CLASS and issubclass(cls, torch.Tensor))


def inner_tensors(weight: Any) -> InnerTensors:
    """Return the bytes of a weight.

    Raises Unsupported for a type that is not known, and for a weight with a LoRA: the extension adds that at each
    call, after it has dequantised the weight.
    """
    if isinstance(weight, TracedBytes):
        return InnerTensors(("data",), (weight.data,), _layout(weight))
    name = type_name(weight)
    if name not in PLAIN_TYPES | TYPES:
        raise Unsupported(ReasonCode.WEIGHT_LAYOUT, f"{name} of GGUF, which is not known")
    if getattr(weight, "patches", None):
        raise Unsupported(ReasonCode.WEIGHT_FUNCTION, f"a LoRA on {name} of GGUF")
    if name in PLAIN_TYPES:
        return InnerTensors(("",), (weight.as_subclass(torch.Tensor),), (), weight)
    return InnerTensors(("data",), (weight.as_subclass(torch.Tensor),), _layout(weight), weight)


def with_inner_tensors(weight: Any, tensors: Sequence[torch.Tensor]) -> torch.Tensor | TracedBytes:
    """Return what takes the place of a weight while its region is traced."""
    (data,) = tensors
    if not isinstance(weight, TracedBytes) and type_name(weight) in PLAIN_TYPES:
        return data
    return TracedBytes(data, weight.tensor_type, torch.Size(weight.tensor_shape))


def type_name(weight: Any) -> str:
    """Return the name of a tensor's type in the file, such as Q4_K."""
    kind = getattr(weight, "tensor_type", None)
    return str(getattr(kind, "name", kind))


def _layout(weight: Any) -> tuple[Any, ...]:
    return type_name(weight), tuple(weight.tensor_shape)
