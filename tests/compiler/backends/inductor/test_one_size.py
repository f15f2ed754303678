"""Operators that Inductor would compile for one size only."""

from __future__ import annotations

import pytest
import torch
from compiled_graphs.compiler.backends.inductor import InductorBackend, backend
from compiled_graphs.compiler.backends.inductor.one_size import refuse_one_size
from compiled_graphs.compiler.common.reason import ReasonCode, Unsupported
from compiled_graphs.compiler.common.torch_compat import FakeTensorMode, ShapeEnv
from compiled_graphs.compiler.identity.graph_spec import GraphSpec, InputSpec
from compiled_graphs.compiler.tracing.export import ExportedRegion
from networks import WIDTH, Stack, export
from torch import nn
from torch.nn import functional


class Runs(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Pools(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        if x.shape[1] < 2000:  # a guard
            x = self.linear(x)
        return x + functional.adaptive_avg_pool1d(x.transpose(1, 2), 4).mean(2)[:, None]


def exported(function, shape, open_dims=(2, 3)):
    with FakeTensorMode(shape_env=ShapeEnv()), torch.no_grad():
        x, sizes = torch.empty(shape), dict.fromkeys(open_dims, torch.export.Dim.AUTO)
        program = torch.export.export(Runs(function), (x,), dynamic_shapes={"x": sizes}, strict=False)
    inputs = (InputSpec(shape, "torch.float32", "contiguous", shape, (False,) * len(shape)),)
    return ExportedRegion(program, GraphSpec("Runs", "cpu", (), inputs, (), (), (True,), ""))


@pytest.mark.parametrize(
    ("function", "shape", "dims"),
    [
        (lambda x: functional.adaptive_avg_pool2d(x, (4, 4)), (2, 3, 40, 56), (2, 3)),
        (lambda x: functional.adaptive_avg_pool2d(x, (1, 4)), (2, 3, 40, 56), (3,)),
        (lambda x: functional.adaptive_max_pool2d(x, 4), (2, 3, 40, 56), (2, 3)),
        (lambda x: functional.adaptive_avg_pool1d(x, 4), (2, 3, 40), (2,)),
        (lambda x: functional.interpolate(x, size=(4, 4), mode="area"), (2, 3, 40, 56), (2, 3)),
        (lambda x: functional.avg_pool2d(x, 3, 2, ceil_mode=True), (2, 3, 45, 61), (2, 3)),
        (lambda x: functional.max_pool2d(x, 2, 2, ceil_mode=True), (2, 3, 45, 61), (2, 3)),
        (lambda x: torch.diagonal(x, 0, 2, 3), (2, 3, 40, 56), (2, 3)),
        (lambda x: functional.glu(x), (2, 3, 64), (2,)),
        (lambda x: functional.glu(x, 1), (2, 64, 5), (1,)),
    ],
)
def test_what_would_be_compiled_for_one_size_is_refused(function, shape, dims):
    with pytest.raises(Unsupported) as refused:
        InductorBackend().compile(exported(function, shape, dims))
    assert refused.value.reason.code is ReasonCode.ONE_SIZE
    assert refused.value.reason.detail.startswith("aten.")


@pytest.mark.parametrize(
    ("function", "shape", "dims"),
    [
        (lambda x: functional.adaptive_avg_pool2d(x, 1), (2, 3, 40, 56), (2, 3)),
        (lambda x: functional.adaptive_avg_pool2d(x, (4, 4)), (2, 3, 40, 56), (0,)),
        (lambda x: functional.avg_pool2d(x, 2, 2), (2, 3, 40, 56), (2, 3)),
        (lambda x: functional.glu(x, 1), (2, 64, 5), (2,)),
        (lambda x: functional.interpolate(x, scale_factor=2.0), (2, 3, 40, 56), (2, 3)),
    ],
)
def test_what_serves_any_size_is_not(function, shape, dims):
    refuse_one_size(exported(function, shape, dims).program.graph_module)


def test_a_size_that_the_compiler_fixed_is_in_the_contract(monkeypatch, cpp_compiler):
    """As with an operator that is not known for it."""
    monkeypatch.setattr(backend, "refuse_one_size", lambda module: None)
    region = export(Stack(Pools))
    (hints,) = (each.hints for each in region.spec.inputs)
    other = (hints[0], hints[1] + 8, hints[2])
    assert region.spec.guards
    assert region.spec_now().fits([other])
    InductorBackend().compile(region)
    assert region.spec_now().fits([hints])
    assert not region.spec_now().fits([other])
