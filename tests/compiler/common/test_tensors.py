from __future__ import annotations

import torch
from compiled_graphs.compiler.common.tensors import tensors_in


def test_nested_tensors_come_in_order():
    one, two, three = (torch.full((1,), float(number)) for number in (1, 2, 3))
    found = tensors_in((one, [None, {"a": two, "b": ("text", three)}], 4))
    assert [tensor.item() for tensor in found] == [1.0, 2.0, 3.0]


def test_values_without_tensors_have_none():
    assert tensors_in((1, ["text"], {"a": None})) == []
