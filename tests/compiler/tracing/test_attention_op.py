from __future__ import annotations

import functools

import pytest
import torch
from compiled_graphs.compiler.common.reason import Unsupported
from compiled_graphs.compiler.tracing.attention_op import (
    by_tokens,
    given_attention,
    opaque_attention,
    opaque_map_attention,
    register_operator,
)
from networks import Stack, compile_network, export, host_attention, host_map_attention
from recorders import Operators, on_absent_gpu
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

HEADS, DIM = 2, 8
LAYOUTS = [(False, False), (True, False), (False, True), (True, True)]


def queries(tokens, skip_reshape, dtype=torch.float32):
    shape = (3, HEADS, tokens, DIM) if skip_reshape else (3, tokens, HEADS * DIM)
    return torch.randn(shape, dtype=dtype)


def options(skip_reshape, skip_output_reshape):
    return {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}


class OpaqueBlock(nn.Module):
    def __init__(self, width=HEADS * DIM):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        return x + opaque_attention(host_attention, *self.qkv(x).chunk(3, 2), HEADS)


def operators(program):
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("masked", [False, True])
def test_the_operator_computes_what_the_function_does(layout, masked):
    q, k, v = queries(5, layout[0]), queries(7, layout[0]), queries(7, layout[0])
    mask = torch.randn(5, 7) if masked else None
    ours = opaque_attention(host_attention, q, k, v, HEADS, mask, **options(*layout))
    assert torch.equal(ours, host_attention(q, k, v, HEADS, mask, **options(*layout)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_operator_predicts_the_shape(layout):
    q, k, v = queries(5, layout[0]), queries(7, layout[0]), queries(7, layout[0])
    real = opaque_attention(host_attention, q, k, v, HEADS, **options(*layout))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (q, k, v)]
        predicted = opaque_attention(host_attention, *fakes, HEADS, **options(*layout))
    assert (predicted.shape, predicted.stride(), predicted.dtype) == (real.shape, real.stride(), real.dtype)


def test_by_tokens_gives_the_memory_order_of_the_output():
    q = queries(5, skip_reshape=True)
    ours = by_tokens(q)
    assert torch.equal(ours, q)
    assert ours.transpose(1, 2).is_contiguous()
    packed = torch.randn(3, 5, 3 * HEADS, DIM).transpose(1, 2)[:, :HEADS]
    assert by_tokens(packed) is packed


@pytest.mark.parametrize(("layout", "is_changed"), zip(LAYOUTS, [False, True, False, False], strict=True))
def test_queries_are_by_tokens_where_a_gpu_returns_tokens(layout, is_changed):
    q = on_absent_gpu(queries(5, layout[0]))
    with Operators() as operators:
        opaque_attention(host_attention, q, q, q, HEADS, **options(*layout))
    assert ("clone.default" in operators.names) == is_changed


def feature_map(layout):
    square = torch.randn(2, 8, 6, 6)
    if layout == "rows":  # a third layout, which hosts cannot view
        return torch.randn(2, 6, 8, 6).transpose(1, 2)
    return square.contiguous(memory_format=getattr(torch, layout))


@pytest.mark.parametrize("layout", ["contiguous_format", "channels_last", "rows"])
def test_map_attention_keeps_and_predicts_the_layout(layout):
    q, k, v = (feature_map(layout) for _ in range(3))
    attend = opaque_map_attention(host_map_attention)
    ours = attend(q, k, v)
    torch.testing.assert_close(ours, host_map_attention(*(t.contiguous() for t in (q, k, v))))
    with FakeTensorMode() as mode:
        predicted = attend(*[mode.from_tensor(t) for t in (q, k, v)])
    assert (predicted.shape, predicted.stride(), predicted.dtype) == (ours.shape, ours.stride(), ours.dtype)


def test_map_attention_without_a_name_is_left_unchanged():
    def local(q, k, v):
        return q

    assert opaque_map_attention(local) is local


def test_queries_may_have_a_dimension_for_heads():
    q = torch.randn(3, 5, HEADS, DIM)
    with FakeTensorMode() as mode:
        predicted = opaque_attention(host_attention, *[mode.from_tensor(q)] * 3, HEADS)
    assert predicted.shape == opaque_attention(host_attention, q, q, q, HEADS).shape == (3, 5, HEADS * DIM)


def test_the_output_has_the_dtype_of_the_queries():
    q, k, v = (queries(5, False, torch.bfloat16) for _ in range(3))
    assert opaque_attention(host_attention, q, k, v, HEADS, attn_precision=torch.float32).dtype is torch.bfloat16


def test_the_operator_can_be_registered_again():
    register_operator()
    register_operator()
    assert hasattr(torch.ops.compiled_graphs, "host_attention")


def test_traced_region_calls_the_operator():
    assert "compiled_graphs.host_attention.default" in operators(export(Stack(OpaqueBlock)).program)


def test_a_region_with_opaque_attention_serves_every_size(registry):
    network = Stack(OpaqueBlock)
    x = [torch.randn(batch, tokens, HEADS * DIM) for batch, tokens in ((2, 7), (1, 33))]
    expected = [network(t) for t in x]
    compiled = compile_network(network, registry)
    with compiled.counters.expect(compiles=0, retired=0):
        for ours, theirs in zip([network(t) for t in x], expected, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert not compiled.counters.eager_calls


def traced_operators(function, **extras):
    class Block(OpaqueBlock):
        def forward(self, x):
            return x + opaque_attention(function, *self.qkv(x).chunk(3, 2), HEADS, **extras)

    return operators(export(Stack(Block)).program)


def test_function_without_a_name_is_traced_through():
    def local(q, k, v, heads, mask, precision, skip_reshape, skip_output_reshape, **_):
        return q + v

    assert "compiled_graphs.host_attention.default" not in traced_operators(local)


def test_a_function_with_the_name_of_another_is_traced_through():
    @functools.wraps(host_attention)
    def doubled(q, k, v, heads, mask, *_, **__):
        return 2 * (q + k)

    assert "compiled_graphs.host_attention.default" not in traced_operators(doubled)


def test_a_function_whose_wrapper_has_its_name_is_called_by_that(monkeypatch):
    import networks

    @functools.wraps(host_attention)
    def wrapper(*args, **options):
        return host_attention(*args, **options)

    monkeypatch.setattr(networks, host_attention.__name__, wrapper)
    assert "compiled_graphs.host_attention.default" in traced_operators(host_attention)


def test_options_that_are_no_plain_values_are_traced_through():
    assert "compiled_graphs.host_attention.default" not in traced_operators(host_attention, bias=[1])


def test_plain_options_reach_the_function(monkeypatch):
    import networks

    seen, q = [], queries(5, False)

    @functools.wraps(host_attention)
    def noting(*arguments, **given):
        seen.append(given)
        return host_attention(*arguments, **given)

    monkeypatch.setattr(networks, "host_attention", noting)
    opaque_attention(host_attention, q, q, q, HEADS, low_precision_attention=False, scale=0.5, nothing=None)
    assert {"low_precision_attention": False, "scale": 0.5}.items() <= seen[0].items()
    assert "nothing" not in seen[0]


def test_bookkeeping_and_options_that_are_none_stay_opaque():
    extras = {"transformer_options": {"a": 1}, "low_precision": None}
    assert "compiled_graphs.host_attention.default" in traced_operators(host_attention, **extras)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_given_function_gets_its_options_and_its_shape_is_foreseen(layout):
    q, k, v = queries(5, layout[0]), queries(7, layout[0]), queries(7, layout[0])
    mask, call = torch.randn(5, 7), given_attention(f"{host_attention.__module__}:host_attention")
    ours = call(q, k, v, HEADS, mask, attn_precision=torch.float32, **options(*layout))
    assert torch.equal(ours, host_attention(q, k, v, HEADS, mask, **options(*layout)))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (q, k, v)]
        predicted = call(*fakes, HEADS, **options(*layout))
    assert (predicted.shape, predicted.stride(), predicted.dtype) == (ours.shape, ours.stride(), ours.dtype)
    with pytest.raises(Unsupported, match="with other options"):
        call(q, k, v, HEADS, transformer_options={})


def test_grouped_heads_that_are_not_split_yet_are_traced_through():
    assert "compiled_graphs.host_attention.default" not in traced_operators(host_attention, enable_gqa=True)
