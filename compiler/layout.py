"""One memory format through a graph: channels_last, in which GPU convolutions are fastest.

Left to itself a compiler takes over what the eager code does, and where one operator hands on contiguous
data, cuDNN or a pointwise kernel transposes it there and back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

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


class ChannelsLast(TorchFunctionMode):
    """While a region is traced for a GPU, rewrites the functions that would leave channels_last or be slow in it."""

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.interpolate:
            # Its own decomposition returns contiguous data, and all that is added to it later follows.
            return laid_out(function(*args, **kwargs))
        if function is F.group_norm:
            return _group_norm_on_gpu(*args, **kwargs)
        return function(*args, **kwargs)


def _group_norm_on_gpu(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: A002  torch's name
    if input.device.type != "cuda" or input.ndim not in CHANNELS_LAST:
        return F.group_norm(input, *args, **kwargs)
    return group_norm_by_channel(input, *args, **kwargs)


def group_norm_by_channel(
    input: torch.Tensor,  # noqa: A002  torch's name
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Compute `torch.nn.functional.group_norm` from sums over each channel's rows of pixels.

    input: [batch, channels, ..., width]. In channels_last a group is a few neighbours out of every pixel, which
    reads badly; rows of each channel read the map once, side by side, and no size that is a symbol has to be
    divided by. What is squared is the distance from one of the group's values: a difference of large squares would
    have no digits left (Chan, Golub and LeVeque, 1983), and a running mean costs a division for every value.
    """
    channels = input.shape[1]
    grouped, per_pixel = (num_groups, channels // num_groups), (-1, channels) + (1,) * (input.ndim - 2)
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    anchor = wide.unflatten(1, grouped).select(2, 0)
    for size in reversed(input.shape[2:]):
        anchor = anchor.select(-1, size // 2)
    squares = (wide - _by_channel(anchor, grouped).reshape(per_pixel)).square()
    # One tensor of both sums: two would be added up by two kernels.
    sums = torch.stack([values.movedim(1, -1).sum(-2) for values in (wide, squares)]).unflatten(-1, grouped)
    within = [*range(2, sums.ndim - 2), sums.ndim - 1]
    mean, square = (sums.sum(within) / (math.prod(input.shape[2:]) * grouped[1])).unbind()
    variance = (square - (mean - anchor).square()).clamp_min(0)
    scale = _by_channel(torch.rsqrt(variance + eps), grouped)
    shift = -_by_channel(mean, grouped) * scale
    if weight is not None:
        scale, shift = scale * weight, shift * weight
    if bias is not None:
        shift = shift + bias
    scale, shift = (_computed_once(factor).reshape(per_pixel) for factor in (scale, shift))
    return (wide * scale + shift).to(input.dtype)


def _by_channel(of_groups: torch.Tensor, grouped: tuple[int, int]) -> torch.Tensor:
    return of_groups.unsqueeze(-1).expand(-1, *grouped).flatten(1)


def _computed_once(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as it is. Inductor then computes it ahead, not again for each value it goes into."""
    return tensor.as_strided(tensor.shape, tensor.stride())
