"""Operators that sync with a device are found in an ordinary call, without a capture."""

from __future__ import annotations

import pytest
import torch
from compiled_graphs.compiler.common.host import Host
from compiled_graphs.compiler.runtime.sync_detector import SyncDetector

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def found(function):
    numbers = torch.arange(6.0, device=DEVICE).reshape(2, 3)
    with SyncDetector(DEVICE) as watch:
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
def test_sync_operators_are_found(function, operator):
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
def test_other_operators_are_not_found(function):
    assert found(function) == ""


def test_sync_on_another_device_is_ignored():
    with SyncDetector(torch.device("meta")) as watch:
        torch.ones(3).sum().item()
        torch.empty(3, device="meta").sum()
    assert watch.found == ""


def test_copy_between_devices_is_a_sync():
    with SyncDetector(torch.device("meta")) as watch:
        torch.ones(3).to("meta")
    assert watch.found == "aten._to_copy"


def test_first_sync_is_kept_and_results_are_unchanged():
    with SyncDetector(DEVICE) as watch:
        numbers = torch.ones(3, device=DEVICE)
        assert numbers.sum().item() == 3
        assert numbers.nonzero().shape == (3, 1)
    assert watch.found == "aten._local_scalar_dense"


class Bytes(torch.Tensor):
    """Like the tensors of ComfyUI-GGUF, which cannot be made without these two."""

    def __init__(self, *args, kind, form):
        super().__init__()

    def __new__(cls, *args, kind, form):
        return super().__new__(cls, *args)


def test_code_that_leaves_a_class_of_tensors_behind_runs_as_without_it():
    tensor = Bytes(torch.ones(3), kind="Q8_0", form=(3,))
    with SyncDetector(torch.device("cpu")):
        plain, still = torch.Tensor(tensor), tensor + 1
    assert type(plain) is torch.Tensor
    assert type(still) is Bytes


class Careful(Host):
    """Has two operators that a capture must know of."""

    def can_be_captured(self, operator):
        return operator != "aten.mul"

    def keeps_memory_for_streams(self, operator):
        return operator == "aten.sub"


def test_an_operator_that_is_not_known_to_be_safe_is_named():
    with SyncDetector(torch.device("meta"), Careful()) as watch:
        torch.ones(3) * torch.ones(3) + 1
    assert watch.unsafe == "aten.mul"
    assert watch.found == ""
    assert not watch.runs_first


def test_an_operator_with_memory_for_each_stream_runs_first():
    with SyncDetector(torch.device("meta"), Careful()) as watch:
        torch.ones(3) - torch.ones(3)
    assert watch.runs_first
    assert not watch.unsafe
