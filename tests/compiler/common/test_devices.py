from __future__ import annotations

import pytest
import torch
from compiled_graphs.compiler.common.devices import is_another, with_number


def test_a_gpu_without_a_number_is_the_current_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert with_number(torch.device("cuda")) == torch.device("cuda", 3)
    assert with_number(torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert with_number(torch.device("cpu")) == torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "own", "expected"),
    [
        ("cuda:1", "cuda:0", True),
        ("cuda:0", "cuda:0", False),
        ("cuda", "cuda:1", False),
        ("cpu", "cuda:0", False),
        ("cpu", "cpu:0", False),
    ],
)
def test_a_device_is_another_by_its_number(device, own, expected):
    assert is_another(torch.device(device), torch.device(own)) is expected
