from __future__ import annotations

import pytest
import torch
from compiled_graphs.compiler.common import compare
from compiled_graphs.compiler.common.compare import BOUNDS, disagreement, relative_error
from torch._subclasses import FakeTensorMode

NAN, INF = float("nan"), float("inf")


def off_by(error, dtype):
    theirs = torch.ones(64, 64, dtype=torch.float64)
    return [(theirs * (1 + error)).to(dtype)], [theirs.to(dtype)]


@pytest.mark.parametrize("dtype", BOUNDS)
def test_an_error_within_the_bound_of_its_dtype_agrees(dtype):
    assert disagreement(*off_by(BOUNDS[dtype] * 0.7, dtype)) is None


@pytest.mark.parametrize("dtype", BOUNDS)
def test_an_error_past_the_bound_of_its_dtype_disagrees(dtype):
    assert "relative error" in disagreement(*off_by(BOUNDS[dtype] * 1.5, dtype))


def test_coarser_dtypes_have_wider_bounds():
    precise_first = [BOUNDS[d] for d in (torch.float64, torch.float32, torch.float16, torch.bfloat16)]
    assert precise_first == sorted(precise_first)


def test_a_float8_output_is_compared_too():
    ours, theirs = off_by(1.0, torch.float8_e4m3fn)
    assert disagreement(theirs, theirs) is None
    assert disagreement(ours, theirs) is not None


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_nonfinite_graph_disagrees_with_finite_eager(value):
    assert disagreement([torch.tensor([1.0, value])], [torch.tensor([1.0, 2.0])]) is not None


@pytest.mark.parametrize("broken", [NAN, INF, -INF])
@pytest.mark.parametrize("ours", [NAN, INF, 0.0])
def test_nonfinite_eager_elements_are_not_compared(broken, ours):
    assert disagreement([torch.tensor([1.0, ours])], [torch.tensor([1.0, broken])]) is None


def test_finite_elements_still_count_beside_broken_ones():
    assert disagreement([torch.tensor([5.0, NAN])], [torch.tensor([1.0, NAN])]) is not None


def test_zeros_agree_with_zeros_and_with_nothing_else():
    zeros = torch.zeros(3)
    assert disagreement([zeros], [zeros]) is None
    assert disagreement([zeros + 1], [zeros]) is not None


@pytest.mark.parametrize("ours", [torch.ones(2, 3), torch.ones(3, 2).half(), torch.ones(6)])
def test_another_shape_or_dtype_disagrees(ours):
    assert disagreement([ours], [torch.ones(3, 2)]) is not None


def test_another_number_of_outputs_disagrees():
    assert disagreement([], [torch.ones(1)]) == "0 outputs where eager has 1"


def test_the_second_output_is_looked_at_too():
    assert disagreement([torch.ones(1), torch.ones(1)], [torch.ones(1), torch.zeros(1)]) is not None


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_integer_outputs_must_be_equal(dtype):
    theirs = torch.tensor([1, 0, 1]).to(dtype)
    assert disagreement([theirs.clone()], [theirs]) is None
    assert disagreement([1 - theirs.long() if dtype is torch.int64 else ~theirs], [theirs]) is not None


def test_half_precision_sums_do_not_overflow():
    large = torch.full((64, 64), 6e4, dtype=torch.float16)
    assert relative_error(large, large) == 0.0


def test_an_empty_output_agrees():
    assert disagreement([torch.ones(0, 3)], [torch.ones(0, 3)]) is None


def test_coarser_precision_widens_the_bound():
    theirs = torch.ones(100, dtype=torch.float16)
    ours = theirs * 1.1
    assert disagreement([ours], [theirs])
    assert disagreement([ours], [theirs], torch.float8_e4m3fn) is None
    assert disagreement([theirs * 1.5], [theirs], torch.float8_e4m3fn)


def test_complex_output_is_compared_within_the_bound():
    theirs = torch.ones(3, dtype=torch.complex64)
    assert disagreement([theirs * (1 + 1e-5)], [theirs]) is None
    assert disagreement([theirs * 1j], [theirs]) is not None


@pytest.mark.parametrize(
    ("device", "dtype", "rounds", "expected"),
    [
        ("cuda", torch.float32, True, torch.float16),
        ("cuda", torch.float32, False, torch.float32),
        ("cuda", torch.float64, True, torch.float64),
        ("cuda", torch.bfloat16, True, torch.bfloat16),
        ("cpu", torch.float32, True, torch.float32),
    ],
)
def test_float32_that_gpus_round_is_as_coarse_as_float16(monkeypatch, device, dtype, rounds, expected):
    monkeypatch.setattr(compare, "float32_precisions", lambda: ("ieee", "tf32" if rounds else "ieee"))
    with FakeTensorMode():
        assert compare.bounding_dtype(torch.empty(1, dtype=dtype, device=device), None) is expected


def test_a_coarser_precision_that_is_told_counts():
    assert compare.bounding_dtype(torch.ones(1), torch.bfloat16) is torch.bfloat16
