"""The method by which a host enters a network."""

from __future__ import annotations

import copy
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from compiled_graphs.compiler.entrance import OVERFLOWED, CodingEntrance, Entrance
from compiled_graphs.compiler.region_forward import _thread
from compiled_graphs.compiler.running_call import running_call
from torch import nn


class Halves(nn.Module):
    def forward(self, x, scale=0.5):
        return x * scale


class Overflowing(nn.Module):
    """Gives infinity unless its regions run eagerly, and draws a random number each time."""

    def __init__(self, always=False):
        super().__init__()
        self.always = always

    def forward(self, x):
        drawn = torch.rand(1)
        eager = getattr(_thread, "eager", None) == OVERFLOWED
        return x + drawn if eager and not self.always else x * float("inf")


class Looked:
    """Stands in for a compiled model: says whether something has changed, and whether a block is to be compared."""

    background = None

    def __init__(self):
        self.changed = self.is_due = False
        self.pace = SimpleNamespace(timed=lambda *arguments: nullcontext())
        self.ended = []

    def follow(self):
        return self.changed

    def watch_over(self):
        return self.is_due

    def note_call(self, call):
        self.ended.append(call)


def enter(network, kind=Entrance, inner=None, compiled=None, **options):
    entrance = kind(network, "forward", inner, compiled or Looked(), **options)
    network.forward = entrance
    return entrance


def test_the_running_call_is_known_inside_and_forgotten_outside():
    network, compiled = Halves(), Looked()
    enter(network, inner=lambda x, scale=0.5: running_call(compiled), compiled=compiled)
    assert network(torch.ones(1)) is compiled.ended[0]
    assert running_call(compiled) is None


def test_a_running_call_can_be_made_again():
    network, compiled = Halves(), Looked()
    enter(
        network, inner=lambda x, scale: running_call(compiled).repeated(), compiled=compiled, repeat=lambda *call: call
    )
    x = torch.ones(1)
    assert network(x, scale=2.0) == (network, "forward", (x,), {"scale": 2.0})


def test_a_call_that_fails_is_forgotten():
    network, compiled = Halves(), Looked()
    enter(network, compiled=compiled)
    with pytest.raises(TypeError):
        network(torch.ones(1), nonsense=1)
    assert running_call(compiled) is None


def test_another_models_call_is_not_ones_own():
    outer, inner, seen = Looked(), Looked(), []

    def look(x):
        seen.append((running_call(outer) is None, running_call(inner) is None))
        return x

    inside = Halves()
    enter(inside, inner=look, compiled=inner)
    network = Halves()
    enter(network, inner=lambda x: look(inside(look(x))), compiled=outer)
    network(torch.ones(1))
    assert seen == [(False, True), (True, False), (False, True)]


def test_threads_have_calls_of_their_own():
    network, compiled = Halves(), Looked()
    seen = []

    def look(x):
        thread = threading.Thread(target=lambda: seen.append(running_call(compiled)))
        thread.start()
        thread.join()
        return x

    enter(network, inner=look, compiled=compiled)
    network(torch.ones(1))
    assert seen == [None]


def test_what_somebody_put_in_the_methods_place_still_runs():
    network = Halves()
    enter(network, inner=lambda x: x + 1)
    assert network(torch.ones(1)) == 2


def test_the_entrance_does_not_keep_the_network():
    network = Halves()
    entrance = enter(network)
    assert entrance.network() is network
    del network.forward, network
    assert entrance.network() is None


def test_a_deep_copy_enters_its_own_network():
    network = Halves()
    enter(network)
    twin = copy.deepcopy(network)
    assert twin.forward.__self__ is twin


def test_an_image_that_overflows_only_compiled_is_made_again_with_the_same_random_numbers():
    network = Overflowing()
    told = []
    enter(network, CodingEntrance).on_broken = told.append
    torch.manual_seed(3)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(network(torch.zeros(1)), drawn)
    assert told == [f"eager: {OVERFLOWED}"]


def test_an_image_that_overflows_either_way_is_not_blamed_on_the_graphs():
    network = Overflowing(always=True)
    told = []
    enter(network, CodingEntrance).on_broken = told.append
    assert not torch.isfinite(network(torch.ones(1))).any()
    assert told == []


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Halves(), Halves()

    def forward(self, x):
        return self.second(self.first(x))


class Serving:
    """Serves a block of a network by a function."""

    def __init__(self, block, function):
        self.module = lambda: block
        self.function = function

    def __call__(self, x):
        return self.function(x)


def serving(network, **functions):
    return {path: Serving(network.get_submodule(path), function) for path, function in functions.items()}


def test_forwards_are_in_place_for_as_long_as_a_call_runs():
    network = Pair()
    enter(network).install_while_running(serving(network, first=lambda x: x * 8, second=lambda x: x * 3))
    x = torch.ones(1)
    assert network(x) == 24
    assert "forward" not in network.first.__dict__
    assert network.second(network.first(x)) == 0.25


def test_they_go_when_a_call_fails_and_what_was_there_comes_back():
    def fail(x):
        raise ZeroDivisionError

    network = Pair()
    network.first.forward = bound = network.first.forward  # as ComfyUI leaves it
    enter(network).install_while_running(serving(network, first=lambda x: x, second=fail))
    with pytest.raises(ZeroDivisionError):
        network(torch.ones(1))
    assert network.first.__dict__["forward"] is bound
    assert "forward" not in network.second.__dict__


def test_a_forward_of_somebody_else_is_left_alone():
    network = Pair()
    enter(network).install_while_running(serving(network, first=lambda x: x * 8, second=lambda x: x * 3))
    network.first.forward = lambda x: x * 100
    assert network(torch.ones(1)) == 300


def test_inside_what_torch_compiles_the_network_is_as_it_was():
    network = Pair()
    enter(network).install_while_running(serving(network, first=lambda x: x * 8, second=lambda x: x * 3))
    compiled = torch.compile(network, backend="eager", fullgraph=True)
    assert compiled(torch.ones(1)) == 0.25


class Replaying:
    def __init__(self):
        self.served = self.forgotten = self.looked = 0

    def serve(self, call, args, kwargs, running):
        self.served += 1
        return call(*args, **kwargs)

    def forget(self):
        self.forgotten += 1

    def look(self):
        self.looked += 1


@pytest.fixture
def replaying():
    network = Pair()
    entrance = enter(network)
    entrance.step_replay = Replaying()
    return network, entrance.compiled, entrance.step_replay


def test_a_step_with_a_block_to_compare_is_called_and_not_replayed(replaying):
    network, compiled, recordings = replaying
    network(torch.ones(1))
    compiled.is_due = True
    network(torch.ones(1))
    assert recordings.served == 1


def test_what_changed_drops_the_recordings(replaying):
    network, compiled, recordings = replaying
    network(torch.ones(1))
    compiled.changed = True
    network(torch.ones(1))
    assert (recordings.served, recordings.forgotten, recordings.looked) == (2, 1, 1)


def test_whatever_fails_while_forwards_are_put_in_place_they_are_taken_out():
    network = Pair()
    forwards = serving(network, first=lambda x: x)
    forwards["second"] = SimpleNamespace(module=lambda: 1 / 0)
    enter(network).install_while_running(forwards)
    with pytest.raises(ZeroDivisionError):
        network(torch.ones(1))
    assert "forward" not in network.first.__dict__


def test_a_block_that_is_gone_is_left_out():
    network = Pair()
    forwards = serving(network, first=lambda x: x * 8)
    forwards["second"] = SimpleNamespace(module=lambda: None)
    enter(network).install_while_running(forwards)
    assert network(torch.ones(1)) == 4
