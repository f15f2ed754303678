"""Operators that wait for a device, noticed without a recording of them."""

from __future__ import annotations

import pytest
import torch
from compiled_graphs.compiler.waits import WaitWatch

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def found(function):
    numbers = torch.arange(6.0, device=DEVICE).reshape(2, 3)
    with WaitWatch(DEVICE) as watch:
        function(numbers)
    return watch.found


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: float(x[0, 0]), "_local_scalar_dense"),
        (lambda x: 1 if x.any() else 0, "_local_scalar_dense"),
        (lambda x: x[x > 1], "index"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: torch.equal(x, x), "equal"),
        (lambda x: x.unique(), "_unique2"),
        (lambda x: x.repeat_interleave((x[0] + 1).long(), 1), "repeat_interleave"),
    ],
)
def test_operators_whose_values_python_needs(function, operator):
    assert found(function) == f"aten.{operator}"


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x @ x.T + 1,
        lambda x: x[:, torch.tensor([0, 2], device=x.device)] if x.device.type == "cpu" else x[:, ::2],
        lambda x: torch.where(x > 1, x, 0),
        lambda x: x.half().float().contiguous(),
        lambda x: torch.cat([x, torch.zeros_like(x)]).masked_fill(torch.ones(4, 3, device=x.device) > 0, 2),
        lambda x: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    ],
)
def test_operators_that_do_not_wait(function):
    assert found(function) == ""


def test_what_happens_on_another_device_is_nobodys_business():
    with WaitWatch(torch.device("meta")) as watch:
        torch.ones(3).sum().item()
        torch.empty(3, device="meta").sum()
    assert watch.found == ""


def test_a_copy_from_one_device_to_another():
    with WaitWatch(torch.device("meta")) as watch:
        torch.ones(3).to("meta")
    assert watch.found == "aten._to_copy"


def test_the_first_is_kept_and_results_are_the_operators():
    with WaitWatch(DEVICE) as watch:
        numbers = torch.ones(3, device=DEVICE)
        assert numbers.sum().item() == 3
        assert numbers.nonzero().shape == (3, 1)
    assert watch.found == "aten._local_scalar_dense"
