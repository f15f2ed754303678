from __future__ import annotations

import dataclasses

import pytest
import torch
from compiled_graphs.compiler.common.reason import ReasonCode
from compiled_graphs.compiler.tracing.graph_request import GraphRequest
from compiled_graphs.compiler.tracing.shape_discovery import LARGE, SMALL
from networks import (
    ConvolutionNetwork,
    KeywordBlock,
    OptionsBlock,
    Stack,
    TransformerBlock,
    call_with,
    compile_network,
    transformer,
    variants_of,
)
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException


def symbols(network, probe=None):
    (variant,) = variants_of(network, probe) if probe else variants_of(network)
    return [[None if isinstance(size, str) else size for size in sizes] for sizes in variant.sizes]


def test_sizes_that_differ_between_calls_are_symbols():
    assert symbols(ConvolutionNetwork(channels=8)) == [[None, 8, None, None], [None, 12]]


def test_equal_blocks_want_one_graph():
    assert len(variants_of(transformer(depth=4))) == 1


def test_blocks_of_other_widths_want_other_graphs():
    class Pyramid(nn.Module):
        def __init__(self):
            super().__init__()
            self.stages = nn.ModuleList(ConvolutionNetwork(channels, depth=2).blocks for channels in (4, 8))

        def forward(self, x, emb):
            for stage, channels in zip(self.stages, (4, 8), strict=True):
                for block in stage:
                    x = block(x[:, :1].expand(-1, channels, -1, -1), emb)
            return x

        def inputs(self, sizes):
            return ConvolutionNetwork().inputs(sizes)

    assert [variant.sizes[0][1] for variant in variants_of(Pyramid())] == [4, 8]


def test_equal_blocks_run_once_for_each_kind_of_call():
    runs = []

    class Counted(OptionsBlock):
        def forward(self, x, scale=1.0, reverse=False, shift=0):
            runs.append(reverse)
            return super().forward(x, scale, reverse, shift)

    class Twice(Stack):
        def forward(self, x):
            for block in self.blocks:
                x = block(block(x), reverse=True)
            return x

    assert len(variants_of(Twice(Counted, depth=4))) == 2
    assert runs == [False, True] * 2  # at two sizes


def test_a_block_that_writes_to_a_list_runs_each_time():
    class Remembering(nn.Module):
        def __init__(self, width=16):
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, x, kept):
            kept.append(x)
            return self.linear(x)

    class Summed(Stack):
        def forward(self, x):
            kept = []
            for block in self.blocks:
                x = block(x, kept)
            assert len(kept) == len(self.blocks)
            return sum(kept)

    assert len(variants_of(Summed(Remembering, depth=3))) == 3, "each call gets a longer list"


def test_a_block_called_in_two_ways_wants_two_graphs():
    class Twice(Stack):
        def forward(self, x):
            for block in self.blocks:
                x = block(block(x), reverse=True)
            return x

    assert len(variants_of(Twice(OptionsBlock))) == 2


def test_absent_tensor_argument_needs_its_own_graph():
    masked = call_with(mask=lambda at: torch.zeros(at.batch, 1, at.tokens, at.tokens))
    assert symbols(transformer()) == [[None, None, 16]]
    assert symbols(transformer(), masked) == [[None, None, 16], [None, 1, None, None]]


def test_hints_of_symbols_differ_and_exceed_one():
    (variant,) = variants_of(ConvolutionNetwork())
    batch, _, height, width = variant.hints[0]
    assert min(batch, height, width) > 1
    assert len({batch, height, width}) == 3
    assert variant.hints[1][0] == batch


def test_second_call_is_the_example_if_sizes_collide():
    def extended(network, at):
        tokens = 2 if at == SMALL else 7
        return network(torch.randn(at.batch, tokens, 16))

    (variant,) = variants_of(transformer(), extended)
    assert variant.hints == ((LARGE.batch, 7, 16),)


def test_a_call_with_a_size_of_one_is_no_example():
    def growing(network, at):
        return network(torch.randn(at.batch, 1 if at == SMALL else 7, 16))

    (variant,) = variants_of(transformer(), growing)
    assert variant.hints == ((LARGE.batch, 7, 16),)


def test_block_with_colliding_sizes_is_left_out():
    def colliding(network, at):
        batch, tokens, others = (2, 2, 4) if at == SMALL else (3, 5, 3)
        return network(torch.randn(batch, tokens, 16), unused=torch.randn(others))

    assert variants_of(Stack(KeywordBlock), colliding) == []


def test_an_int_that_depends_on_the_sizes_is_a_size():
    def counted(network, at):
        return network(*network.inputs(at), shift=at.tokens)

    (request,) = variants_of(Stack(OptionsBlock), counted)
    assert request.hints[1:] == ((SMALL.tokens,),)
    assert request.symbolic[1:] == ((True,),)
    assert GraphRequest.noted(request.note(), request.device).signature == request.signature


@pytest.mark.parametrize(
    "scale", [lambda at: float(at.tokens), lambda at: at.tokens if at.tokens > SMALL.tokens else 1]
)
def test_a_signature_that_depends_on_the_sizes_otherwise_is_left_out(scale):
    def scaled(network, at):
        return network(*network.inputs(at), shift=at.tokens, scale=scale(at))

    assert variants_of(Stack(OptionsBlock), scaled) == []


def test_a_block_the_call_does_not_reach_is_left_out():
    class Idle(Stack):
        def forward(self, x):
            return x

    assert variants_of(Idle(OptionsBlock)) == []


def test_the_models_own_error_comes_through():
    def failing(network, at):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        variants_of(transformer(), failing)


def test_a_block_that_asks_for_values_cannot_be_probed():
    class Curious(Stack):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x

    with pytest.raises(DataDependentOutputException):
        variants_of(Curious(OptionsBlock))


def test_the_model_itself_is_neither_called_nor_touched():
    network = transformer()
    weights = list(network.parameters())
    network.register_forward_pre_hook(lambda *args: pytest.fail("the model was called"))
    network.blocks[0].forward = lambda *args: pytest.fail("the model was called")
    assert len(variants_of(network)) == 1
    assert all(a is b for a, b in zip(network.parameters(), weights, strict=True))


def test_a_model_without_storage_can_be_probed():
    assert symbols(transformer().to("meta")) == symbols(transformer())


@pytest.mark.parametrize("halvings", [0, 1, 2, 3])
def test_probe_sizes_differ_down_to_an_eighth(halvings):
    for at in (SMALL, LARGE):
        reduced = [at.batch, at.frames, at.tokens, at.height >> halvings, at.width >> halvings]
        assert len(set(reduced)) == len(reduced), (at, reduced)
    for one, other in zip(dataclasses.astuple(SMALL), dataclasses.astuple(LARGE), strict=True):
        assert one != other


class ChoosingBlock(TransformerBlock):
    """What it computes depends on values, as experts do."""

    def forward(self, x, mask=None):
        return super().forward(x, mask) * (1 if bool((x > 0).any()) else 2)


def test_a_block_that_depends_on_values_keeps_no_other_from_being_compiled(registry):
    network = transformer()
    for _ in range(2):
        network.blocks.insert(0, ChoosingBlock())
    given = [network.inputs(at) for at in (SMALL, LARGE)]
    expected = [network(*inputs) for inputs in given]
    compiled = compile_network(network, registry)
    with compiled.counters.expect(compiles=0), torch.no_grad():
        for inputs, theirs in zip(given, expected, strict=True):
            torch.testing.assert_close(network(*inputs), theirs)
    summary = compiled.summary()
    assert (summary.compiled, summary.eager) == (1, 1)
    assert {reason.code for reason in summary.reasons} == {ReasonCode.DEPENDS_ON_VALUES}
