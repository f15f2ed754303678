"""Functions of torch in another form, for where a compiler makes slow GPU kernels of what it knows them as.

They compute the same within what their dtype can hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from .layout import CHANNELS_LAST, laid_out


class ForGPUs(TorchFunctionMode):
    """While a region is traced for a GPU, has another form of these functions traced. On a CPU it changes nothing."""

    def __init__(self, has_maps: bool) -> None:
        """`has_maps` if what the region is called with are feature maps, which have four dimensions as heads do."""
        super().__init__()
        self._has_maps = has_maps

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.interpolate:
            # Its own decomposition returns contiguous data, and all that is added to it later follows.
            return laid_out(function(*args, **kwargs))
        if function is F.group_norm:
            return _group_norm_on_gpu(*args, **kwargs)
        if function is F.gelu:
            return _gelu_on_gpu(*args, **kwargs)
        if function is torch.cat and not self._has_maps:
            return _cat_on_gpu(*args, **kwargs)
        return function(*args, **kwargs)


def _group_norm_on_gpu(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: A002  torch's name
    if input.device.type != "cuda" or input.ndim not in CHANNELS_LAST:
        return F.group_norm(input, *args, **kwargs)
    return group_norm_by_channel(input, *args, **kwargs)


def _gelu_on_gpu(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: A002
    if input.device.type != "cuda" or input.dtype not in (torch.float16, torch.bfloat16):
        return F.gelu(input, *args, **kwargs)
    return gelu_by_exponentials(input, *args, **kwargs)


def _cat_on_gpu(tensors: Sequence[torch.Tensor], dim: int = 0, **kwargs: Any) -> torch.Tensor:
    if kwargs or dim not in (2, -2) or any(t.device.type != "cuda" or t.ndim != 4 for t in tensors):
        return torch.cat(tensors, dim, **kwargs)
    return cat_by_tokens(tensors)


def cat_by_tokens(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate [batch, heads, tokens, dim] along tokens, and lay the result out as [batch, tokens, heads, dim].

    So they come from a linear layer, and so attention returns them: laid out by heads in between, kernels would
    compute where a value lies from sizes that are symbols, and read the factors of a rotary embedding once a head.
    """
    return torch.cat([tensor.transpose(1, 2) for tensor in tensors], 1).transpose(1, 2)


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


def gelu_by_exponentials(input: torch.Tensor, approximate: str = "none") -> torch.Tensor:  # noqa: A002  torch's name
    """Compute `torch.nn.functional.gelu` for half precision, with one exponential for each value.

    The error function and the hyperbolic tangent of CUDA's library take several times the instructions, and decide
    how long a kernel takes that reads and writes what the cache still holds. `approximate="tanh"` is the same
    function in another form; without it the error function is formula 7.1.26 of Abramowitz and Stegun, which is
    1.5e-7 off at most, where half precision rounds by 5e-4 of what it holds.
    """
    wide = input.to(torch.float32)
    if approximate == "tanh":
        share = torch.sigmoid(math.sqrt(8 / math.pi) * (wide + 0.044715 * wide * wide * wide))
    else:
        share = _normal_distribution(wide)
    return (wide * share).to(input.dtype)


def _normal_distribution(x: torch.Tensor) -> torch.Tensor:
    """Return the share of a normal distribution that lies below each value."""
    distance = x.abs() * math.sqrt(0.5)
    t = 1 / (1 + 0.3275911 * distance)
    polynomial = 1.061405429 * t
    for factor in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        polynomial = (polynomial + factor) * t
    tail = 0.5 * polynomial * torch.exp(-distance * distance)
    return torch.where(x < 0, tail, 1 - tail)
