"""The stand-in for the method by which a host calls a network."""

from __future__ import annotations

import copy
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from compiled_graphs.compiler.common.counters import Counters
from compiled_graphs.compiler.common.host import Host
from compiled_graphs.compiler.common.timing import LatencyTracker
from compiled_graphs.compiler.common.weight_source import ResidentWeights
from compiled_graphs.compiler.runtime.network_wrapper import (
    MAX_OVERFLOWS,
    OVERFLOWED,
    NetworkWrapper,
    VAEWrapper,
    _is_finite,
)
from compiled_graphs.compiler.runtime.region_forward import _thread
from compiled_graphs.compiler.runtime.running_call import RunningCall, running_call
from compiled_graphs.compiler.runtime.sampling import Announced
from torch import nn


class Halves(nn.Module):
    def forward(self, x, scale=0.5):
        return x * scale


class Overflowing(nn.Module):
    """Returns infinity unless its regions run eagerly, and draws a random number on each call."""

    def __init__(self, always=False):
        super().__init__()
        self.always = always

    def forward(self, x):
        drawn = torch.rand(1)
        eager = getattr(_thread, "eager", None) == OVERFLOWED
        return x + drawn if eager and not self.always else x * float("inf")


class FakeCompiledModel:
    """A fake compiled model, which says whether the network has changed and whether a block is due for comparison."""

    background = None
    host = Host()
    weights = ResidentWeights()

    def __init__(self):
        self.changed = self.is_due = False
        self.counters = Counters()
        self.latency = SimpleNamespace(timed=lambda *call, **where: nullcontext())
        self.ended = []

    def refresh(self):
        return self.changed

    def schedule_check(self):
        return self.is_due

    def note_call(self, call):
        self.ended.append(call)


def enter(network, kind=NetworkWrapper, inner=None, compiled=None, **options):
    entrance = kind(network, "forward", inner, compiled or FakeCompiledModel(), **options)
    network.forward = entrance
    return entrance


def test_running_call_is_known_only_inside():
    network, compiled = Halves(), FakeCompiledModel()
    enter(network, inner=lambda x, scale=0.5: running_call(compiled), compiled=compiled)
    assert network(torch.ones(1)) is compiled.ended[0]
    assert running_call(compiled) is None


def test_a_running_call_can_be_made_again():
    network, compiled = Halves(), FakeCompiledModel()
    enter(
        network, inner=lambda x, scale: running_call(compiled).repeated(), compiled=compiled, repeat=lambda *call: call
    )
    x = torch.ones(1)
    assert network(x, scale=2.0) == (network, "forward", (x,), {"scale": 2.0})


def test_a_call_that_fails_is_forgotten():
    network, compiled = Halves(), FakeCompiledModel()
    enter(network, compiled=compiled)
    with pytest.raises(TypeError):
        network(torch.ones(1), nonsense=1)
    assert running_call(compiled) is None


def test_another_models_call_is_not_ones_own():
    outer, inner, seen = FakeCompiledModel(), FakeCompiledModel(), []

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
    network, compiled = Halves(), FakeCompiledModel()
    seen = []

    def look(x):
        thread = threading.Thread(target=lambda: seen.append(running_call(compiled)))
        thread.start()
        thread.join()
        return x

    enter(network, inner=look, compiled=compiled)
    network(torch.ones(1))
    assert seen == [None]


def test_method_replaced_before_still_runs():
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
    copied = copy.deepcopy(network)
    assert copied.forward.__self__ is copied


def test_overflow_in_graphs_is_redone_with_the_same_draws():
    network = Overflowing()
    told = []
    enter(network, VAEWrapper).on_broken = told.append
    torch.manual_seed(3)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(network(torch.zeros(1)), drawn)
    assert told == [OVERFLOWED]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_one_value_that_is_not_finite_is_seen_wherever_it_is(value, dtype):
    for size, at in ((1, 0), (33, 0), (33, 20), (33, 32)):
        image = torch.linspace(-1, 1, size).to(dtype)
        image[at] = value
        assert not _is_finite(image)
        assert not _is_finite((torch.zeros(3), [image]))


def test_results_without_such_values_are_finite():
    largest = torch.tensor([torch.finfo(torch.float16).max], dtype=torch.float16)
    assert _is_finite((largest, -largest, torch.empty(0), torch.tensor([2**40]), torch.tensor([True]), None))


def test_a_vae_that_always_overflows_is_not_run_twice_for_ever(monkeypatch):
    network = Overflowing()
    told, draws = [], []
    enter(network, VAEWrapper).on_broken = told.append
    monkeypatch.setattr(torch, "rand", lambda size, rand=torch.rand: draws.append(size) or rand(size))
    for _ in range(MAX_OVERFLOWS + 2):
        assert torch.isfinite(network(torch.zeros(1))).all()
    assert len(told) == MAX_OVERFLOWS
    assert len(draws) == 2 * MAX_OVERFLOWS + 2


def test_overflow_in_eager_too_is_not_reported():
    network = Overflowing(always=True)
    told = []
    enter(network, VAEWrapper).on_broken = told.append
    assert not torch.isfinite(network(torch.ones(1))).any()
    assert told == []


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Halves(), Halves()

    def forward(self, x):
        return self.second(self.first(x))


class Serving:
    """A region's forward that calls a function."""

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


def test_forwards_are_restored_after_a_failed_call():
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


def test_torch_compile_sees_the_plain_network():
    network = Pair()
    enter(network).install_while_running(serving(network, first=lambda x: x * 8, second=lambda x: x * 3))
    compiled = torch.compile(network, backend="eager", fullgraph=True)
    assert compiled(torch.ones(1)) == 0.25


class FakeStepReplay:
    def __init__(self):
        self.served = self.forgotten = self.looked = 0
        self.is_settled = True

    def serve(self, call, args, kwargs, running):
        self.served += 1
        return call(*args, **kwargs)

    def drop_captures(self):
        self.forgotten += 1

    drop_and_revalidate = drop_captures

    def drop_if_changed(self):
        self.looked += 1


@pytest.fixture
def replaying():
    network = Pair()
    entrance = enter(network)
    entrance.step_replay = FakeStepReplay()
    return network, entrance.compiled, entrance.step_replay


def test_step_with_a_due_block_is_not_replayed(replaying):
    network, compiled, recordings = replaying
    network(torch.ones(1))
    compiled.is_due = True
    network(torch.ones(1))
    assert recordings.served == 1


def test_change_drops_the_recordings(replaying):
    network, compiled, recordings = replaying
    network(torch.ones(1))
    compiled.changed = True
    network(torch.ones(1))
    assert (recordings.served, recordings.forgotten, recordings.looked) == (2, 1, 1)


def test_forwards_are_removed_if_installing_fails():
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


class FixedTrial:
    """Says how calls are made, and what it is told."""

    def __init__(self, runs_eagerly=False, has_fallen_back=False):
        self.runs_eagerly, self.has_fallen_back = runs_eagerly, has_fallen_back
        self.reason, self.factor = OVERFLOWED, None
        self.latency = SimpleNamespace(timed=lambda *call, **where: nullcontext())
        self.told = []

    def end_sampling(self, gain, figures):
        self.told.append(gain)
        self.has_fallen_back = self.runs_eagerly = True
        self.factor = 0.8


def test_a_call_of_no_sampling_is_decided_by_those_before_it_and_told_once():
    network, told = Pair(), []
    entrance = enter(network)
    entrance.compiled.gain, entrance.compiled.latency.figures = lambda: 0.5, lambda: []
    entrance.speed_trial, entrance.on_setup = FixedTrial(), lambda: told.append(entrance.speed_trial.factor)
    for _ in range(2):
        network(torch.ones(1))
    assert entrance.speed_trial.told == [0.5, 0.5]
    assert told == [0.8]


@pytest.mark.parametrize("runs_eagerly", [False, True])
def test_a_call_that_has_its_weights_brought_is_timed_apart(runs_eagerly):
    network = Pair()
    entrance = enter(network)
    entrance.speed_trial = FixedTrial(runs_eagerly=runs_eagerly)
    entrance.speed_trial.end_sampling = lambda gain, figures: None
    entrance.speed_trial.latency = entrance.compiled.latency = LatencyTracker()
    entrance.compiled.gain = lambda: None
    for are_there in (False, True, True):
        entrance.compiled.weights.are_there = are_there
        network(torch.ones(1))
    figures = entrance.compiled.latency.figures()
    assert [(figure.brings_weights, figure.calls) for figure in figures] == [(True, 1), (False, 2)]


def test_a_call_that_is_made_uncompiled_is_the_networks_own():
    network, played = Pair(), []
    entrance = enter(network)
    entrance.install_while_running(serving(network, first=lambda x: x * 8, second=lambda x: x * 3))
    entrance.step_replay, entrance.speed_trial = FakeStepReplay(), FixedTrial(runs_eagerly=True)
    entrance.sampling = Announced()
    entrance.on_call = lambda: played.append(True)
    assert network(torch.ones(1)) == 0.25
    assert entrance.step_replay.served == 0
    assert entrance.compiled.counters.eager_calls == {OVERFLOWED: 1}
    assert played == [True], "the registry still knows who runs the model"
    entrance.speed_trial.runs_eagerly = False
    assert network(torch.ones(1)) == 24


def test_recordings_of_a_model_that_is_left_are_dropped_once():
    network = Pair()
    entrance = enter(network)
    entrance.compiled.gain = lambda: 0.5
    entrance.compiled.latency.figures = lambda: []
    entrance.step_replay, entrance.speed_trial = FakeStepReplay(), FixedTrial()
    entrance.end_sampling()
    entrance.end_sampling()
    assert entrance.step_replay.forgotten == 1


@pytest.mark.parametrize(("is_busy", "is_settled"), [(True, True), (False, False), (False, True)])
def test_a_gain_is_final_once_graphs_and_recordings_are_made(is_busy, is_settled):
    entrance = enter(Pair())
    entrance.compiled.gain = lambda: 0.5
    entrance.compiled.latency.figures = lambda: []
    entrance.compiled.background = SimpleNamespace(is_busy=is_busy)
    entrance.step_replay, entrance.speed_trial = FakeStepReplay(), FixedTrial()
    entrance.step_replay.is_settled = is_settled
    entrance.end_sampling()
    assert entrance.speed_trial.told == [0.5 if is_settled and not is_busy else None]


def test_without_a_choice_nothing_is_decided():
    enter(Pair()).end_sampling()


class Takes(nn.Module):
    """Takes residuals out of the lists that it is given, as a UNet does, and notes in its options that it has."""

    def __init__(self):
        super().__init__()
        self.tries = 0

    def forward(self, x, control=None, options=None):
        self.tries += 1
        options["tries"] = self.tries
        x = x + control["output"].pop()
        if self.tries == 1:
            raise torch.cuda.OutOfMemoryError("no room")
        return x


class GivesWay(ResidentWeights):
    def give_way(self, size):
        return True


class WithOptions(Host):
    context_arguments = frozenset({"options"})


def test_a_call_that_is_made_again_has_all_that_it_was_given():
    compiled = SimpleNamespace(weights=GivesWay(), host=WithOptions())
    wrapper, options = NetworkWrapper(network := Takes(), "forward", None, compiled), {}
    given = {"control": {"output": [torch.ones(1)]}, "options": options}
    result = wrapper._call_with_weights(RunningCall(None), (torch.zeros(1),), given, False)
    assert result == 1
    assert (network.tries, options) == (2, {"tries": 2})
