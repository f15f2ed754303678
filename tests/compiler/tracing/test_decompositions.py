"""Decompositions for GPUs compute what torch's own functions do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from compiled_graphs.compiler.tracing.decompositions import (
    ForGPUs,
    LiteralTensors,
    cat_by_tokens,
    gelu_by_exponentials,
    group_norm_by_channel,
    literal_tensor,
    upsample_by_repeating,
)
from recorders import Operators, on_absent_gpu
from torch.overrides import TorchFunctionMode


@pytest.mark.parametrize("shape", [(2, 8, 5, 7), (1, 8, 1, 1), (3, 4, 2, 5, 6)])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("affine", [True, False])
def test_group_norm_by_channel_is_group_norm(shape, groups, affine):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3 + 1
    weight, bias = (torch.randn(shape[1]), torch.randn(shape[1])) if affine else (None, None)
    expected = F.group_norm(x, groups, weight, bias, 1e-6)
    torch.testing.assert_close(group_norm_by_channel(x, groups, weight, bias, 1e-6), expected, rtol=1e-5, atol=1e-5)


def test_group_norm_by_channel_is_exact_far_from_zero():
    x = torch.randn(1, 8, 64, 64, generator=torch.Generator().manual_seed(0)) + 1000
    expected = F.group_norm(x.double(), 2).float()
    torch.testing.assert_close(group_norm_by_channel(x, 2), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("far", [30.0, 1000.0])
def test_group_norm_by_channel_with_an_outlier_as_anchor(far):
    x = torch.randn(1, 8, 64, 64, generator=torch.Generator().manual_seed(0))
    x[:, :, 32, 32] += far
    expected = F.group_norm(x.double(), 2).float()
    torch.testing.assert_close(group_norm_by_channel(x, 2), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("value", [0.0, 1.0, -1e4])
def test_group_norm_by_channel_of_a_flat_map_is_flat(value):
    x = torch.full((1, 8, 16, 16), value)
    assert torch.equal(group_norm_by_channel(x, 2), torch.zeros_like(x))


def test_group_norm_by_channel_keeps_sizes_symbolic():
    class Norm(torch.nn.Module):
        def forward(self, x):
            return group_norm_by_channel(x, 2)

    auto = torch.export.Dim.AUTO
    example = torch.randn(2, 8, 6, 10)
    program = torch.export.export(Norm(), (example,), dynamic_shapes=({0: auto, 2: auto, 3: auto},), strict=False)
    (x,) = (node.meta["val"] for node in program.graph.nodes if node.op == "placeholder")
    assert [isinstance(size, int) for size in x.shape] == [False, True, False, False]
    other = torch.randn(3, 8, 7, 5)
    torch.testing.assert_close(program.module()(other), F.group_norm(other, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_group_norm_by_channel_computes_half_in_single(dtype):
    x = (torch.randn(1, 8, 32, 32, generator=torch.Generator().manual_seed(0)) * 200).to(dtype)
    result = group_norm_by_channel(x, 2)
    assert result.dtype == dtype
    torch.testing.assert_close(result, F.group_norm(x.float(), 2).to(dtype))


@pytest.mark.parametrize(
    ("shape", "factors"), [((2, 3, 5, 7), [2, 2]), ((1, 3, 4, 5, 1), [1, 2, 4]), ((1, 2, 1, 3, 2), [2, 2, 2])]
)
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_upsample_by_repeating_is_interpolate(shape, factors, mode):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    ours = upsample_by_repeating(x, factors)
    assert torch.equal(ours, F.interpolate(x, scale_factor=tuple(map(float, factors)), mode=mode))


def test_upsample_by_repeating_has_no_symbolic_floats():
    """torch 2.11 cannot compile them for a GPU where they come from a part of a map."""

    class Upsample(torch.nn.Module):
        def forward(self, x):
            return upsample_by_repeating(x[:, :, 1:], [2, 2, 2])

    auto = dict.fromkeys((2, 3, 4), torch.export.Dim.AUTO)
    example = torch.randn(1, 3, 5, 6, 7)
    program = torch.export.export(Upsample(), (example,), dynamic_shapes=(auto,), strict=False)
    program = program.run_decompositions()
    values = [node.meta.get("val") for node in program.graph.nodes]
    assert not any(isinstance(value, torch.SymFloat) for value in values)
    other = torch.randn(1, 3, 3, 4, 9)
    assert torch.equal(program.module()(other), F.interpolate(other[:, :, 1:], scale_factor=2.0))


INTERPOLATIONS = [
    ({"scale_factor": 2.0}, True),
    ({"scale_factor": 2, "mode": "nearest-exact"}, True),
    ({"scale_factor": (4.0, 1.0)}, True),
    ({"scale_factor": 1.0}, False),
    ({"scale_factor": torch.tensor(2.0).numpy()[()]}, False),
    ({"scale_factor": 3.0}, False),
    ({"scale_factor": 0.5}, False),
    ({"scale_factor": 2.0, "mode": "bilinear"}, False),
    ({"size": (8, 8)}, False),
    ({"size": (8, 8), "scale_factor": 2.0}, False),
    ({"scale_factor": 2.0, "align_corners": True}, False),
    ({"scale_factor": (2.0,)}, False),
]


class Interpolated(TorchFunctionMode):
    """Counts what is left to torch, and returns the map itself: torch cannot do it for a GPU that is not there."""

    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not F.interpolate:
            return function(*args, **kwargs or {})
        self.count += 1
        return args[0]


@pytest.mark.parametrize(("given", "repeats"), INTERPOLATIONS)
def test_interpolation_repeats_values_on_a_gpu_only(given, repeats):
    x = torch.empty(1, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    with Interpolated() as interpolated, ForGPUs(has_maps=True):
        on_gpu = F.interpolate(on_absent_gpu(x), **given)
    assert interpolated.count == (not repeats)
    assert on_gpu.is_contiguous(memory_format=torch.channels_last)
    with Interpolated() as interpolated, ForGPUs(has_maps=True):
        F.interpolate(x, **given)
    assert interpolated.count == 1


def test_nothing_is_rewritten_on_a_cpu():
    x = torch.randn(1, 8, 4, 4)
    with Operators() as operators, ForGPUs(has_maps=True):
        F.gelu(x.half())
    assert operators.names == {"_to_copy.default", "gelu.default"}
    with ForGPUs(has_maps=True):
        assert torch.equal(F.group_norm(x, 2), torch.group_norm(x, 2))
        assert F.interpolate(x, scale_factor=2.0).is_contiguous()


VALUES = torch.cat([torch.linspace(-12, 12, 24001), torch.tensor([0.0, -0.0, 1e-7, -6e4, 6e4])])


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gelu_by_exponentials_is_as_exact_as_torch(dtype, approximate):
    x = VALUES.to(dtype)
    exact = F.gelu(x.double(), approximate=approximate)
    ours, theirs = (f(x, approximate=approximate) for f in (gelu_by_exponentials, F.gelu))
    assert ours.dtype == dtype
    rounding = torch.finfo(dtype).eps * exact.abs() / 2 + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert ((ours.double() - exact).abs() <= rounding * 1.02 + 2e-7).all()
    assert (ours.double() - exact).norm() <= (theirs.double() - exact).norm() * 1.001


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_by_exponentials_at_the_limits_of_half(approximate):
    largest = torch.tensor([3e38, -3e38, float("inf")], dtype=torch.bfloat16)
    assert torch.equal(gelu_by_exponentials(largest, approximate), largest.clamp_min(0))
    assert gelu_by_exponentials(torch.tensor([float("nan")]).half(), approximate).isnan().all()


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gelu_is_rewritten_for_half_precision_on_a_gpu_only(dtype, approximate):
    with Operators() as operators, ForGPUs(has_maps=True):
        F.gelu(on_absent_gpu(torch.empty(4, dtype=dtype)), approximate=approximate)
    assert ("gelu.default" in operators.names) == (dtype is torch.float32)


def test_cat_by_tokens_is_cat_in_another_layout():
    tensors = [torch.randn(2, 3, tokens, 4) for tokens in (5, 1)]
    ours = cat_by_tokens(tensors)
    assert torch.equal(ours, torch.cat(tensors, 2))
    assert ours.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("has_maps", [False, True])
@pytest.mark.parametrize(
    ("shape", "dim", "are_heads"),
    [((2, 3, 4, 5), 2, True), ((2, 3, 4, 5), -2, True), ((2, 3, 4, 5), 1, False), ((2, 3, 4), 2, False)],
)
def test_cat_is_by_tokens_for_heads_on_a_gpu_only(shape, dim, are_heads, has_maps):
    tensors = [torch.empty(shape)] * 2
    with ForGPUs(has_maps):
        on_cpu = torch.cat(tensors, dim=dim)
        on_gpu = torch.cat([on_absent_gpu(tensors[0])] * 2, dim=dim)
    assert on_cpu.shape == on_gpu.shape
    assert on_cpu.is_contiguous()
    assert on_gpu.is_contiguous() == (has_maps or not are_heads)


@pytest.mark.parametrize(
    ("data", "options"),
    [
        ([0, 4], {"dtype": torch.uint8}),
        ([0, 2, 4, 6], {}),
        ([7], {}),
        ([3, 3], {}),
        ([5, 3, 1], {"dtype": torch.int8}),
        ([1.5, -2.0, 8], {}),
        ((1, 2.5), {"dtype": torch.float16, "device": "cpu"}),
    ],
)
def test_tensors_that_code_writes_out_are_made_in_the_graph(data, options):
    class Block(torch.nn.Module):
        def forward(self, x):
            with LiteralTensors():
                return x, torch.tensor(data, **options)

    program = torch.export.export(Block(), (torch.ones(2),), strict=False)
    assert not program.constants
    made, expected = program.module()(torch.ones(2))[1], torch.tensor(data, **options)
    assert made.dtype == expected.dtype
    assert torch.equal(made, expected)


@pytest.mark.parametrize("data", [3, [[1, 2]], [True], [], [torch.ones(())]])
def test_other_data_is_left_to_torch(data):
    assert literal_tensor(data) is None
