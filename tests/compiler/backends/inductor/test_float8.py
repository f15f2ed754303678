from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from compiled_graphs.compiler.backends.eager.backend import EagerBackend
from compiled_graphs.compiler.backends.inductor import InductorBackend, backend
from compiled_graphs.compiler.backends.inductor.float8 import (
    MIN_ROWS,
    Float8Backend,
    Float8Executable,
    quantize_linears,
)
from compiled_graphs.compiler.common.compare import BOUNDS, relative_error
from compiled_graphs.compiler.common.host import Host
from compiled_graphs.compiler.compile_cache.graph_cache import GraphCache
from compiled_graphs.compiler.identity.regions import find_regions
from compiled_graphs.compiler.registry.registry import Registry
from compiled_graphs.compiler.runtime.compiled_model import CompiledModel
from compiled_graphs.compiler.runtime.region_kinds import Target
from networks import CPU, compile_network
from torch import nn

WIDTH = 1024
BACKEND = Float8Backend()
on_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or BACKEND.available(torch.device("cuda")) is not None, reason="no GPU with float8"
)


@pytest.mark.parametrize("capability", [(8, 9), (8, 6)])
def test_it_is_for_gpus_from_ada_on(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(backend, "_missing_for_cuda", lambda device: None)
    device = torch.device("cuda")
    answers = {BACKEND.loads(device), BACKEND.available(device)}
    assert len(answers) == 1
    assert ("Ada" in (answers.pop() or "")) == (capability < (8, 9))


class Layers(nn.Module):
    """A block with one layer of each kind that `quantize_linears` distinguishes."""

    def __init__(self, bias=True):
        super().__init__()
        self.wide = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.small = nn.Linear(WIDTH, 64)
        self.odd = nn.Linear(WIDTH, WIDTH + 8)
        self.modulation = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.wide(x) * (1 + self.modulation(x.mean(1))[:, None])
        return y + self.small(y).mean(-1, keepdim=True) + self.odd(y).mean(-1, keepdim=True)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Layers() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def inputs(self, at):
        return (torch.randn(at.batch, 48 * at.tokens, WIDTH, dtype=torch.float16),)


@pytest.fixture(autouse=True)
def _no_gradients():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def traced(network, rows=MIN_ROWS, dtype=torch.bfloat16):
    """Return a graph of a network in this dtype, traced with this many rows."""
    network = network.to(dtype)
    x = torch.randn(2, rows // 2, WIDTH, dtype=dtype)
    program = torch.export.export(
        network, (x,), dynamic_shapes=(dict.fromkeys((0, 1), torch.export.Dim.AUTO),), strict=False
    )
    return program.graph_module, [*network.parameters()]


def products(module):
    return [node for node in module.graph.nodes if node.target is torch.ops.aten._scaled_mm.default]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_only_large_layers_multiply_in_float8(dtype, bias):
    network = Layers(bias)
    module, weights = traced(network, dtype=dtype)
    assert quantize_linears(module) == 1
    assert len(products(module)) == 1
    for batch, tokens in ((2, 7), (1, 300), (3, 1)):
        x = torch.randn(batch, tokens, WIDTH, dtype=dtype)
        (ours,), theirs = module(*weights, x), network(x)
        assert ours.dtype == dtype
        assert ours.shape == theirs.shape
        assert 1e-3 < relative_error(ours, theirs) < BOUNDS[torch.float8_e4m3fn] / 2


def test_zero_rows_and_rows_of_any_scale_stay_accurate():
    network = Layers()
    module, weights = traced(network)
    quantize_linears(module)
    x = torch.randn(1, 4, WIDTH).to(torch.bfloat16) * torch.tensor([0, 1e-4, 1, 1e3])[None, :, None].to(torch.bfloat16)
    (ours,), theirs = module(*weights, x), network(x)
    for row in range(4):
        assert ours[0, row].isfinite().all()
        assert relative_error(ours[0, row], theirs[0, row]) < BOUNDS[torch.float8_e4m3fn] / 2


@pytest.mark.parametrize(("rows", "dtype"), [(MIN_ROWS - 2, torch.bfloat16), (MIN_ROWS, torch.float32)])
def test_few_rows_and_other_dtypes_are_left_alone(rows, dtype):
    module, _ = traced(Layers(), rows, dtype)
    assert quantize_linears(module) == 0
    assert not products(module)


class Dequantised(nn.Module):
    """A linear layer whose weight is bytes with a scale, as in a GGUF file."""

    def __init__(self, values):
        super().__init__()
        self.values, self.scale = nn.Parameter(values, requires_grad=False), nn.Parameter(torch.ones(WIDTH, 1))

    def forward(self, x):
        weight = self.values.to(x.dtype)
        return nn.functional.linear(x, weight * self.scale.to(x.dtype) if self.values.dtype == torch.int8 else weight)


@pytest.mark.parametrize(("dtype", "count"), [(torch.int8, 0), (torch.float8_e4m3fn, 1)])
def test_weights_that_the_graph_dequantises_are_not_rounded_again(dtype, count):
    values = torch.randint(-8, 8, (WIDTH, WIDTH)).to(dtype)
    x = torch.randn(2, MIN_ROWS // 2, WIDTH, dtype=torch.bfloat16)
    program = torch.export.export(Dequantised(values), (x,), strict=False)
    assert quantize_linears(program.graph_module) == count


class Rounding(EagerBackend):
    """The graph of the float8 backend, run operator by operator."""

    def __init__(self, says_so):
        self.says_so = says_so

    def compile(self, exported):
        assert quantize_linears(exported.program.graph_module)
        return Float8Executable(super().compile(exported), self.says_so)


@pytest.mark.parametrize("says_so", [True, False])
def test_the_precision_sets_the_bound_of_the_check(says_so):
    network = Network().half()
    compiled = compile_network(network, Registry(), Rounding(says_so))
    x = torch.randn(2, 40, WIDTH, dtype=torch.float16)
    for _ in range(2):
        network(x)
    assert compiled.counters.retired == (not says_so)


@pytest.mark.parametrize(("rows", "precision"), [(MIN_ROWS, torch.float8_e4m3fn), (MIN_ROWS - 2, None)])
def test_the_precision_is_saved_with_the_graph(rows, precision, monkeypatch):
    monkeypatch.setattr(InductorBackend, "compile", lambda self, exported: SimpleNamespace(to_bytes=lambda: b"graph"))
    monkeypatch.setattr(InductorBackend, "load", lambda self, data, spec: data)
    module, _ = traced(Layers(), rows)
    executable = BACKEND.compile(SimpleNamespace(program=SimpleNamespace(graph_module=module)))
    assert executable.precision == precision
    loaded = BACKEND.load(executable.to_bytes(), None)
    assert (loaded.precision, loaded._executable) == (precision, b"graph")


def test_float8_names_the_gpu_that_it_needs():
    assert BACKEND.available(CPU).startswith("Products in float8 need an NVIDIA GPU")


@on_gpu
def test_float8_is_near_eager_at_every_size_on_a_gpu():
    network = Network().half().to("cuda")
    device = next(network.parameters()).device
    expected = {tokens: torch.randn(2, tokens, WIDTH, dtype=torch.float16, device=device) for tokens in (40, 400)}
    theirs = {tokens: network(x) for tokens, x in expected.items()}
    compiled = CompiledModel(network, find_regions(network), Target(device, BACKEND, Host()), GraphCache())
    compiled.prepare(lambda weightless, at: weightless(*(x.to(device) for x in network.inputs(at))))
    for path, forward in compiled.forwards().items():
        network.get_submodule(path).forward = forward
    for tokens, x in expected.items():
        for _ in range(2):
            ours = network(x)
        assert 1e-3 < relative_error(ours, theirs[tokens]) < BOUNDS[torch.float8_e4m3fn]
    assert not compiled.counters.eager_calls
