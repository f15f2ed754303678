"""Graphs use one memory format throughout: channels_last, in which GPU convolutions are fastest.

Left alone, a compiler keeps the formats of the eager code. Wherever an operator then returns contiguous data, cuDNN or
a pointwise kernel transposes it there and back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the dimensions of a map: those of an image, and of a video."""
_NAMES = {4: "channels_last", 5: "channels_last_3d"}


def input_format(module: nn.Module, shape: Sequence[int], device: torch.device) -> str:
    """Return the memory format, by its name in a graph file, in which a region's graph takes an input of this shape."""
    name = _NAMES.get(len(shape))
    if name is None or device.type != "cuda":
        return "contiguous"
    # Some regions have no convolutions, but stand between regions that do. Group norm marks them.
    has_maps = any(p.ndim in _ranks_of_filters(shape) for p in module.parameters()) or any(
        isinstance(m, nn.GroupNorm) for m in module.modules()
    )
    return name if has_maps else "contiguous"


def _ranks_of_filters(shape: Sequence[int]) -> range:
    """Return the numbers of dimensions that filters for maps of this shape can have.

    Video VAEs also convolve each frame by itself, with filters for images.
    """
    return range(4, len(shape) + 1)


def has_layouts(weight: torch.Tensor) -> bool:
    """Whether this is the weight of a convolution that contiguous and channels_last order differently in memory."""
    if weight.ndim != 4 or weight.shape[1] == 1 or weight.shape[2:].numel() == 1:
        return False
    return weight.is_contiguous() or weight.is_contiguous(memory_format=torch.channels_last)


def stride_in(tensor: torch.Tensor, memory_format: torch.memory_format) -> tuple[int, ...]:
    """Return the stride that a tensor of this shape has in a memory format."""
    return torch.empty(tensor.shape, device="meta", memory_format=memory_format).stride()


def has_format(tensor: torch.Tensor, memory_format: torch.memory_format) -> bool:
    """Whether a tensor is in a memory format. In channels_last, the strides of its sizes of one count as well.

    `is_contiguous` ignores them. But PyTorch chooses a convolution's format by them: with an odd stride for its one
    frame, a map was convolved into a contiguous one, and the graph raised an error.
    """
    if not tensor.is_contiguous(memory_format=memory_format):
        return False
    return memory_format is torch.contiguous_format or tensor.stride() == stride_in(tensor, memory_format)


def in_format(tensor: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """Return a tensor in a memory format, as `has_format` has it.

    It is a copy if its values are in another order, and else shares its memory with the given tensor.
    """
    ordered = tensor.contiguous(memory_format=memory_format)
    if has_format(ordered, memory_format):
        return ordered
    return ordered.as_strided(ordered.shape, stride_in(ordered, memory_format))


def unrepeated_stride(weight: torch.Tensor) -> tuple[int, ...]:
    """Return a weight's stride. If it repeats numbers (stride 0), return the stride it has on another device.

    LTX's decoder makes some buffers of one number, and a move gives each place a number of its own. A graph made before
    the move has to fit after it.
    """
    if 0 not in weight.stride():
        return weight.stride()
    return torch.empty_like(torch.empty_strided(weight.shape, weight.stride(), device="meta")).stride()


def laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on a GPU in channels_last if it is a convolution's weight or a feature map.

    Any other tensor is returned unchanged. Weights that nobody converts ahead are transposed in the graph, once per
    call: hosts and their LoRAs keep them contiguous.
    """
    if tensor.device.type != "cuda" or tensor.ndim not in CHANNELS_LAST:
        return tensor
    return tensor.contiguous(memory_format=CHANNELS_LAST[tensor.ndim])
