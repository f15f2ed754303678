"""This table implements each operator of an exported graph with OneFlow.

The functions take the arguments of the aten operator of that name, with OneFlow's tensors instead of torch's. They run
while a graph is built, so sizes are plain numbers. This module imports no torch: a Python that has only OneFlow and
numpy imports it too, and a Python without OneFlow reads the table's names.
"""

from __future__ import annotations

import importlib
import json
import math
import operator
from collections.abc import Callable
from typing import Any

OPERATORS: dict[str, Callable] = {}
"""Implementations, by the name that `torch.export` gives the operator."""

ATTENTION_BYTES = 2**29
"""Bytes that the scores of one attention may take. Beyond that, queries are processed in parts."""


class _OneFlow:
    """The module `oneflow`, imported when one of its attributes is first used."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("oneflow"), name)


flow: Any = _OneFlow()


class _Functional:
    def __getattr__(self, name: str) -> Any:
        return getattr(flow.nn.functional, name)


F: Any = _Functional()


class NotInOneFlow(Exception):
    """OneFlow cannot compute an operator with these arguments. The region runs eagerly with this reason."""


def _named(*names: str) -> Callable[[Callable], Callable]:
    def enter(function: Callable) -> Callable:
        OPERATORS.update(dict.fromkeys(names, function))
        return function

    return enter


for _name in ("add", "sub", "mul", "floordiv", "mod", "neg", "pow", "getitem"):
    OPERATORS[f"_operator.{_name}"] = getattr(operator, _name)


# Sizes and places


@_named("aten.sym_size.int")
def _size(x: Any, dim: int) -> int:
    return x.shape[dim]


@_named("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default")
def _view(x: Any, size: list[int]) -> Any:
    return flow.reshape(x, tuple(size))


@_named("aten.permute.default")
def _permute(x: Any, dims: list[int]) -> Any:
    return flow.permute(x, [dim % x.dim() for dim in dims])


@_named("aten.transpose.int")
def _transpose(x: Any, one: int, other: int) -> Any:
    return flow.transpose(x, one, other)


@_named("aten.t.default")
def _t(x: Any) -> Any:
    return flow.transpose(x, 0, 1) if x.dim() == 2 else x


@_named("aten.expand.default")
def _expand(x: Any, size: list[int], implicit: bool = False) -> Any:
    return x.expand(*size)


@_named("aten.repeat.default")
def _repeat(x: Any, repeats: list[int]) -> Any:
    return x.repeat(*repeats)


@_named("aten.unsqueeze.default")
def _unsqueeze(x: Any, dim: int) -> Any:
    return flow.unsqueeze(x, dim)


@_named("aten.squeeze.dims", "aten.squeeze.dim")
def _squeeze(x: Any, dims: int | list[int]) -> Any:
    gone = {dim % x.dim() for dim in ([dims] if isinstance(dims, int) else dims)}
    return flow.reshape(x, tuple(size for dim, size in enumerate(x.shape) if dim not in gone or size != 1))


@_named("aten.select.int")
def _select(x: Any, dim: int, index: int) -> Any:
    return x[(slice(None),) * (dim % x.dim()) + (index,)]


@_named("aten.slice.Tensor")
def _slice(x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    dim %= x.dim()
    start, end, step = slice(start, end, step).indices(x.shape[dim])
    return x[(slice(None),) * dim + (slice(start, end, step),)]


@_named("aten.cat.default")
def _cat(tensors: list[Any], dim: int = 0) -> Any:
    return flow.cat(tensors, dim=dim)


@_named("aten.stack.default")
def _stack(tensors: list[Any], dim: int = 0) -> Any:
    return flow.stack(tensors, dim=dim)


@_named("aten.split_with_sizes.default")
def _split_with_sizes(x: Any, sizes: list[int], dim: int = 0) -> Any:
    return flow.split(x, sizes, dim=dim)


@_named("aten.split.Tensor")
def _split(x: Any, size: int, dim: int = 0) -> Any:
    return flow.split(x, size, dim=dim)


@_named("aten.unbind.int")
def _unbind(x: Any, dim: int = 0) -> Any:
    return [_select(x, dim, index) for index in range(x.shape[dim])]


@_named("aten.constant_pad_nd.default")
def _pad(x: Any, pad: list[int], value: float = 0.0) -> Any:
    return F.pad(x, tuple(pad), mode="constant", value=value)


@_named("aten.upsample_nearest2d.vec")
def _upsample(x: Any, size: list[int] | None, factors: list[float] | None) -> Any:
    if size is None:
        size = [int(pixels * factor) for pixels, factor in zip(x.shape[2:], factors)]
    return F.interpolate(x, size=tuple(size), mode="nearest")


@_named("aten.clone.default", "aten.alias.default", "aten.detach.default", "aten.contiguous.default")
def _same(x: Any, memory_format: None = None) -> Any:
    """Return the tensor unchanged: OneFlow chooses memory layouts itself."""
    return x


@_named("aten.as_strided.default")
def _as_strided(x: Any, size: list[int], stride: list[int], offset: int | None = None) -> Any:
    """Return a contiguous tensor unchanged: tracing marks a value that is computed once with such a call."""
    contiguous = [math.prod(x.shape[place + 1 :]) for place in range(x.dim())]
    if [*size] != [*x.shape] or [*stride] != contiguous or offset:
        raise NotInOneFlow("memory that is viewed in another order")
    return x


@_named("aten._to_copy.default")
def _to_copy(x: Any, dtype: Any = None, **placing: Any) -> Any:
    return x if dtype is None else x.to(dtype)


# Numbers


@_named("aten.full.default")
def _full(size: list[int], value: float, dtype: Any = None, device: str = "cpu", **placing: Any) -> Any:
    return flow.full(tuple(size), value, dtype=dtype or flow.float32, device=device)


@_named("aten.full_like.default")
def _full_like(x: Any, value: float, dtype: Any = None, **placing: Any) -> Any:
    return flow.full(tuple(x.shape), value, dtype=dtype or x.dtype, device=x.device)


@_named("aten.arange.start_step")
def _arange(start: int, end: int, step: int = 1, dtype: Any = None, device: str = "cpu", **placing: Any) -> Any:
    return flow.arange(start, end, step, dtype=dtype, device=device)


@_named("aten.add.Tensor", "aten.add.Scalar")
def _add(x: Any, y: Any, alpha: float = 1) -> Any:
    return x + (y if alpha == 1 else y * alpha)


@_named("aten.sub.Tensor", "aten.sub.Scalar")
def _sub(x: Any, y: Any, alpha: float = 1) -> Any:
    return x - (y if alpha == 1 else y * alpha)


@_named("aten.mul.Tensor", "aten.mul.Scalar")
def _mul(x: Any, y: Any) -> Any:
    return x * y


@_named("aten.div.Tensor", "aten.div.Scalar")
def _div(x: Any, y: Any) -> Any:
    return x / y


@_named("aten.pow.Tensor_Scalar")
def _pow(x: Any, exponent: float) -> Any:
    return x * x if exponent == 2 else flow.pow(x, exponent)


@_named("aten.clamp.default")
def _clamp(x: Any, least: float | None = None, most: float | None = None) -> Any:
    return flow.clamp(x, min=least, max=most)


@_named("aten.where.self")
def _where(condition: Any, x: Any, y: Any) -> Any:
    return flow.where(condition, x, y)


@_named("aten.nan_to_num.default")
def _nan_to_num(x: Any, nan: float | None = None, most: float | None = None, least: float | None = None) -> Any:
    largest = flow.finfo(x.dtype).max
    replacements = [(x != x, nan or 0.0)]
    replacements += [(x == float("inf"), largest if most is None else most)]
    replacements += [(x == -float("inf"), -largest if least is None else least)]
    for where, value in replacements:
        x = flow.where(where, _full_like(x, value), x)
    return x


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    OPERATORS[f"aten.{_name}.Scalar"] = OPERATORS[f"aten.{_name}.Tensor"] = getattr(operator, _name)


def _unary(name: str) -> None:
    OPERATORS[f"aten.{name}.default"] = lambda x: getattr(flow, name)(x)


for _name in ("abs", "cos", "erf", "exp", "log", "logical_not", "neg", "reciprocal", "rsqrt", "sigmoid", "sin", "sqrt"):
    _unary(_name)
_unary("tanh")


@_named("aten.relu.default")
def _relu(x: Any) -> Any:
    return F.relu(x)


@_named("aten.silu.default")
def _silu(x: Any) -> Any:
    return F.silu(x)


@_named("aten.gelu.default")
def _gelu(x: Any, approximate: str = "none") -> Any:
    return flow._C.gelu_with_approximate(x, approximate)


# Sums


@_named("aten.mean.dim")
def _mean(x: Any, dims: list[int], keepdim: bool = False, dtype: Any = None) -> Any:
    return flow.mean(_to_copy(x, dtype), dim=tuple(dims), keepdim=keepdim)


@_named("aten.sum.dim_IntList")
def _sum(x: Any, dims: list[int], keepdim: bool = False, dtype: Any = None) -> Any:
    return flow.sum(_to_copy(x, dtype), dim=tuple(dims), keepdim=keepdim)


@_named("aten.var_mean.correction")
def _var_mean(x: Any, dims: list[int], correction: float = 1, keepdim: bool = False) -> Any:
    mean = flow.mean(x, dim=tuple(dims), keepdim=True)
    count = 1
    for dim in dims:
        count *= x.shape[dim]
    spread = flow.sum((x - mean) * (x - mean), dim=tuple(dims), keepdim=keepdim)
    return spread / (count - correction), mean if keepdim else _squeeze(mean, dims)


@_named("aten._softmax.default")
def _softmax(x: Any, dim: int, to_float: bool = False) -> Any:
    return F.softmax(x.to(flow.float32) if to_float else x, dim=dim)


@_named("aten.native_layer_norm.default")
def _layer_norm(x: Any, shape: list[int], weight: Any, bias: Any, eps: float) -> Any:
    return F.layer_norm(x, tuple(shape), weight, bias, eps), None, None


@_named("aten.rms_norm.default")
def _rms_norm(x: Any, shape: list[int], weight: Any = None, eps: float | None = None) -> Any:
    wide = x if x.dtype == flow.float64 else x.to(flow.float32)
    least = (2.0**-52 if x.dtype == flow.float64 else 2.0**-23) if eps is None else eps
    dims = tuple(range(x.dim() - len(shape), x.dim()))
    y = wide * flow.rsqrt(flow.mean(wide * wide, dim=dims, keepdim=True) + least)
    return (y if weight is None else y * weight).to(x.dtype)


@_named("aten._fused_rms_norm.default")
def _fused_rms_norm(x: Any, shape: list[int], weight: Any, eps: float | None) -> Any:
    return _rms_norm(x, shape, weight, eps), None


@_named("aten.native_group_norm.default")
def _group_norm(x: Any, weight: Any, bias: Any, batch: int, channels: int, pixels: int, groups: int, eps: float) -> Any:
    grouped = flow.reshape(x.to(flow.float32), (batch, groups, -1))
    variance, mean = _var_mean(grouped, [2], correction=0, keepdim=True)
    y = flow.reshape((grouped - mean) * flow.rsqrt(variance + eps), tuple(x.shape))
    by_channel = (1, channels) + (1,) * (x.dim() - 2)
    y = y if weight is None else y * flow.reshape(weight.to(flow.float32), by_channel)
    y = y if bias is None else y + flow.reshape(bias.to(flow.float32), by_channel)
    return y.to(x.dtype), None, None


# Products


@_named("aten.mm.default", "aten.bmm.default", "aten.matmul.default")
def _matmul(x: Any, y: Any) -> Any:
    return flow.matmul(x, y)


@_named("aten.addmm.default", "aten.baddbmm.default")
def _addmm(bias: Any, x: Any, y: Any, beta: float = 1, alpha: float = 1) -> Any:
    product = flow.matmul(x, y)
    product = product if alpha == 1 else product * alpha
    if beta == 0:  # `bias` is then ignored, even where it is NaN
        return product
    return product + (bias if beta == 1 else bias * beta)


@_named("aten.linear.default")
def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    return F.linear(x, weight, bias)


@_named("aten.convolution.default")
def _convolution(
    x: Any,
    weight: Any,
    bias: Any,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Any:
    ndim = weight.dim() - 2
    same = {"stride": tuple(stride), "padding": tuple(padding), "dilation": tuple(dilation), "groups": groups}
    if transposed:
        function = getattr(F, f"conv_transpose{ndim}d")
        return function(x, weight, bias, output_padding=tuple(output_padding), **same)
    return getattr(F, f"conv{ndim}d")(x, weight, bias, **same)


# Attention


@_named("aten.scaled_dot_product_attention.default")
def _scaled_dot_product_attention(
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if dropout or is_causal or enable_gqa:
        raise NotInOneFlow("attention with dropout, a causal mask or grouped heads")
    return _attend(q, k, v, mask, scale)


@_named("compiled_graphs.host_attention.default")
def _host_attention(
    function: str,
    q: Any,
    k: Any,
    v: Any,
    heads: int,
    mask: Any,
    precision: Any,
    skip_reshape: bool,
    skip_output_reshape: bool,
    options: str,
    *for_overrides: Any,
) -> Any:
    """Compute `tracing.attention_op.opaque_attention`. Every function that a host may choose computes this."""
    if others := json.loads(options).keys() - {"low_precision_attention"}:
        raise NotInOneFlow(f"attention with {', '.join(sorted(others))}")
    if not skip_reshape:
        q, k, v = (_by_head(t, heads) for t in (q, k, v))
    if mask is not None:  # [queries, keys] or [batch, queries, keys]
        mask = flow.reshape(mask, (1,) * (4 - mask.dim()) + tuple(mask.shape)) if mask.dim() == 2 else mask
        mask = flow.unsqueeze(mask, 1) if mask.dim() == 3 else mask
    output = _attend(q, k, v, mask, None)
    if skip_output_reshape:
        return output
    return flow.reshape(flow.transpose(output, 1, 2), (q.shape[0], q.shape[2], -1))


@_named("compiled_graphs.map_attention.default")
def _map_attention(function: str, q: Any, k: Any, v: Any) -> Any:
    """Compute `tracing.attention_op.opaque_map_attention`: each pixel of [batch, channels, ...] attends to all."""
    flat = [flow.transpose(flow.reshape(t, (t.shape[0], 1, t.shape[1], -1)), 2, 3) for t in (q, k, v)]
    return flow.reshape(flow.transpose(_attend(*flat, None, None), 2, 3), tuple(q.shape))


def _by_head(x: Any, heads: int) -> Any:
    """Reshape [batch, tokens, heads * dim] or [batch, tokens, heads, dim] to [batch, heads, tokens, dim]."""
    return flow.transpose(flow.reshape(x, (x.shape[0], x.shape[1], heads, -1)), 1, 2)


def _attend(q: Any, k: Any, v: Any, mask: Any, scale: float | None) -> Any:
    """Return attention of q, k and v: [batch, heads, tokens, dim].

    The mask broadcasts to [batch, heads, queries, keys]. It is added to the scores, or if it is bool, True marks the
    keys to attend to.
    """
    batch, heads, queries, dim = q.shape
    q = q * (dim**-0.5 if scale is None else scale)
    keys = flow.transpose(k, -2, -1)
    if mask is not None and mask.dtype == flow.bool:
        mask = flow.where(mask, flow.zeros_like(mask).to(q.dtype), flow.full_like(mask.to(q.dtype), -float("inf")))
    rows = max(1, ATTENTION_BYTES // (4 * batch * heads * k.shape[-2]))
    parts = []
    for start in range(0, queries, rows):
        scores = flow.matmul(_slice(q, 2, start, start + rows), keys)
        if mask is not None:
            scores = scores + (mask if mask.shape[-2] == 1 else _slice(mask, -2, start, start + rows))
        parts.append(flow.matmul(F.softmax(scores, dim=-1), v))
    return parts[0] if len(parts) == 1 else flow.cat(parts, dim=2)
