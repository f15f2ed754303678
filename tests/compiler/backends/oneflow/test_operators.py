"""Each operator has the same values as in torch, and every entry of the table has a test."""

from __future__ import annotations

import math
import operator

import pytest
import torch
from compiled_graphs.compiler.backends.oneflow import OneFlowBackend
from compiled_graphs.compiler.backends.oneflow.operators import OPERATORS, NotInOneFlow
from compiled_graphs.compiler.identity.graph_spec import GraphSpec, InputSpec
from compiled_graphs.compiler.tracing import attention_op as attention
from compiled_graphs.compiler.tracing.decompositions import group_norm_by_channel
from compiled_graphs.compiler.tracing.export import ExportedRegion
from torch import nn

attention.register_operator()
DTYPES = [torch.float32, torch.float16]
aten, ours = torch.ops.aten, torch.ops.compiled_graphs


def _numbers(*shape, low=-2.0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) * (2.0 - low) + low


MAP, ROW, TOKENS = (2, 8, 5, 7), (3, 4), (2, 6, 8)
CASES = {
    "aten.view.default": (lambda x: aten.view(x, [3, 2, 2]), ROW),
    "aten.reshape.default": (lambda x: aten.reshape(x, [-1, 2]), ROW),
    "aten._unsafe_view.default": (lambda x: aten._unsafe_view(x, [4, 3]), ROW),
    "aten.permute.default": (lambda x: aten.permute(x, [0, 2, -1, 1]), MAP),
    "aten.transpose.int": (lambda x: aten.transpose(x, 1, -1), MAP),
    "aten.t.default": (lambda x: aten.t(x), ROW),
    "aten.expand.default": (lambda x: aten.expand(x, [5, -1, 4]), ROW),
    "aten.repeat.default": (lambda x: aten.repeat(x, [2, 1, 3]), ROW),
    "aten.unsqueeze.default": (lambda x: aten.unsqueeze(x, -1), ROW),
    "aten.squeeze.dims": (lambda x: aten.squeeze.dims(x, [0, -1]), (1, 3, 1, 1)),
    "aten.squeeze.dim": (lambda x: aten.squeeze.dim(x, 1), (3, 1, 1)),
    "aten.select.int": (lambda x: aten.select(x, -2, -1), MAP),
    "aten.slice.Tensor": (lambda x: (aten.slice(x, -1, 1, 9223372036854775807, 2), aten.slice(x, 3, -6, -1, 2)), MAP),
    "aten.cat.default": (lambda x, y: aten.cat([x, y], -1), ROW, (3, 2)),
    "aten.stack.default": (lambda x, y: aten.stack([x, y], 1), ROW, ROW),
    "aten.split_with_sizes.default": (lambda x: aten.split_with_sizes(x, [1, 3], 1), ROW),
    "aten.split.Tensor": (lambda x: aten.split(x, 3, 1), ROW),
    "aten.unbind.int": (lambda x: aten.unbind(x, 1), ROW),
    "aten.constant_pad_nd.default": (lambda x: aten.constant_pad_nd(x, [0, 1, 2, 0], 0.5), MAP),
    "aten.upsample_nearest2d.vec": (
        lambda x: (aten.upsample_nearest2d.vec(x, None, [2.0, 3.0]), aten.upsample_nearest2d.vec(x, [9, 8], None)),
        MAP),
    "aten.clone.default": (lambda x: aten.clone(x, memory_format=torch.contiguous_format), MAP),
    "aten.alias.default": (lambda x: aten.alias(x), ROW),
    "aten.detach.default": (lambda x: aten.detach(x), ROW),
    "aten.contiguous.default": (lambda x: aten.contiguous(x), ROW),
    "aten.as_strided.default": (lambda x: aten.as_strided(x, [3, 4], [4, 1]), ROW),
    "aten._to_copy.default": (lambda x: aten._to_copy(x, dtype=torch.int64), ROW),
    "aten.full.default": (lambda x: x + aten.full([3, 1], -0.5, dtype=x.dtype, device=x.device), ROW),
    "aten.full_like.default": (lambda x: aten.full_like(x, 3), ROW),
    "aten.arange.start_step": (lambda x: x + aten.arange.start_step(0, 8, 2, dtype=x.dtype, device=x.device), ROW),
    "aten.add.Tensor": (lambda x, y: aten.add(x, y, alpha=0.5), ROW, (4,)),
    "aten.add.Scalar": (lambda x: aten.add.Scalar(x, 1.5), ROW),
    "aten.sub.Tensor": (lambda x, y: aten.sub(x, y, alpha=2), ROW, (3, 1)),
    "aten.sub.Scalar": (lambda x: aten.sub.Scalar(x, 1.5), ROW),
    "aten.mul.Tensor": (lambda x, y: aten.mul(x, y), ROW, (4,)),
    "aten.mul.Scalar": (lambda x: aten.mul.Scalar(x, -3), ROW),
    "aten.div.Tensor": (lambda x, y: aten.div(x, y + 5), ROW, ROW),
    "aten.div.Scalar": (lambda x: aten.div.Scalar(x, 3), ROW),
    "aten.pow.Tensor_Scalar": (lambda x: (aten.pow(x, 2), aten.pow(x, 3)), ROW),
    "aten.clamp.default": (lambda x: (aten.clamp(x, -1, 1), aten.clamp(x, None, 0.5)), ROW),
    "aten.nan_to_num.default": (
        lambda x, y: (aten.nan_to_num(x / (y > 0), 0.0, 60.0, -60.0), aten.nan_to_num(x * (y > 0) / (y > 0))),
        ROW, ROW),
    "aten.where.self": (lambda x, y: aten.where(x > 0, x, y), ROW, ROW),
    "aten.relu.default": (lambda x: aten.relu(x), ROW),
    "aten.silu.default": (lambda x: aten.silu(x), ROW),
    "aten.gelu.default": (lambda x: (aten.gelu(x), aten.gelu(x, approximate="tanh")), ROW),
    "aten.mean.dim": (lambda x: (aten.mean(x, [-1], True), aten.mean(x, [2, 3])), MAP),
    "aten.sum.dim_IntList": (lambda x: (aten.sum(x, [1]), aten.sum(x, [2, -1], True)), MAP),
    "aten.var_mean.correction": (
        lambda x: (*aten.var_mean(x, [2, 3], correction=0), *aten.var_mean(x, [-1], correction=1, keepdim=True)), MAP),
    "aten._softmax.default": (lambda x: aten._softmax(x, -1, False), MAP),
    "aten.native_layer_norm.default": (
        lambda x, w, b: (aten.native_layer_norm(x, [8], w, b, 1e-5)[0],
                         aten.native_layer_norm(x, [6, 8], None, None, 1e-6)[0]),
        TOKENS, (8,), (8,)),
    "aten.rms_norm.default": (
        lambda x, w: (aten.rms_norm(x, [8], w, 1e-5), aten.rms_norm(x * 1e-3, [6, 8])), TOKENS, (8,)),
    "aten._fused_rms_norm.default": (lambda x, w: aten._fused_rms_norm(x, [8], w, 1e-5)[0], TOKENS, (8,)),
    "aten.native_group_norm.default": (
        lambda x, w, b: (aten.native_group_norm(x, w, b, 2, 8, 35, 4, 1e-5)[0],
                         aten.native_group_norm(x + 100, None, None, 2, 8, 35, 2, 1e-6)[0]), MAP, (8,), (8,)),
    "aten.mm.default": (lambda x, y: aten.mm(x, y), ROW, (4, 5)),
    "aten.bmm.default": (lambda x, y: aten.bmm(x, y), TOKENS, (2, 8, 3)),
    "aten.matmul.default": (lambda x, y: aten.matmul(x, y), TOKENS, (8, 3)),
    "aten.addmm.default": (
        lambda b, x, y: (aten.addmm(b, x, y), aten.addmm(b, x, y, beta=0.5, alpha=2)), (5,), ROW, (4, 5)),
    "aten.baddbmm.default": (
        lambda b, x, y: aten.baddbmm(b * math.nan, x, y, beta=0, alpha=0.25), (2, 6, 3), TOKENS, (2, 8, 3)),
    "aten.linear.default": (lambda x, w, b: (aten.linear(x, w, b), aten.linear(x, w)), TOKENS, (5, 8), (5,)),
    "aten.convolution.default": (
        lambda x, w, b: (aten.convolution(x, w, b, [2, 1], [1, 2], [1, 1], False, [0, 0], 1),
                         aten.convolution(x, w[:, :4], None, [1, 1], [0, 0], [1, 2], False, [0, 0], 2),
                         aten.convolution(x, w.transpose(0, 1), None, [2, 2], [1, 1], [1, 1], True, [1, 1], 1)),
        MAP, (6, 8, 3, 3), (6,)),
    "aten.scaled_dot_product_attention.default": (
        lambda q, k, v, m: (aten.scaled_dot_product_attention(q, k, v, m > -1),
                            aten.scaled_dot_product_attention(q, k, v, m, scale=0.7)),
        (2, 3, 6, 8), (2, 3, 6, 8), (2, 3, 6, 8), (6, 6)),
    "compiled_graphs.host_attention.default": (
        lambda q, k, v, m: tuple(ours.host_attention(NAME, q, k, v, 2, mask, None, False, out, "{}", True, "{}", [])
                                 for mask, out in ((None, False), (m, False), (m > -1, False), (None, True))),
        TOKENS, (2, 6, 8), (2, 6, 8), (6, 6)),
    "compiled_graphs.map_attention.default": (lambda q, k, v: ours.map_attention(MAP_NAME, q, k, v), MAP, MAP, MAP),
}  # fmt: skip
UNARY = ["abs", "cos", "erf", "exp", "log", "neg", "reciprocal", "rsqrt", "sigmoid", "sin", "sqrt", "tanh"]
CASES |= {f"aten.{name}.default": (getattr(aten, name).default, (3, 4, 2)) for name in UNARY}
CASES |= {"aten.logical_not.default": (lambda x: aten.logical_not(x > 0), ROW)}
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _compare = getattr(aten, _name)
    CASES[f"aten.{_name}.Scalar"] = (lambda x, f=_compare.Scalar: f(x.to(torch.int64), 1), ROW)
    CASES[f"aten.{_name}.Tensor"] = (lambda x, y, f=_compare.Tensor: f(x, y.expand_as(x).contiguous()), ROW, (3, 1))
POSITIVE = {"log", "rsqrt", "sqrt", "reciprocal"}
SIZE_ARITHMETIC = ["add", "sub", "mul", "floordiv", "mod", "neg", "pow", "getitem"]
BY_SIZES = ["aten.sym_size.int", *(f"_operator.{name}" for name in SIZE_ARITHMETIC)]
NAME, MAP_NAME = f"{__name__}:_attention", f"{__name__}:_map_attention"


def _attention(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False):
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    output = nn.functional.scaled_dot_product_attention(q, k, v, mask)
    return output if skip_output_reshape else output.transpose(1, 2).flatten(2)


def _map_attention(q, k, v):
    flat = [t.flatten(2).transpose(1, 2).unsqueeze(1) for t in (q, k, v)]
    return nn.functional.scaled_dot_product_attention(*flat).squeeze(1).transpose(1, 2).reshape(q.shape)


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        object.__setattr__(self, "function", function)

    def forward(self, *tensors):
        result = self.function(*tensors)
        return tuple(result) if isinstance(result, tuple | list) else (result,)


def run(function, tensors):
    program = torch.export.export(Function(function), tuple(tensors), strict=False)
    inputs = tuple(InputSpec(tuple(t.shape), str(t.dtype), "contiguous") for t in tensors)
    spec = GraphSpec("Function", str(tensors[0].device), (), inputs, (), (), (), "")
    return OneFlowBackend().compile(ExportedRegion(program, spec))(*tensors)


@pytest.mark.oneflow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_are_torchs(name, dtype):
    function, *shapes = CASES[name]
    if "rms" in name and not hasattr(aten, name.split(".")[1]):
        pytest.skip("this torch has no such operator")
    device = "cuda" if dtype is torch.float16 else "cpu"
    if device == "cuda" and (not torch.cuda.is_available() or OneFlowBackend().available(torch.device(device))):
        pytest.skip("OneFlow computes float16 on GPUs only")
    low = 0.1 if name.split(".")[1] in POSITIVE else -2.0
    tensors = [_numbers(*shape, low=low).to(device, dtype) for shape in shapes]
    expected = Function(function)(*tensors)
    bound = {"atol": 1e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    results = run(function, tensors)
    assert len(results) == len(expected)
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, **bound)


@pytest.mark.oneflow
@pytest.mark.parametrize("shape", [MAP, (2, 8, 3, 5, 7)])
def test_group_norm_as_it_is_traced_for_gpus(shape):
    tensors = [_numbers(*shape), _numbers(8), _numbers(8)]
    (result,) = run(lambda x, weight, bias: group_norm_by_channel(x, 4, weight, bias), tensors)
    torch.testing.assert_close(result, nn.functional.group_norm(tensors[0], 4, *tensors[1:]), atol=1e-5, rtol=1e-5)


def _by_sizes(x):
    height, width = x.shape[2:]
    area = (height * 2 - 1) // 3 + width % 4 - (-height) + width**2
    return aten.expand(x.mean(dim=(2, 3), keepdim=True), [2, 8, area, height])


@pytest.mark.oneflow
@pytest.mark.parametrize("function", [_by_sizes, lambda x: group_norm_by_channel(x, 4)])
def test_sizes_are_computed_with(function):
    dynamic = {2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO}
    program = torch.export.export(Function(function), (_numbers(*MAP),), dynamic_shapes=((dynamic,),), strict=False)
    spec = GraphSpec("", "cpu", (), (InputSpec(MAP, "torch.float32", "contiguous"),), (), (), (), "")
    executable = OneFlowBackend().compile(ExportedRegion(program, spec))
    for shape in (MAP, (2, 8, 4, 9)):
        x = _numbers(*shape)
        torch.testing.assert_close(executable(x)[0], function(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("place", [([4, 3], [3, 1], 0), ([3, 4], [1, 3], 0), ([2, 4], [4, 1], 4)])
def test_as_strided_in_another_order_is_refused(place):
    with pytest.raises(NotInOneFlow, match="another order"):
        OPERATORS["aten.as_strided.default"](_numbers(*ROW), *place)


def test_size_arithmetic_uses_python_operators():
    assert all(OPERATORS[name] is getattr(operator, name.removeprefix("_operator.")) for name in BY_SIZES[1:])


def test_every_operator_has_a_test():
    assert OPERATORS.keys() == {*CASES, *BY_SIZES}


@pytest.mark.oneflow
def test_long_attention_runs_in_parts():
    """For an image of 2,048 x 2,048 pixels, the scores of a VAE decoder would take 16 GB."""
    q = _numbers(1, 1, 16384, 4)
    (result,) = run(lambda q: aten.scaled_dot_product_attention(q, q, q), [q])
    torch.testing.assert_close(result, nn.functional.scaled_dot_product_attention(q, q, q))


@pytest.mark.parametrize("option", [{"dropout": 0.1}, {"is_causal": True}, {"enable_gqa": True}])
def test_unsupported_attention_options_are_refused(option):
    q = _numbers(1, 2, 4, 8)
    with pytest.raises(NotInOneFlow, match="attention with dropout"):
        OPERATORS["aten.scaled_dot_product_attention.default"](q, q, q, **option)
