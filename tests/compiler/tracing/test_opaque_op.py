from __future__ import annotations

import torch
from compiled_graphs.compiler.common.torch_compat import FakeTensorMode
from compiled_graphs.compiler.tracing.opaque_op import call_by_name

ADDMM = "torch:addmm"


def test_the_function_gets_its_tensors_and_constants_by_name():
    bias, a, b = torch.ones(2), torch.ones(3, 4), torch.ones(4, 2)
    made = call_by_name(ADDMM, {"input": bias, "mat1": a, "mat2": b}, {"beta": 2}, (3, 2), torch.float32)
    assert torch.equal(made, torch.addmm(bias, a, b, beta=2))


def test_a_dtype_is_a_constant():
    made = call_by_name("torch:sum", {"input": torch.ones(3)}, {"dtype": torch.float64}, (), torch.float64)
    assert made.dtype == torch.float64


def test_fake_tensors_are_not_handed_to_the_function():
    with FakeTensorMode():
        made = call_by_name("torch:no_such_function", {"x": torch.ones(3)}, {}, (5, 2), torch.float16)
    assert (tuple(made.shape), made.dtype) == ((5, 2), torch.float16)


def test_a_graph_with_it_has_symbolic_sizes():
    class Block(torch.nn.Module):
        def forward(self, x, weight):
            return call_by_name(
                "torch.nn.functional:linear", {"input": x, "weight": weight}, {}, (x.shape[0], 2), x.dtype
            )

    arguments, sizes = (torch.ones(3, 4), torch.ones(2, 4)), ({0: torch.export.Dim.AUTO}, None)
    program = torch.export.export(Block(), arguments, dynamic_shapes=sizes, strict=False)
    x = torch.randn(7, 4)
    assert torch.equal(program.module()(x, arguments[1]), torch.nn.functional.linear(x, arguments[1]))
