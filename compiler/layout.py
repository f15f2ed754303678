"""One memory format through a graph: channels_last, in which GPU convolutions are fastest.

Left to itself a compiler takes over what the eager code does, and where one operator hands on contiguous
data, cuDNN or a pointwise kernel transposes it there and back.
"""

from __future__ import annotations

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
    """Compute `torch.nn.functional.group_norm` from the moments of each channel.

    input: [batch, channels, ..., width]. In channels_last a group is a few neighbours out of every pixel, which
    reads badly; moments of each channel in each row of pixels read the map once, side by side, and no size that
    is a symbol has to be divided by. Groups get theirs from them by Chan, Golub and LeVeque's rule (1979), which
    cancels no digits as a difference of squares would.
    """
    channels = input.shape[1]
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    variance, mean = torch.var_mean(wide.movedim(1, -1), dim=-2, correction=0)
    grouped = (num_groups, channels // num_groups)
    variance, mean = variance.unflatten(-1, grouped), mean.unflatten(-1, grouped)
    within = [*range(1, mean.ndim - 2), mean.ndim - 1]
    between, center = torch.var_mean(mean, dim=within, correction=0)
    spread = variance.mean(within) + between
    scale, center = ((t.unsqueeze(-1).expand(-1, *grouped).flatten(1)) for t in (torch.rsqrt(spread + eps), center))
    shift = -center * scale
    if weight is not None:
        scale, shift = scale * weight, shift * weight
    if bias is not None:
        shift = shift + bias
    pixels = (-1, channels) + (1,) * (input.ndim - 2)
    return (wide * _computed_once(scale).reshape(pixels) + _computed_once(shift).reshape(pixels)).to(input.dtype)


def _computed_once(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as it is. Inductor then computes it ahead, not again for each value it goes into."""
    return tensor.as_strided(tensor.shape, tensor.stride())
