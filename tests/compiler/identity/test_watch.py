"""Every change that can affect a block's result is noticed before the next sampling.

Each case makes one change to a compiled network and to an uncompiled copy. Their results must stay equal.
"""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import types
import weakref

import numpy as np
import pytest
import torch
from compiled_graphs.compiler.common.host import Host
from compiled_graphs.compiler.identity.fingerprint import Describer
from compiled_graphs.compiler.runtime.network_wrapper import NetworkWrapper
from networks import install
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("traced_once")

SCALE = 2.0
TABLE = {"gain": 3.0}
sizes_of = [1.0, 2.0]
CONFIG = types.SimpleNamespace(gain=1.5)


def gain(x):
    return x * 1.5


class Settings:
    __slots__ = ("level", "shape")

    def __init__(self, level):
        self.level = level
        self.shape = Scaler(level)


class Scaler:
    def __init__(self, factor):
        self.factor = factor

    def scale(self, x):
        return x * self.factor


class Norms:
    EPS = 0.5

    @staticmethod
    def shift(x):
        return x + 1

    def widen(self, x, by=1.0):
        return x * by


def closed_over(values):
    def act(x):
        return x * values[0]

    return act


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm = nn.GroupNorm(2, width)
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.eps = 0.25
        self.act = functional.silu
        self.curve = np.linspace(1, 2, 4)
        self.slots = Settings(1.0)
        self.nested = {"a": [{"b": [1.0]}]}
        self.method = Scaler(1.25).scale
        self.partial = functools.partial(closed_over([1.0]))
        self.closure = closed_over([1.5])
        self.norms = Norms()
        self.reference = weakref.ref(gain)
        self._private = 1.0
        self.scaler = Scaler(1.5)
        self.gate = nn.Tanh()
        self.register_buffer("offset", None)

    def forward(self, x):
        x = self.act(self.conv(self.norm(x))) * SCALE * TABLE["gain"] + self.eps * sizes_of[1]
        x = (
            self.closure(self.method(gain(x)))
            * float(self.curve[2])
            * self.slots.level
            * (2 if hasattr(self.slots, "shape") else 3)
            * self._private
        )
        x = self.norms.widen(self.norms.shift(x)) * self.nested["a"][0]["b"][0] * Norms.EPS * CONFIG.gain
        x = self.partial(x)
        x = x if self.scaler is None else self.scaler.scale(x)
        x = x if self.gate is None else self.gate(x)
        return x if self.offset is None else x + self.offset


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Block()) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def inputs(self, sizes):
        return (torch.randn(sizes.batch, 8, sizes.height, sizes.width),)


def of_each(change):
    return lambda network: [change(block[0]) for block in network.blocks]


def swap_class(block):
    class Other(Block):
        def forward(self, x):
            return super().forward(x) * 7

    block.__class__ = Other


def swap_inner_class(block):
    class Other(nn.GroupNorm):
        def forward(self, x):
            return super().forward(x) * 7

    block.norm.__class__ = Other


def tile(block):
    block.conv.padding_mode = "circular"
    block.conv._reversed_padding_repeated_twice = [1, 1, 1, 1]


def tile_by_method(block):
    def conv_forward(x, weight, bias):
        return functional.conv2d(functional.pad(x, (1, 1, 1, 1), mode="circular"), weight, bias)

    block.conv._conv_forward = conv_forward


def bias_from_none(block):
    block.norm.bias = nn.Parameter(torch.ones(8))


def without(name):
    def remove(block):
        setattr(block, name, None)
        gc.collect()  # what was there is gone

    return remove


CHANGES = {
    "a number": lambda b: setattr(b, "eps", 0.75),
    "a private number": lambda b: setattr(b, "_private", 2.0),
    "minus zero for zero": lambda b: setattr(b, "eps", -0.25),
    "eps of a layer": lambda b: setattr(b.norm, "eps", 10.0),
    "padding mode": tile,
    "a method on an instance": tile_by_method,
    "a function": lambda b: setattr(b, "act", functional.relu),
    "class": swap_class,
    "class of a layer": swap_inner_class,
    "a buffer from None": lambda b: setattr(b, "offset", torch.ones(1)),
    "a new buffer": lambda b: b.register_buffer("late", torch.ones(1)),
    "numpy values": lambda b: b.curve.__setitem__(2, 9.0),
    "another array": lambda b: setattr(b, "curve", np.linspace(3, 4, 4)),
    "slots": lambda b: setattr(b.slots, "level", 5.0),
    "nested lists": lambda b: b.nested["a"][0]["b"].__setitem__(0, 4.0),
    "state behind a bound method": lambda b: setattr(b.method.__self__, "factor", 6.0),
    "state in a closure": lambda b: b.closure.__closure__[0].cell_contents.__setitem__(0, 8.0),
    "state in a partial": lambda b: b.partial.func.__closure__[0].cell_contents.__setitem__(0, 8.0),
    "None for an object that goes": without("scaler"),
    "None for a layer that goes": without("gate"),
    "a slot that is emptied": lambda b: (delattr(b.slots, "shape"), gc.collect()),
    "an attribute that hides a method": lambda b: setattr(b.norms, "shift", lambda x: x - 5),
}


@pytest.fixture
def pair(registry):
    """Return a compiled network, an equal one that is not compiled, and the compiled model."""
    torch.manual_seed(3)
    network = Network()
    reference = copy.deepcopy(network)
    compiled = install(network, registry)
    for path in (forwards := compiled.forwards()):
        network.get_submodule(path).__dict__.pop("forward", None)
    network.forward = entrance = NetworkWrapper(network, "forward", None, compiled)
    entrance.install_while_running(forwards)
    compiled.prepare(lambda copied, at: Network.forward(copied, *network.inputs(at)))
    assert compiled.summary().compiled == 1
    return network, reference, compiled


def agree(network, reference, x):
    torch.testing.assert_close(network(x), reference(x))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_of_one_block_is_seen(pair, change):
    network, reference, _ = pair
    x = torch.randn(2, 8, 9, 11)
    before = reference(x)
    agree(network, reference, x)
    for each in (network, reference):
        change(each.blocks[0][0])
    agree(network, reference, x)
    assert change is CHANGES["a new buffer"] or not torch.allclose(reference(x), before)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_blocks_that_differ_share_nothing(change):
    one, other = Network().blocks
    assert described(one) == described(other)
    change(other[0])
    assert described(one) != described(other)


def described(block):
    return Describer(Host()).describe(block).fingerprint


def test_each_module_is_watched_once():
    block, describer = Block(), Describer(Host())
    describer.describe(block)
    assert describer.watch.mark() == len(list(block.modules()))


def patch(monkeypatch, name):
    here = globals()
    if name == "a global number":
        monkeypatch.setitem(here, "SCALE", 5.0)
    elif name == "a global table":
        monkeypatch.setitem(TABLE, "gain", 9.0)
    elif name == "a global list":
        monkeypatch.setitem(here, "sizes_of", [1.0, 9.0])
    elif name == "an attribute of a global":
        monkeypatch.setattr(CONFIG, "gain", 9.0)
    elif name == "a helper":
        monkeypatch.setitem(here, "gain", lambda x: x * 9)
    elif name == "a helper's code":
        monkeypatch.setattr(gain, "__code__", (lambda x: x * 9).__code__)
    elif name == "a class attribute":
        monkeypatch.setattr(Norms, "EPS", 9.0)
    elif name == "a method on the class":
        monkeypatch.setattr(Norms, "widen", lambda self, x, by=1.0: x * 9)
    elif name == "a static method":
        monkeypatch.setattr(Norms, "shift", staticmethod(lambda x: x + 9))
    elif name == "defaults":
        monkeypatch.setattr(Norms.widen, "__defaults__", (9.0,))
    elif name == "forward on the class":
        forward = Block.forward
        monkeypatch.setattr(Block, "forward", lambda self, x: forward(self, x) * 9)
    elif name == "torch's function":
        silu = functional.conv2d
        monkeypatch.setattr(functional, "conv2d", lambda *a, **k: silu(*a, **k) * 9)
    elif name == "torch's layer":
        forward = nn.GroupNorm.forward
        monkeypatch.setattr(nn.GroupNorm, "forward", lambda self, x: forward(self, x) * 9)


PATCHES = ["a global number", "a global table", "a global list", "an attribute of a global", "a helper",
           "a helper's code", "a class attribute", "a method on the class", "a static method", "defaults",
           "forward on the class", "torch's layer"]  # fmt: skip


@pytest.mark.parametrize("name", PATCHES)
def test_a_change_of_code_or_globals_is_seen(pair, monkeypatch, name):
    network, reference, _ = pair
    x = torch.randn(2, 8, 9, 11)
    before = reference(x)
    agree(network, reference, x)
    with monkeypatch.context() as context:
        patch(context, name)
        assert not torch.allclose(reference(x), before)
        agree(network, reference, x)
    agree(network, reference, x)


@pytest.mark.parametrize("name", [*PATCHES, "torch's function"])
def test_a_change_before_compiling_is_another_block(monkeypatch, name):
    block = Network().blocks[0]
    before = described(block)
    patch(monkeypatch, name)
    assert described(block) != before


def test_nothing_seen_where_nothing_changes(pair):
    network, reference, compiled = pair
    x = torch.randn(2, 8, 9, 11)
    network(x)
    with compiled.counters.expect(compiles=0, retired=0):
        for _ in range(3):
            network.blocks[0][0].eps = float("0.25")  # an equal value, another object
            agree(network, reference, x)
    assert not compiled.counters.eager_calls


def test_a_block_replaced_or_removed_leaves_nothing_behind(pair):
    network, reference, _ = pair
    x = torch.randn(2, 8, 9, 11)
    network(x)
    for each in (network, reference):
        torch.manual_seed(5)
        each.blocks[0] = nn.Sequential(Block())
    agree(network, reference, x)
    for each in (network, reference):
        del each.blocks[1]
    agree(network, reference, x)
    assert not any("forward" in module.__dict__ for module in network.blocks.modules())


def test_a_compiled_network_is_pickled_as_it_was(pair):
    network, _, _ = pair
    for block in network.blocks:
        for name in ("closure", "partial", "reference"):
            block[0].__dict__.pop(name, None)
    copied = pickle.loads(pickle.dumps(network))
    assert copied.forward.__self__ is copied
    assert copied.forward.__func__ is Network.forward


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (iter([1]), "an iterator"),
        ([torch.ones(1)], "a tensor outside parameters and buffers"),
        ([nn.Linear(2, 2)], "a layer that the block reads and does not contain"),
        (np.array([object()]), "an array of objects"),
    ],
    ids=["iterator", "tensors", "layer", "objects"],
)
def test_what_cannot_be_described_says_so(value, said):
    block = Network().blocks[0]
    block[0].secret = value
    description = Describer(Host()).describe(block)
    assert said in str(description.obscure)
    assert "secret" in description.obscure.detail
