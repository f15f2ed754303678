from __future__ import annotations

import threading
from itertools import pairwise

import pytest
import torch
from compiled_graphs.compiler.backends.inductor import Artifact, artifacts, repeated_subgraphs
from compiled_graphs.compiler.backends.inductor.repeated_subgraphs import (
    MIN_REPEATS,
    RepeatedSpan,
    folded,
    tracing_once,
)
from compiled_graphs.compiler.common import torch_compat
from networks import WIDTH, ConvolutionNetwork, TransformerBlock, export, sizes, weights_of
from torch import nn
from torch._higher_order_ops.invoke_subgraph import InvokeSubgraphHOP, invoke_subgraph

DEPTH = MIN_REPEATS + 2


class Tower(nn.Module):
    """A region of several blocks, like a spatial transformer, with a layer before and after them."""

    def __init__(self, depth=DEPTH, block=TransformerBlock):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask=None):
        y = self.first(x)
        for block in self.blocks:
            y = block(y, mask)
        return x + self.last(y)


class Towers(nn.Module):
    """A network of two towers. Blocks that occur more than once in a list are regions."""

    def __init__(self, *args, **kwargs):
        super().__init__()
        self.towers = nn.ModuleList(Tower(*args, **kwargs) for _ in range(2))

    def forward(self, x):
        for tower in self.towers:
            x = tower(x)
        return x

    def inputs(self, at):
        return (torch.randn(at.batch, at.tokens, WIDTH),)


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def graph_module(network):
    return export(network).program.graph_module


def calls(module):
    return [node for node in module.graph.nodes if node.target is torch.ops.higher_order.invoke_subgraph]


def cases(network):
    return [network.inputs(at)[0] for at in (sizes(batch=2, tokens=7), sizes(batch=1, tokens=33), sizes(batch=5))]


def test_equal_blocks_of_a_region_become_one_subgraph():
    module = graph_module(Towers())
    folded_graph = folded(module)
    assert len(calls(folded_graph)) == DEPTH - 1  # the node after the last block differs
    assert len(folded_graph.graph.nodes) < len(module.graph.nodes)
    assert not calls(module)


def test_folded_graphs_match_eager_at_every_size():
    network = Towers()
    folded_graph = folded(graph_module(network))
    for x in cases(network):
        (ours,) = folded_graph(*weights_of(network.towers[1]), x)
        torch.testing.assert_close(ours, network.towers[1](x))


def test_calls_chain_and_nothing_is_computed_twice():
    folded_graph = folded(graph_module(Towers()))
    for one, other in pairwise(calls(folded_graph)):
        assert any(user.users.keys() & {other} for user in one.users)
    assert not any(node.users == {} for node in folded_graph.graph.nodes if node.op == "call_function")


class Halving(TransformerBlock):
    """The width of the middle layer differs in each block."""

    count = 0

    def __init__(self):
        super().__init__()
        Halving.count += 1
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH + Halving.count), nn.Linear(WIDTH + Halving.count, WIDTH))


class Scaling(TransformerBlock):
    """The constant that scales the result differs in each block."""

    count = 0

    def __init__(self):
        super().__init__()
        Scaling.count += 1
        self.scale = float(Scaling.count)

    def forward(self, x, mask=None):
        return super().forward(x, mask) * self.scale


class Writing(TransformerBlock):
    """Writes its result into its input."""

    def forward(self, x, mask=None):
        x += super().forward(x, mask)
        return x


@pytest.mark.parametrize("block", [Halving, Scaling, Writing])
def test_blocks_that_differ_or_write_are_left_alone(block):
    network = Tower(block=block)
    module = torch.export.export(network, (torch.randn(2, 7, WIDTH),), strict=False).graph_module
    assert folded(module) is None


def test_few_blocks_and_other_networks_are_left_alone():
    assert folded(graph_module(Towers(depth=MIN_REPEATS - 1))) is None
    assert folded(graph_module(ConvolutionNetwork())) is None


@pytest.mark.parametrize(
    ("function", "pure"),
    [
        (lambda x: x.relu(), True),
        (lambda x: (x.relu(), x.exp()), True),
        (lambda x: nn.functional.dropout(x, 0.5, training=False), False),
        (lambda x: x.view(-1), False),
        (lambda x: x.mul_(2) + 1, False),
        (lambda x: (y := x.relu(), y.view(-1)), False),
        (lambda x: x.shape[0] * 2, False),
    ],
)
def test_only_pure_stretches_become_subgraphs(function, pure):
    class Network(nn.Module):
        def forward(self, x):
            return function(x)

    x = torch.randn(3, 4)
    program = torch.export.export(Network(), (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},), strict=False)
    stretch = RepeatedSpan.of([node for node in program.graph.nodes if node.op == "call_function"])
    assert stretch.is_pure() == pure


@pytest.fixture
def asked(monkeypatch):
    """The identifiers of the subgraphs that torch traced to see whether they write to their operands."""
    asking, identifiers = InvokeSubgraphHOP.gen_schema, []

    def gen_schema(self, subgraph, identifier, *operands):
        identifiers.append(identifier)
        return asking(self, subgraph, identifier, *operands)

    monkeypatch.setattr(InvokeSubgraphHOP, "gen_schema", gen_schema)
    return identifiers


def test_only_our_subgraph_is_traced_once(asked):
    subgraph, x = torch.fx.symbolic_trace(lambda x: (x + 1,)), torch.randn(3)

    def ask(identifier):
        return invoke_subgraph.gen_schema(subgraph, identifier, x)

    before = InvokeSubgraphHOP.gen_schema
    with tracing_once():
        assert ask("repeated") is ask("repeated")
        ask("theirs"), ask("theirs")
        thread = threading.Thread(target=ask, args=("repeated",))
        thread.start()
        thread.join()
    assert InvokeSubgraphHOP.gen_schema is before
    assert asked == ["repeated", "theirs", "theirs", "repeated"]


def test_subgraphs_compile_without_a_schema_hook(take_away):
    take_away(torch_compat.invoke_subgraph_gen_schema.path)
    before = InvokeSubgraphHOP.gen_schema
    with tracing_once():
        assert InvokeSubgraphHOP.gen_schema is before
    with pytest.raises(KeyError), tracing_once():
        raise KeyError


@pytest.mark.usefixtures("cpp_compiler")
def test_inductor_compiles_and_saves_a_folded_graph(asked):
    network = Towers()
    exported = export(network)
    compiled = Artifact.compile(exported)
    assert len(asked) <= 1  # zero times if torch's cache has the artifact
    loaded = Artifact.load(compiled.to_bytes(), torch.device("cpu"))
    for x in cases(network):
        for executable in (compiled, loaded):
            (ours,) = executable(*weights_of(network.towers[1]), x)
            torch.testing.assert_close(ours, network.towers[1](x), atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("cpp_compiler")
def test_a_refused_subgraph_compiles_in_one_piece(monkeypatch):
    compiling, refused = artifacts._compiled, []

    def without_subgraphs(module):
        if calls(module):
            refused.append(module)
            raise RuntimeError("no such operator")
        return compiling(module)

    monkeypatch.setattr(artifacts, "_compiled", without_subgraphs)
    network = Towers(depth=MIN_REPEATS + 1)
    compiled = Artifact.compile(export(network))
    assert refused
    x = cases(network)[0]
    torch.testing.assert_close(
        compiled(*weights_of(network.towers[0]), x)[0], network.towers[0](x), atol=1e-4, rtol=1e-4
    )


def test_without_a_torch_name_it_compiles_in_one_piece(monkeypatch):
    compiled = []
    monkeypatch.setattr(artifacts, "_compiled", compiled.append)
    for name in ("tree_map", "free_symbols", "storage_address", "is_mutable", "invoke_subgraph"):
        exported = export(Towers())
        with monkeypatch.context() as patch:
            patch.setattr(repeated_subgraphs, name, torch_compat._Absent("Absent", (), {"path": name}))
            Artifact.compile(exported)
        assert compiled == [exported.program.graph_module]
        compiled.clear()
    Artifact.compile(exported)
    assert calls(compiled[0])
