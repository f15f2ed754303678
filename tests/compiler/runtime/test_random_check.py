from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from compiled_graphs.compiler.backends.eager.backend import EagerBackend
from compiled_graphs.compiler.common.host import Host
from compiled_graphs.compiler.compile_cache.graph_cache import GraphCache
from compiled_graphs.compiler.identity.regions import find_regions
from compiled_graphs.compiler.runtime.compiled_model import CompiledModel
from compiled_graphs.compiler.runtime.random_check import CheckResult, check_graphs
from compiled_graphs.compiler.runtime.region_kinds import Target
from networks import CPU, ConvolutionNetwork, StreamNetwork


@pytest.fixture(params=[ConvolutionNetwork, StreamNetwork])
def network(request):
    return request.param()


@pytest.fixture
def compiled(network):
    target = Target(CPU, EagerBackend(), Host())
    made = CompiledModel(network, find_regions(network), target, GraphCache())
    made.prepare(lambda weightless, at: weightless(*network.inputs(at)))
    return made


def test_graphs_agree_and_the_networks_weights_stay(compiled, network):
    before = {name: weight.clone() for name, weight in network.state_dict().items()}
    results = check_graphs(compiled)
    assert set(results) == {graph.key for graph in compiled.graphs()}
    assert set(results.values()) == {CheckResult()}
    assert all(torch.equal(weight, before[name]) for name, weight in network.state_dict().items())


def test_networks_on_the_meta_device_are_checked(compiled, network):
    network.to("meta")
    assert set(check_graphs(compiled).values()) == {CheckResult()}


def test_the_backend_is_told_that_nobody_uses_these_sizes(compiled, monkeypatch):
    entered = []

    @contextmanager
    def trial():
        entered.append(True)
        yield
        entered.append(False)

    monkeypatch.setattr(EagerBackend, "trial_context", staticmethod(trial))
    entry = compiled.graphs_by_region()[0][1]
    right = entry.graph.executable
    entry.graph = replace(entry.graph, executable=lambda *tensors: entered.append("run") or right(*tensors))
    assert set(check_graphs(compiled).values()) == {CheckResult()}
    assert (entered[0], entered[-1]) == (True, False)
    assert "run" in entered[1:-1]


def test_a_wrong_graph_is_found(compiled):
    entry = compiled.graphs_by_region()[0][1]
    right = entry.graph.executable
    entry.graph = replace(entry.graph, executable=lambda *tensors: [t + 0.5 for t in right(*tensors)])
    assert "relative error" in check_graphs(compiled)[entry.graph.key].wrong


def test_a_graph_that_does_not_run_is_wrong(compiled):
    entry = compiled.graphs_by_region()[0][1]
    entry.graph = replace(entry.graph, executable=lambda *tensors: 1 / 0)
    assert "division by zero" in check_graphs(compiled)[entry.graph.key].wrong
