from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from compiled_graphs.compiler.common.reason import Unsupported
from compiled_graphs.compiler.identity.call_signature import (
    TENSOR,
    Call,
    bind,
    call_forward,
    covers,
    graph_key,
    parse,
    read,
    size_places,
    with_sizes,
)
from networks import KeywordBlock, OptionsBlock, StreamBlock, TransformerBlock
from torch import nn
from torch._subclasses import FakeTensorMode

ENVIRONMENT = {"backend": "eager", "torch": "2.8"}


def tokens(batch=2, count=7, dtype=torch.float32):
    return torch.zeros(batch, count, 16, dtype=dtype)


def signature(block, *args, **kwargs):
    return read(bind(block, args, kwargs, frozenset()))[0]


def key(block, *args, sizes=(None, None, 16), environment=ENVIRONMENT, identity="block", **kwargs):
    return graph_key(identity, signature(block, *args, **kwargs), [list(sizes)], environment)


def test_positional_and_keyword_calls_have_one_key():
    x, mask = tokens(), torch.zeros(2, 1, 7, 7)
    assert key(TransformerBlock, x, mask) == key(TransformerBlock, mask=mask, x=x)


def on(*devices):
    """Return fake tensors on these devices, which need not be there."""
    with FakeTensorMode():
        return [torch.empty(2, 7, 16, device=device) for device in devices]


def text_of(*devices):
    x, *rest = on(*devices)
    call = Call({"x": x, "more": {"rest": rest}}, {})
    return read(call, fake=True)[0].text


def test_gpus_of_a_kind_have_one_signature():
    assert text_of("cuda:0", "cpu", "cuda:0") == text_of("cuda:1", "cpu", "cuda:1")
    assert text_of("cpu", "cuda:0") == text_of("cpu", "cuda:1")


def test_where_tensors_are_is_in_the_signature():
    texts = {
        text_of(*devices)
        for devices in [
            ("cuda:0", "cuda:0"),
            ("cuda:0", "cpu"),
            ("cpu", "cuda:0"),
            ("cpu", "cpu"),
            ("cuda:0", "cuda:1"),
        ]
    }
    assert len(texts) == 5


def test_explicit_default_has_the_same_key():
    assert key(OptionsBlock, tokens()) == key(OptionsBlock, tokens(), 1.0, shift=0)


def test_symbolic_sizes_are_not_in_the_key():
    assert key(TransformerBlock, tokens(2, 7)) == key(TransformerBlock, tokens(5, 900))


@pytest.mark.parametrize(
    "changed",
    [
        lambda: key(TransformerBlock, tokens(), torch.zeros(2, 1, 7, 7)),
        lambda: key(TransformerBlock, tokens(dtype=torch.float16)),
        lambda: key(TransformerBlock, tokens()[0]),
        lambda: key(TransformerBlock, tokens().to("meta")),
        lambda: key(TransformerBlock, tokens(), sizes=(None, None, 32)),
        lambda: key(TransformerBlock, tokens(), sizes=(2, None, 16)),
        lambda: key(TransformerBlock, tokens(), environment=ENVIRONMENT | {"torch": "2.9"}),
        lambda: key(TransformerBlock, tokens(), environment=ENVIRONMENT | {"backend": "inductor"}),
        lambda: key(TransformerBlock, tokens(), identity="another block"),
    ],
    ids=["tensor for None", "dtype", "rank", "device", "static size", "symbol", "version", "backend", "fingerprint"],
)
def test_key_changes_with_what_the_graph_depends_on(changed):
    assert changed() != key(TransformerBlock, tokens())


@pytest.mark.parametrize("change", [{"scale": 2.0}, {"scale": 1}, {"reverse": True}, {"shift": 1}, {"shift": False}])
def test_a_static_value_and_its_type_are_part_of_the_key(change):
    assert key(OptionsBlock, tokens(), **change) != key(OptionsBlock, tokens())


def test_extra_keywords_are_part_of_the_key_in_any_order():
    x, bias, other = tokens(), tokens(), tokens()
    assert key(KeywordBlock, x, bias=bias, other=other) == key(KeywordBlock, x, other=other, bias=bias)
    assert key(KeywordBlock, x, bias=bias) != key(KeywordBlock, x, other=bias)


def test_tensors_come_in_the_order_of_the_signature():
    image, text = tokens(count=3), tokens(count=5)
    _, tensors = read(bind(StreamBlock, (), {"text": text, "image": image}, frozenset()))
    assert tensors[0] is image
    assert tensors[1] is text


def test_nested_arguments_are_read_and_filled_in_again():
    first, second = tokens(), tokens()
    found, tensors = read(bind(KeywordBlock, (first,), {"bias": [{"a": second}, None, 3]}, frozenset()))
    assert [leaf is TENSOR for leaf in found.leaves] == [True, True, False, False]
    assert found.fill(tensors)["extras"]["bias"] == [{"a": second}, None, 3]


def test_context_arguments_are_kept_by_name_only():
    options = object()
    bound = bind(KeywordBlock, (tokens(),), {"options": options}, frozenset({"options", "absent"}))
    assert bound.context == {"options": options}
    assert "options" not in bound.arguments["extras"]
    assert read(bound)[0].context == ("options",)


@pytest.mark.parametrize("args", [(), (1, 2, 3, 4, 5, 6)])
def test_call_that_does_not_fit_forward_is_unsupported(args):
    with pytest.raises(Unsupported, match=r"does not fit OptionsBlock\.forward"):
        bind(OptionsBlock, args, {}, frozenset())


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        (object(), "an argument of type object"),
        (torch.zeros(2, 2).to_sparse(), r"a tensor of layout torch\.sparse_coo"),
        (torch.zeros(2).as_subclass(type("Wrapped", (torch.Tensor,), {})), "a tensor of type Wrapped"),
        (torch.Generator(), "an argument of type Generator"),
        ([1, {2}], "an argument of type set"),
    ],
    ids=["object", "sparse", "subclass", "generator", "set"],
)
def test_unsupported_argument_is_named_in_the_reason(argument, reason):
    with pytest.raises(Unsupported, match=reason):
        signature(KeywordBlock, tokens(), bias=argument)


def test_a_parameter_is_a_tensor_like_any_other():
    assert key(TransformerBlock, nn.Parameter(tokens())) == key(TransformerBlock, tokens())


@pytest.mark.parametrize(
    ("block", "args", "kwargs"),
    [
        (OptionsBlock, (2.0,), {"shift": 1}),
        (KeywordBlock, (), {"bias": torch.ones(16), "unused": None}),
    ],
)
def test_a_bound_call_computes_what_the_call_itself_does(block, args, kwargs):
    module, x = block(), torch.randn(2, 7, 16)
    bound = bind(block, (x, *args), kwargs, frozenset({"unused"}))
    assert torch.equal(call_forward(module, bound.arguments, bound.context), module(x, *args, **kwargs))


def test_positional_only_and_variable_arguments_are_bound():
    class Positional(nn.Module):
        def forward(self, x, /, *rest, scale=2, **extras):
            return x * scale + sum(rest) + extras["bias"]

    x = torch.ones(3)
    bound = bind(Positional, (x, x, x), {"scale": 3, "bias": x}, frozenset())
    assert call_forward(Positional(), bound.arguments, bound.context).tolist() == [6.0, 6.0, 6.0]


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, -0.0, float("inf"), "text", torch.float16, torch.device("cuda", 1), torch.channels_last,
        torch.strided, [1, (2.5, {"a": None})], {"b": {}, "a": torch.zeros(2, 3, dtype=torch.half)},
    ],
    ids=str,
)  # fmt: skip
def test_a_signature_can_be_read_back_from_its_text(value):
    written, tensors = read(Call({"x": tokens(), "option": value}, {"transformer_options": {}}))
    parsed, found = parse(written.text)
    assert (parsed.spec, repr(parsed.leaves), parsed.context) == (written.spec, repr(written.leaves), written.context)
    assert found == [(t.ndim, t.dtype) for t in tensors]


@pytest.mark.parametrize(
    "text",
    [
        "", "null", "[]", "{}", "[1, 2]", '[["dict", 3], []]', '[["os.system", "true"], []]', '[["tensor"], []]',
        '[["tensor", 2, "torch.nn", "cpu"], []]', '[["torch.dtype", "torch.load"], []]', '[["int", "x"], []]',
        '[["dict", [[["list", []], ["int", 1]]]], []]', "[" * 100_000,
    ],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_a_text_that_describes_no_call_is_refused(text):
    with pytest.raises(ValueError, match="not the signature of a call"):
        parse(text)


def test_named_tuple_is_in_the_key_but_cannot_be_parsed():
    Pair = namedtuple("Pair", "a b")
    one, other = (read(Call({"x": Pair(tokens(), value)}, {}))[0] for value in (1, 2))
    assert one.text != other.text
    with pytest.raises(ValueError, match="not the signature"):
        parse(one.text)


def test_has_tensors_of_ignores_plain_values():
    x = torch.zeros(2, 3)

    def signature(*args, **kwargs):
        return read(Call({"args": args, "kwargs": kwargs}, {}))[0]

    one = signature(x, [x, 1], scale=2, mask=x)
    assert signature(x, [x, 5], mask=x).has_tensors_of(one)
    assert not signature(x, [1, x], scale=2, mask=x).has_tensors_of(one)
    assert not signature(x, [x.half(), 1], scale=2, mask=x).has_tensors_of(one)
    assert not signature(x, [x, 1], scale=x, mask=x).has_tensors_of(one)


def test_keys_of_a_dictionary_that_are_tuples_are_places_too():
    one, other = (Call({"maps": {(8, 8): tokens(), (4, 4): value}, "scale": 2}, {}) for value in (5, 7))
    text = read(one)[0].text
    assert covers(text, text)
    (place,) = size_places(one, other)
    assert place == ("maps", (4, 4))
    sized = with_sizes(text, {place: None})
    assert sized != text
    assert covers(sized, read(other)[0].text)
    assert not covers(sized, read(Call({"maps": {(8, 8): tokens(), (4, 4): 5}, "scale": 3}, {}))[0].text)
