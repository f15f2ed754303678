"""Objects of tensors as arguments: a graph takes what they hold, and the block gets objects."""

from __future__ import annotations

import enum
import functools
import sys
from dataclasses import dataclass, field, make_dataclass
from types import ModuleType
from typing import ClassVar

import pytest
import torch
from compiled_graphs.compiler.common.counters import totals
from compiled_graphs.compiler.common.host import Host
from compiled_graphs.compiler.common.reason import ReasonCode, Unsupported
from compiled_graphs.compiler.identity.call_signature import (
    bind,
    call_forward,
    covers,
    describe,
    parse,
    read,
    size_places,
)
from compiled_graphs.compiler.identity.fingerprint import fingerprint
from compiled_graphs.compiler.identity.object_arguments import NamedFunction, field_names, only_holds, packed
from compiled_graphs.compiler.registry.registry import Registry
from networks import call, compile_network, install
from torch import nn

WIDTH = 16


@dataclass
class Modulation:
    shift: torch.Tensor
    scale: torch.Tensor
    gate: torch.Tensor | None = None


class Offset(Modulation):
    @classmethod
    def of(cls, x: torch.Tensor) -> Offset:
        return cls(x, x + 1)


@dataclass(frozen=True)
class Both:
    image: Modulation
    strength: float = 1.0


@dataclass
class Acting:
    shift: torch.Tensor

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


@dataclass
class Shared:
    LEVEL: ClassVar[float] = 2.0
    shift: torch.Tensor


@dataclass
class Slotted:
    __slots__ = ("shift",)
    shift: torch.Tensor


class Steps:
    """A value for each frame, and how many tokens a frame has."""

    __slots__ = ("batch", "count", "note", "per_frame", "values")

    def __init__(self, values: torch.Tensor, per_frame: int) -> None:
        self.values, self.per_frame = values, per_frame
        self.batch, self.count, _ = values.shape

    def for_tokens(self) -> torch.Tensor:
        if self.per_frame == 1:
            return self.values
        spread = self.values.unsqueeze(2).expand(self.batch, self.count, self.per_frame, -1)
        return spread.reshape(self.batch, self.count * self.per_frame, -1)


class Open(Steps):
    """Has a dictionary."""


TABLE = torch.zeros(2)
"""A global that the code of a block names, and that is no class."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, modulation):
        one, other = modulation
        return x + self.linear(x * (1 + one.scale) + one.shift) * other.image.scale * other.strength


class StepBlock(Block):
    def forward(self, x, steps):
        if not isinstance(steps, (Steps, Open)):
            raise TypeError(TABLE)
        return self.linear(x) * steps.for_tokens()


class StepWriter(Block):
    def forward(self, x, steps: Steps):
        steps.per_frame = 0
        return self.linear(x)


class Writer(Block):
    def forward(self, x, modulation):
        modulation[0].gate = x
        return self.linear(x)


class Network(nn.Module):
    def __init__(self, block=Block, strength=1.0):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.strength = strength

    def inputs(self, at):
        return (torch.zeros(at.batch, at.tokens, WIDTH),)

    def forward(self, x):
        vector = x.mean(1, keepdim=True)
        modulation = Modulation(vector, vector + 1), Both(Offset.of(vector), self.strength)
        for block in self.blocks:
            x = block(x, modulation)
        return x


class StepNetwork(nn.Module):
    """Is given frames, in each of which are several tokens."""

    def __init__(self, block=StepBlock, steps=Steps):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.steps = steps

    def inputs(self, at):
        return (torch.zeros(at.batch, at.frames, at.width, WIDTH),)

    def forward(self, x):
        steps = self.steps(x.mean(2), x.shape[2])
        x = x.flatten(1, 2)
        for block in self.blocks:
            x = block(x, steps)
        return x


def signature(value):
    return read(bind(Block, (torch.zeros(2, 5, WIDTH), value), {}, frozenset()))[0]


def pair(count=1):
    return Modulation(*torch.zeros(2, 2, count, WIDTH)), Both(Offset.of(torch.zeros(2, count, WIDTH)), 0.5)


@torch.no_grad()
def test_blocks_that_are_given_dataclasses_are_compiled():
    network = Network()
    x, longer = torch.randn(2, 5, WIDTH), torch.randn(3, 9, WIDTH)
    expected = network(x), network(longer)
    with totals.expect(compiles=1):
        compiled = compile_network(network, Registry())
        assert torch.equal(network(x), expected[0])
        assert torch.equal(network(longer), expected[1])
    assert compiled.counters.eager_calls == {}
    network.strength = 2.0
    assert not torch.equal(network(x), expected[0]), "a plain field is part of the signature"


@torch.no_grad()
def test_a_block_that_writes_to_a_dataclass_stays_eager():
    network = Network(Writer)
    x = torch.randn(2, 5, WIDTH)
    expected = network(x)
    compiled = compile_network(network, Registry())
    assert torch.equal(network(x), expected)
    assert {reason.code for reason in compiled.counters.eager_calls} == {ReasonCode.WRITES_ARGUMENT}


@pytest.mark.parametrize("steps", [Steps, Open])
@torch.no_grad()
def test_blocks_that_are_given_objects_with_methods_are_compiled_once_for_all_sizes(steps):
    network = StepNetwork(steps=steps)
    calls = [torch.randn(batch, frames, tokens, WIDTH) for batch, frames, tokens in ((2, 5, 7), (1, 1, 3), (3, 9, 2))]
    expected = [network(x) for x in calls]
    with totals.expect(compiles=1):
        compiled = compile_network(network, Registry())
        assert all(torch.equal(network(x), result) for x, result in zip(calls, expected, strict=True))
    assert compiled.counters.eager_calls == {}


@torch.no_grad()
def test_a_call_that_was_not_foreseen_gets_one_graph_for_all_sizes():
    network = StepNetwork()
    calls = [torch.randn(batch, frames, tokens, WIDTH) for batch, frames, tokens in ((2, 5, 7), (3, 4, 6))]
    expected = [network(x) for x in calls]
    compiled = install(network, Registry(), current_call=lambda: call)
    with totals.expect(compiles=1):
        assert all(torch.equal(network(x), result) for x, result in zip(calls, expected, strict=True))
    assert compiled.counters.eager_calls == {}


@torch.no_grad()
def test_a_block_that_writes_to_an_object_stays_eager():
    network = StepNetwork(StepWriter)
    x = torch.randn(2, 5, 7, WIDTH)
    expected = network(x)
    compiled = compile_network(network, Registry())
    assert torch.equal(network(x), expected)
    assert {reason.code for reason in compiled.counters.eager_calls} == {ReasonCode.WRITES_ARGUMENT}


class StepMarker(Block):
    def forward(self, x, steps: Steps):
        steps.note = x
        return self.linear(x)


def test_a_block_that_adds_to_an_object_is_refused():
    x = torch.zeros(1, 2, WIDTH)
    bound = bind(StepMarker, (x, Steps(x, 1)), {}, frozenset())
    with pytest.raises(Unsupported) as refused:
        call_forward(StepMarker(), bound.arguments, {})
    assert refused.value.reason.code is ReasonCode.WRITES_ARGUMENT


def test_methods_of_an_object_are_part_of_what_a_block_is(monkeypatch):
    before = fingerprint(StepBlock(), Host()), fingerprint(Block(), Host())
    monkeypatch.setattr(Steps, "for_tokens", lambda self: self.values.repeat_interleave(self.per_frame, 1))
    assert fingerprint(StepBlock(), Host()) != before[0]
    assert fingerprint(Block(), Host()) == before[1]


def test_a_signature_with_sizes_of_an_objects_tensors_can_be_read_back():
    calls = [bind(StepBlock, (torch.zeros(b, f * n, WIDTH), Steps(torch.zeros(b, f, WIDTH), n)), {}, frozenset())
             for b, f, n in ((2, 5, 7), (3, 9, 4))]  # fmt: skip
    sizes = size_places(*calls)
    found = [read(bound, sizes=sizes)[0] for bound in calls]
    assert found[0].text == found[1].text
    assert all(covers(found[0].text, read(bound)[0].text) for bound in calls)
    assert not covers(found[0].text, signature(pair()).text)
    again, tensors = parse(found[0].text)
    assert again.text == found[0].text
    assert (again.spec, again.leaves) == (found[0].spec, found[0].leaves)
    assert len(tensors) == 3  # the tokens of a frame are no size of the object's tensor
    block, x, values = StepBlock(), torch.randn(4, 6, WIDTH), torch.randn(4, 3, WIDTH)
    given = again.fill([x, torch.empty(2), values])
    assert torch.equal(call_forward(block, given, {}), block(x, Steps(values, 2)))


def test_an_int_that_is_no_size_of_its_objects_tensor_in_this_call_stays_what_it_is():
    one, other = (bind(StepBlock, (torch.zeros(1), Steps(torch.zeros(2, n, 4), 9)), {}, frozenset()) for n in (5, 6))
    odd = Steps(torch.zeros(2, 7, 4), 9)
    odd.count = 8
    bound = bind(StepBlock, (torch.zeros(1), odd), {}, frozenset())
    sizes = size_places(one, other)
    assert read(bound, sizes=sizes)[0].text != read(one, sizes=sizes)[0].text


@pytest.mark.parametrize("value", [Steps(torch.zeros(1, 2, 3), 4), slice(1), nn.Identity(), print])
def test_only_objects_of_a_class_that_the_block_names_are_taken_apart(value):
    for look in (lambda: describe(value, [], Block), lambda: signature(value)):
        with pytest.raises(Unsupported, match=type(value).__name__):
            look()


def test_an_object_that_leads_to_itself_is_refused():
    value = Open(torch.zeros(1, 2, 3), 4)
    value.note = value
    x = torch.zeros(1)
    for look in (lambda: describe(value, [], StepBlock), lambda: read(bind(StepBlock, (x, value), {}, frozenset()))):
        with pytest.raises(Unsupported, match="Open"):
            look()


def test_a_signature_with_dataclasses_can_be_read_back():
    one = signature(pair())
    again, tensors = parse(one.text)
    assert again.text == one.text
    assert (again.spec, again.leaves) == (one.spec, one.leaves)
    assert len(tensors) == 5
    given = [torch.randn(2, 5, WIDTH), *torch.randn(4, 2, 1, WIDTH)]
    block = Block()
    modulation = Modulation(*given[1:3]), Both(Modulation(*given[3:5]), 0.5)
    assert torch.equal(call_forward(block, again.fill(given), {}), block(given[0], modulation))


@pytest.mark.parametrize(
    "other",
    [
        (Offset(*torch.zeros(2, 2, 1, WIDTH)), pair()[1]),
        (Modulation(*torch.zeros(3, 2, 1, WIDTH)), pair()[1]),
        (pair()[0], Both(Offset.of(torch.zeros(2, 1, WIDTH)), 0.25)),
    ],
    ids=["another class", "a field that is there", "another value"],
)
def test_what_a_dataclass_is_and_holds_is_part_of_the_signature(other):
    assert signature(other).text != signature(pair()).text
    assert signature(pair(3)).text == signature(pair()).text


def test_tokens_tell_classes_and_values_apart():
    tokens = {describe(value, []) for value in (*pair(), Offset(*torch.zeros(2, 2, 1, WIDTH)))}
    assert len(tokens) == 3
    tensors = []
    describe(pair(), tensors)
    assert len(tensors) == 4


@pytest.mark.parametrize("cls", [Acting, Shared, make_dataclass("Local", ["x"], namespace={"f": lambda self: 1}), int])
def test_only_plain_dataclasses_are_taken_apart(cls):
    assert field_names(cls) is None


def test_an_object_with_methods_is_named_in_the_reason():
    with pytest.raises(Unsupported, match="Acting"):
        signature(Acting(torch.zeros(1)))


def test_an_object_that_holds_more_than_its_fields_is_refused():
    value = Modulation(torch.zeros(1), torch.zeros(1))
    value.more = 1
    for look in (lambda: describe(value, []), lambda: signature(value)):
        with pytest.raises(Unsupported, match="Modulation"):
            look()
    assert packed(Slotted(torch.zeros(1)), Block).values


def test_dataclasses_in_lists_are_refused():
    with pytest.raises(Unsupported, match="Modulation"):
        signature([Modulation(torch.zeros(1), torch.zeros(1))])


def test_a_name_from_elsewhere_imports_and_runs_nothing(monkeypatch):
    text = signature(pair()).text
    for old, new in (("Modulation", "Missing"), (__name__, "antigravity"), (__name__, "os")):
        found, _ = parse(text.replace(old, new))
        with pytest.raises(Unsupported):
            call_forward(Block(), found.fill(list(torch.zeros(5, 2, 1, WIDTH))), {})
    assert "antigravity" not in sys.modules


def test_a_class_of_the_same_name_with_other_code_is_refused(monkeypatch):
    found, _ = parse(signature(pair()).text)
    module = ModuleType(__name__)
    module.Modulation = make_dataclass("Modulation", [("scale", torch.Tensor), ("shift", torch.Tensor),
                                                      ("gate", torch.Tensor, field(default=None))])  # fmt: skip
    module.Both, module.Offset = Both, Offset
    monkeypatch.setitem(sys.modules, __name__, module)
    with pytest.raises(Unsupported, match="Modulation"):
        call_forward(Block(), found.fill(list(torch.zeros(5, 2, 1, WIDTH))), {})


def helper(x):
    return x + 1


class Given(nn.Module):
    def forward(self, x, function=None):
        return function(x)


def test_a_function_that_can_be_found_by_its_name_is_an_argument_like_a_string():
    found, tensors = read(bind(Given, (torch.zeros(2),), {"function": helper}, frozenset()))
    assert found.leaves[1] == NamedFunction(f"{__name__}:helper")
    assert parse(found.text)[0].leaves == found.leaves
    asked = []
    made = call_forward(Given(), found.fill(tensors), {}, lambda name: asked.append(name) or torch.neg)
    assert (asked, made.tolist()) == ([f"{__name__}:helper"], [0.0, 0.0])
    with pytest.raises(Unsupported, match="helper"):  # no host says what may take its place
        call_forward(Given(), found.fill(tensors), {})


def test_another_function_of_the_same_name_is_refused(monkeypatch):
    first, (module, name) = helper, (__name__, "helper")
    assert describe(first, [])[1] == f"{module}:{name}"
    monkeypatch.setattr(sys.modules[module], name, lambda x: x)
    for function in (first, lambda x: x, functools.partial(first)):
        for look in (lambda: describe(function, []), lambda: signature(function)):  # noqa: B023  used at once
            with pytest.raises(Unsupported, match=r"function|partial"):
                look()


class State(enum.Enum):
    FIRST = 0
    LATER = 1


class Level(enum.IntEnum):
    LOW = 2
    HIGH = 3


class Doing(enum.Enum):
    FIRST = 0

    def scale(self):
        return FACTOR


class Wide(enum.Enum):
    FIRST = (1, 2)


class Parts(enum.Flag):
    ONE = 1
    TWO = 2


FACTOR = 2


class Staged(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, state=None, level=Level.LOW):
        x = self.layer(x) * level.value
        return x + 1 if state is State.LATER else x


def test_a_member_of_an_enumeration_is_an_argument_like_a_string():
    """SeedVR2's VAE tells its blocks so whether a chunk of a video is the first one."""
    found, tensors = read(bind(Staged, (torch.ones(2, WIDTH),), {"state": State.LATER}, frozenset()))
    assert [leaf.name for leaf in found.leaves[1:]] == ["LATER", "LOW"]
    assert parse(found.text)[0].leaves == found.leaves
    block = Staged()
    made = call_forward(block, found.fill(tensors), {})
    assert torch.equal(made, block(torch.ones(2, WIDTH), State.LATER))
    others = [read(bind(Staged, (torch.ones(2, WIDTH), state), {}, frozenset()))[0] for state in (State.FIRST, None)]
    assert len({found.text, *(other.text for other in others)}) == 3
    assert len({describe(state, [])[1] for state in (State.FIRST, State.LATER, Level.LOW)}) == 3


def test_an_enumeration_with_code_or_other_values_is_refused():
    for member in (Doing.FIRST, Wide.FIRST, Parts.ONE | Parts.TWO):
        for look in (lambda: describe(member, []), lambda: signature(member)):  # noqa: B023  used at once
            with pytest.raises(Unsupported, match=type(member).__name__):
                look()


def test_another_enumeration_of_the_same_name_is_refused(monkeypatch):
    found, tensors = read(bind(Staged, (torch.ones(2, WIDTH),), {"state": State.LATER}, frozenset()))
    with pytest.raises(Unsupported, match="State"):  # a file may name any member
        call_forward(Staged(), parse(found.text.replace("LATER", "LAST"))[0].fill(tensors), {})
    member = State.LATER
    monkeypatch.setattr(sys.modules[__name__], "State", enum.Enum("State", {"FIRST": 1, "LATER": 0}, module=__name__))
    with pytest.raises(Unsupported, match="State"):
        call_forward(Staged(), found.fill(tensors), {})
    with pytest.raises(Unsupported, match="State"):
        describe(member, [])


class Holder:
    """Only makes objects."""

    __slots__ = ("count", "mask")

    def __init__(self, mask: torch.Tensor, count: int = 1):
        self.mask, self.count = mask.abs(), count


class Held(Holder):
    __slots__ = ()


class Constant:
    __slots__ = ("mask",)
    FACTOR = 2


class Doubling:
    __slots__ = ("mask",)

    def doubled(self) -> torch.Tensor:
        return self.mask * 2


class Unslotted:
    def __init__(self):
        self.mask = None


def test_a_class_that_only_makes_its_objects_is_taken_apart_wherever_it_is():
    assert only_holds(Holder)
    assert [
        cls.__name__ for cls in (Held, Constant, Doubling, Open, nn.Linear, torch.Size, int) if only_holds(cls)
    ] == []
    value = packed(Holder(torch.ones(2), 3), nn.Identity)
    assert value.names == ("count", "mask")
    assert value.values[0] == 3
    one, other = (read(bind(Taking, (torch.ones(2, 3), Holder(torch.ones(3), n)), {}, frozenset()))[0] for n in (5, 6))
    assert one.text != other.text


class Taking(nn.Module):
    def forward(self, x: torch.Tensor, held) -> torch.Tensor:
        return x * held.mask * held.count
