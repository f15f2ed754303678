"""One memory format through a graph: channels_last, in which GPU convolutions are fastest.

Left to itself a compiler takes over what the eager code does, and where one operator hands on contiguous
data, cuDNN or a pointwise kernel transposes it there and back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def input_format(module: nn.Module, shape: Sequence[int], device: torch.device) -> str:
    """Return the memory format, by its name in a file, in which a region's graph takes an input of this shape."""
    if len(shape) != 4 or device.type != "cuda":
        return "contiguous"
    # Those without convolutions stand between those that have them, and normalise by groups as they do.
    has_maps = any(p.ndim == 4 for p in module.parameters()) or any(
        isinstance(m, nn.GroupNorm) for m in module.modules()
    )
    return "channels_last" if has_maps else "contiguous"


def has_layouts(weight: torch.Tensor) -> bool:
    """Whether this is the weight of a convolution that contiguous and channels_last order differently in memory."""
    if weight.ndim != 4 or weight.shape[1] == 1 or weight.shape[2:].numel() == 1:
        return False
    return weight.is_contiguous() or weight.is_contiguous(memory_format=torch.channels_last)


def stride_in(weight: torch.Tensor, memory_format: torch.memory_format) -> tuple[int, ...]:
    """Return the stride of a weight that `has_layouts`, in one of them."""
    return torch.empty(weight.shape, device="meta", memory_format=memory_format).stride()


def laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """Return a convolution's weight, or a feature map on a GPU, in channels_last, and anything else as it is.

    Weights that nobody arranges ahead are transposed in the graph, once per call: hosts and their LoRAs keep them
    contiguous.
    """
    if tensor.device.type != "cuda" or tensor.ndim not in CHANNELS_LAST:
        return tensor
    return tensor.contiguous(memory_format=CHANNELS_LAST[tensor.ndim])
