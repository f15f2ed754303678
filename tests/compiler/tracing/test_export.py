from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from compiled_graphs.compiler.common.host import Host
from compiled_graphs.compiler.common.reason import Unsupported
from compiled_graphs.compiler.common.tensor_slots import tensor_slots
from compiled_graphs.compiler.identity.graph_spec import element_limit
from compiled_graphs.compiler.tracing import decompositions as gpu_functions
from compiled_graphs.compiler.tracing import export as export_module
from compiled_graphs.compiler.tracing.decompositions import cat_by_tokens
from compiled_graphs.compiler.tracing.export import _index_limits, export_region
from networks import (
    ConvolutionNetwork,
    DictBlock,
    HostedBlock,
    PairBlock,
    Stack,
    StreamNetwork,
    TransformerBlock,
    call_with,
    export,
    said,
    transformer,
    variants_of,
    weights_of,
)
from torch import nn


def shapes(*sizes):
    return [torch.Size(size) for size in sizes]


def run(exported, block, *inputs):
    outputs = exported.program.graph_module(*weights_of(block), *inputs)
    return exported.spec.rebuild([output for output in outputs if output is not None])


def test_graph_takes_any_weights_and_sizes():
    exported = export(ConvolutionNetwork())
    for batch, height, width in ((1, 5, 9), (4, 8, 8)):
        block = ConvolutionNetwork(depth=1).blocks[0]
        x, emb = torch.randn(batch, 8, height, width), torch.randn(batch, 12)
        torch.testing.assert_close(run(exported, block, x, emb), block(x, emb))


def test_weights_are_inputs_and_nothing_is_a_constant():
    exported = export(transformer())
    block = TransformerBlock()
    assert exported.spec.weight_names == tuple(name for name, _ in tensor_slots(block))
    assert set(exported.spec.weight_names) == {name for name, _ in block.named_parameters()}
    placeholders = [node for node in exported.program.graph.nodes if node.op == "placeholder"]
    assert len(placeholders) == len(exported.spec.weights) + len(exported.spec.inputs)
    assert not exported.program.constants
    assert not exported.program.state_dict


class Keeping(TransformerBlock):
    """Remembers what it was called with, and computes with it the next time."""

    def __init__(self):
        super().__init__()
        self.kept = {}

    def forward(self, x, mask=None):
        before = self.kept.get("x", x)
        self.kept["x"] = x
        return super().forward(x + before.mean(), mask)


def test_a_tensor_that_an_earlier_run_left_in_the_block_is_named():
    with pytest.raises(Unsupported, match=r"outside parameters and buffers \("):
        export(Stack(Keeping))


LEVELS = torch.tensor([1.0, 2.0])


class Leveled(TransformerBlock):
    def forward(self, x, mask=None):
        return super().forward(x, mask) * LEVELS[1]


def test_a_block_that_computes_with_a_table_says_so():
    with pytest.raises(Unsupported, match="a table that its code reads"):
        export(Stack(Leveled))


def test_weights_are_described_as_they_lie():
    network = ConvolutionNetwork().to(memory_format=torch.channels_last)
    described = {weight.name: weight for weight in export(network).spec.weights}
    conv = network.blocks[0].conv.weight
    assert (described["conv.weight"].shape, described["conv.weight"].stride) == (tuple(conv.shape), conv.stride())


def test_a_size_shared_by_inputs_is_one_symbol():
    spec = export(ConvolutionNetwork()).spec
    assert spec.fits(shapes((5, 8, 7, 9), (5, 12)))
    assert not spec.fits(shapes((5, 8, 7, 9), (4, 12)))


def test_assumption_of_the_trace_becomes_a_guard():
    class Halves(TransformerBlock):
        def forward(self, x):
            top, bottom = x.unflatten(1, (2, -1)).unbind(1)
            return super().forward(x) if x.shape[1] > 1000 else torch.cat([bottom, top], 1)

    spec = export(Stack(Halves), lambda network, at: network(torch.randn(at.batch, 2 * at.tokens, 16))).spec
    assert spec.fits(shapes((2, 8, 16)))
    assert not spec.fits(shapes((2, 9, 16)))
    assert not spec.fits(shapes((2, 1002, 16)))


def test_gpu_graph_refuses_tensors_beyond_32_bit_indices():
    exported = export(ConvolutionNetwork())
    spec = replace(exported.spec, guards=_index_limits(exported.program))
    side = 2**14
    for batch, height, fits in ((1, side // 2, True), (2, side // 2, False), (1, side - 1, True), (1, side, False)):
        size = shapes((batch, 8, height, side), (batch, 12))
        assert exported.spec.fits(size)
        assert spec.fits(size) == fits
        assert spec.is_exceeded_by(size) != fits


@pytest.mark.parametrize(("guard", "reason"), [("1 < 0", "sizes outside"), (element_limit("2**31"), "more than 2,147")])
def test_a_graph_that_does_not_fit_its_own_example_is_refused(monkeypatch, guard, reason):
    monkeypatch.setattr(export_module, "_guards", lambda inputs, count: (guard,))
    with pytest.raises(Unsupported, match=reason):
        export(ConvolutionNetwork())


@pytest.mark.parametrize(("network", "mutated"), [(StreamNetwork(), (0,)), (transformer(), ())])
def test_inputs_that_a_region_writes_to_are_known(network, mutated):
    assert export(network).spec.mutated == mutated


def test_outputs_that_are_none_are_known():
    assert export(StreamNetwork()).spec.outputs == (True, True, False)


def test_a_result_of_dicts_and_tuples_keeps_its_structure():
    class Dicts(Stack):
        def forward(self, x):
            for block in self.blocks:
                x = block(x)["sum"]
            return x

    exported, block, x = export(Dicts(DictBlock)), DictBlock(), torch.randn(2, 3, 16)
    ours, theirs = run(exported, block, x), block(x)
    assert ours.keys() == theirs.keys()
    assert ours["nothing"] is None
    assert isinstance(ours["pair"], tuple)
    assert torch.equal(ours["pair"][1][0], theirs["pair"][1][0])


def test_the_region_keeps_its_weights_and_attributes():
    network = transformer()
    before = [(name, id(weight), weight.clone()) for name, weight in network.named_parameters()]
    export(network)
    after = dict(network.named_parameters())
    assert all(id(after[name]) == identity and torch.equal(after[name], value) for name, identity, value in before)


def test_a_region_without_storage_can_be_exported():
    assert export(transformer().to("meta")).spec == export(transformer()).spec


def test_a_zero_size_parameter_is_an_input_as_well():
    network = transformer()
    for block in network.blocks:
        block.register_parameter("unused", nn.Parameter(torch.empty(0, 4)))
    assert "unused" in [weight.name for weight in export(network).spec.weights]


class Altered(TransformerBlock):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(1))


class Counting(Altered):
    def forward(self, x):
        self.steps.add_(1)
        return super().forward(x)


class Measured(TransformerBlock):
    def forward(self, x):
        return super().forward(x), 3

    def __call__(self, x):
        return super().__call__(x)[0]


def test_a_region_that_writes_to_its_weights_is_refused():
    with pytest.raises(Unsupported, match="writes to its own weights"):
        export(Stack(Counting))


def test_a_region_that_returns_a_number_is_refused():
    with pytest.raises(Unsupported, match="something besides tensors and None"):
        export(Stack(Measured))


def test_a_tensor_outside_of_the_weights_is_refused_by_name():
    network = transformer()
    for block in network.blocks:
        block.mlp[0].scale = torch.ones(1)
    with pytest.raises(Unsupported, match=r"outside parameters and buffers \(mlp\.0\.scale\)"):
        export(network)


def test_context_argument_is_the_hosts_placeholder():
    asked = []

    class Program(Host):
        context_arguments = frozenset({"host_options"})

        def placeholder_for(self, name, strings, patch_points):
            asked.append((name, "block_patches" in strings))
            return {"block_patches": [torch.neg]}

    network = Stack(HostedBlock)
    (variant,) = variants_of(network, call_with(host_options={"block_patches": []}), Program())
    exported = export_region(variant, Program())
    x = torch.randn(2, 3, 16)
    assert set(asked) == {("host_options", True)}
    torch.testing.assert_close(run(exported, network.blocks[0], x), -network.blocks[0].linear(x))


def test_a_size_that_differs_between_inputs_stays_two_symbols():
    spec = export(Stack(PairBlock), lambda network, at: network(*network.inputs(at), torch.randn(at.batch, 1, 16))).spec
    assert spec.fits(shapes((2, 7, 16), (2, 1, 16)))
    assert not spec.fits(shapes((2, 7, 16), (2, 7, 16)))


class Caching(TransformerBlock):
    """Stores its input in a list of the caller's, as video decoders do between frames."""

    def forward(self, x, cache):
        cache[0] = x
        return super().forward(x)


class Popping(TransformerBlock):
    def forward(self, x, cache):
        return super().forward(x + cache.pop())


@pytest.mark.parametrize("block", [Caching, Popping])
def test_region_that_writes_to_a_given_list_is_refused(block):
    def call_cached(network, at):
        (x,) = network.inputs(at)
        for child in network.blocks:
            x = child(x, [torch.zeros_like(x)])

    with pytest.raises(Unsupported, match="writes to a list"):
        export(Stack(block), call_cached)


class JoiningBlock(nn.Module):
    """Relies on the layout of `torch.cat`'s result, which the decomposition for GPUs changes."""

    def __init__(self, width=16):
        super().__init__()
        self.linear = nn.Sequential(nn.Linear(width, width))

    def forward(self, x):
        heads = torch.cat([x.unflatten(2, (2, -1)).transpose(1, 2)] * 2, 2)
        return self.linear(heads.view(x.shape[0], -1, x.shape[2]))


def joined_by_tokens(monkeypatch):
    """Have traces on a CPU use the decomposition that traces for GPUs use."""
    monkeypatch.setattr(gpu_functions, "_cat_on_gpu", lambda tensors, dim: cat_by_tokens(tensors))


def test_failing_decomposition_is_left_out(monkeypatch, caplog):
    caplog.set_level("INFO")
    joined_by_tokens(monkeypatch)
    exported, block, x = export(Stack(JoiningBlock)), JoiningBlock(), torch.randn(3, 5, 16)
    torch.testing.assert_close(run(exported, block, x), block(x))
    assert "JoiningBlock (blocks.0) is traced with torch's own functions" in said(caplog)[0]


def test_untraceable_code_raises_its_own_error(monkeypatch):
    class Failing(JoiningBlock):
        def forward(self, x):
            super().forward(x)
            raise ZeroDivisionError

    joined_by_tokens(monkeypatch)
    (variant,) = variants_of(Stack(JoiningBlock))
    with pytest.raises(ZeroDivisionError):
        export_region(replace(variant, module=Failing()), Host())
