"""GPU-friendly decompositions of torch functions, for tracing.

A compiler's own decompositions of these functions become slow GPU kernels. The results agree within the precision of
their dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from ..identity.memory_format import CHANNELS_LAST, laid_out

MAX_LITERAL = 256
"""Numbers of a list that a graph makes a tensor of by itself."""


class ForGPUs(TorchFunctionMode):
    """Replaces these functions by their decompositions while a region is traced for a GPU. On a CPU it does nothing."""

    def __init__(self, has_maps: bool) -> None:
        """`has_maps` says whether the region's inputs are feature maps, which have four dimensions like heads."""
        super().__init__()
        self._has_maps = has_maps

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.interpolate:
            return _interpolate_on_gpu(*args, **kwargs)
        if function is F.group_norm:
            return _group_norm_on_gpu(*args, **kwargs)
        if function is F.gelu:
            return _gelu_on_gpu(*args, **kwargs)
        if function is torch.cat and not self._has_maps:
            return _cat_on_gpu(*args, **kwargs)
        return function(*args, **kwargs)


class LiteralTensors(TorchFunctionMode):
    """Has a graph make the tensors that code writes out, `torch.tensor([0, 4])`. An export would make them inputs."""

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.tensor and len(args) == 1 and not kwargs.keys() - {"dtype", "device"}:
            made = literal_tensor(*args, **kwargs)
            return function(*args, **kwargs) if made is None else made
        return function(*args, **kwargs)


def literal_tensor(
    data: Any, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> torch.Tensor | None:
    """Return `torch.tensor(data)` by operators that no constant goes into; None unless it is a list of numbers.

    Numbers with equal steps between them are a range, which is what a compiler makes of them best.
    """
    if not isinstance(data, list | tuple) or not 1 <= len(data) <= MAX_LITERAL:
        return None
    if not all(type(value) in (int, float) for value in data):
        return None
    dtype = dtype or (torch.get_default_dtype() if any(type(value) is float for value in data) else torch.int64)
    step = data[1] - data[0] if len(data) > 1 else 1
    if step and all(type(v) is int and v == data[0] + i * step for i, v in enumerate(data)):
        return torch.arange(data[0], data[0] + len(data) * step, step, device=device).to(dtype)
    return torch.cat([torch.full((1,), value, dtype=dtype, device=device) for value in data])


def _interpolate_on_gpu(
    input: torch.Tensor,  # noqa: A002  torch's name
    size: Any = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    repeats = mode in ("nearest", "nearest-exact") and size is None and not any(args) and not any(kwargs.values())
    if repeats and input.device.type == "cuda" and input.ndim in CHANNELS_LAST:
        factors = _powers_of_two(scale_factor, input.ndim - 2)
        if max(factors, default=1) > 1:
            return upsample_by_repeating(input, factors)
    # torch's decomposition returns contiguous data, and every sum with it would be contiguous too.
    return laid_out(F.interpolate(input, size, scale_factor, mode, *args, **kwargs))


def _powers_of_two(factor: Any, count: int) -> list[int]:
    """Return what each side is multiplied by; nothing if a factor is no power of two, as torch rounds 1 / factor."""
    factors = factor if isinstance(factor, list | tuple) else [factor] * count
    powers = [int(f) for f in factors if isinstance(f, int | float) and f >= 1 and math.frexp(f)[0] == 0.5]
    return powers if len(powers) == len(factors) == count else []


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

    Linear layers return tokens in this layout, and so does attention. With a layout by heads in between, kernels
    would compute addresses from symbolic sizes, and read the factors of a rotary embedding once per head.
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

    input: [batch, channels, ..., width]. In channels_last, a group is a few neighbouring values of every pixel, which
    is slow to read. Sums over each channel's rows read the map once, in order, and divide by no symbolic size.
    The squares are of the distance from one of the group's values: a difference of large squares would lose all
    digits (Chan, Golub and LeVeque, 1983), and a running mean costs a division for every value.
    """
    channels = input.shape[1]
    grouped, per_pixel = (num_groups, channels // num_groups), (-1, channels) + (1,) * (input.ndim - 2)
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    anchor = wide.unflatten(1, grouped).select(2, 0)
    for size in reversed(input.shape[2:]):
        anchor = anchor.select(-1, size // 2)
    squares = (wide - _by_channel(anchor, grouped).reshape(per_pixel)).square()
    # Both sums are one tensor, because two tensors would be summed by two kernels.
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


def upsample_by_repeating(input: torch.Tensor, factors: Sequence[int]) -> torch.Tensor:  # noqa: A002
    """Compute `torch.nn.functional.interpolate` with the mode "nearest" or "nearest-exact", for powers of two.

    input: [batch, channels, ..., width]; factors: one for each size but batch and channels, not all of them 1. The
    result is in channels_last on a GPU. torch's own decomposition multiplies each index by a quotient of two sizes.
    torch 2.11 cannot compile that for a slice of a map (a KeyError in its pass `tensorify_python_scalars`).
    """
    sizes = input.shape[2:]
    pixels = input.movedim(1, -1)
    for dim in reversed(range(2, input.ndim)):
        pixels = pixels.unsqueeze(dim)
    pairs = chain.from_iterable(zip(sizes, factors, strict=True))
    repeated = pixels.expand(input.shape[0], *pairs, input.shape[1])
    larger = [size * factor for size, factor in zip(sizes, factors, strict=True)]
    return laid_out(repeated.reshape(input.shape[0], *larger, input.shape[1]).movedim(-1, 1))


def _by_channel(of_groups: torch.Tensor, grouped: tuple[int, int]) -> torch.Tensor:
    return of_groups.unsqueeze(-1).expand(-1, *grouped).flatten(1)


def _computed_once(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor unchanged, so that Inductor computes it once and not again for each use."""
    return tensor.as_strided(tensor.shape, tensor.stride())


def gelu_by_exponentials(input: torch.Tensor, approximate: str = "none") -> torch.Tensor:  # noqa: A002  torch's name
    """Compute `torch.nn.functional.gelu` for half precision, with one exponential for each value.

    CUDA's error function and hyperbolic tangent take several times as many instructions, and these dominate a
    kernel whose data is still in the cache. `approximate="tanh"` is the same function in another form. Without it,
    the error function is formula 7.1.26 of Abramowitz and Stegun: its error is at most 1.5e-7, while half precision
    rounds by a relative 5e-4.
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
