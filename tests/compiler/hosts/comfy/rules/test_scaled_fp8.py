from __future__ import annotations

import pytest
import torch
from compiled_graphs.compiler.hosts.comfy.rules.scaled_fp8 import multiply_weights
from torch import nn


def linear_class(fp8_matrix_mult):
    """A layer as ComfyUI builds it: its choice is in a closure."""

    class Linear(nn.Linear):
        def forward_comfy_cast_weights(self, x):
            if fp8_matrix_mult:
                raise AssertionError
            weight = self.weight.to(x.dtype)
            if weight.numel() < x.numel():
                return nn.functional.linear(x, weight * self.scale_weight.to(x.dtype), self.bias)
            return nn.functional.linear(x * self.scale_weight.to(x.dtype), weight, self.bias)

        def forward(self, x):
            return self.forward_comfy_cast_weights(x)

    return Linear


def layer(fp8_matrix_mult=False, bias=True):
    made = linear_class(fp8_matrix_mult)(4, 6, bias=bias).requires_grad_(False)
    made.scale_weight = nn.Parameter(torch.tensor(0.25), requires_grad=False)
    return made


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tokens", [1, 50])
def test_the_result_is_the_layers_own_for_small_and_large_inputs(tokens, bias):
    made = layer(bias=bias)
    made.weight.data = made.weight.data.to(torch.float8_e4m3fn)
    x = torch.randn(tokens, 4)
    expected = made(x)
    multiply_weights(nn.Sequential(made))
    assert "forward_comfy_cast_weights" in made.__dict__
    torch.testing.assert_close(made(x), expected)


def test_one_trace_serves_every_size():
    made = layer()
    multiply_weights(made)
    batch = torch.export.Dim.AUTO
    program = torch.export.export(made, (torch.randn(3, 4),), dynamic_shapes=({0: batch},), strict=False)
    for tokens in (2, 500):
        x = torch.randn(tokens, 4)
        torch.testing.assert_close(program.module()(x), made(x))


@pytest.mark.parametrize("other", [nn.Linear(4, 6), layer(fp8_matrix_mult=True)])
def test_other_layers_are_left_as_they_are(other):
    multiply_weights(other)
    assert "forward_comfy_cast_weights" not in other.__dict__
