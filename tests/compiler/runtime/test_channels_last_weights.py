"""Weights of convolutions are in channels_last while a model samples, and in their own layout before and after."""

from __future__ import annotations

import copy

import pytest
import torch
from compiled_graphs.compiler.backends.eager.backend import EagerBackend
from compiled_graphs.compiler.common.counters import Counters
from compiled_graphs.compiler.common.host import Host
from compiled_graphs.compiler.identity.fingerprint import fingerprint
from compiled_graphs.compiler.identity.memory_format import has_layouts
from compiled_graphs.compiler.runtime.channels_last_weights import ChannelsLastWeights
from compiled_graphs.compiler.runtime.running_call import RunningCall
from compiled_graphs.compiler.runtime.step_replay import MIN_STEPS, StepReplay
from networks import CPU, ConvolutionNetwork, ResidualBlock, compile_network, sizes
from recorders import repeat
from torch import nn


class ArrangingHost(Host):
    channels_last_on = frozenset({"cpu"})

    def uses_channels_last(self, region):
        return True


@pytest.fixture
def network():
    return ConvolutionNetwork()


def convolutions(network):
    return [module.weight for module in network.modules() if isinstance(module, nn.Conv2d)]


def is_channels_last(weight):
    return weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()


def test_weights_keep_their_values_and_addresses(network):
    weights = convolutions(network)
    before = [(weight.clone(), weight.data_ptr()) for weight in weights]
    arrangement = ChannelsLastWeights(network, CPU)
    for _ in range(2):
        arrangement.begin()
        assert all(map(is_channels_last, weights))
        assert all(torch.equal(w, value) and w.data_ptr() == at for w, (value, at) in zip(weights, before, strict=True))
        arrangement.end()
        assert all(weight.is_contiguous() for weight in weights)
        assert all(torch.equal(w, value) and w.data_ptr() == at for w, (value, at) in zip(weights, before, strict=True))


@pytest.mark.parametrize("made_in", [torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("arranged_in", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_arrangement_works_in_any_grad_mode(made_in, arranged_in):
    with torch.inference_mode(False), made_in():
        network = ConvolutionNetwork()
    before = [weight.detach().clone() for weight in convolutions(network)]
    arrangement = ChannelsLastWeights(network, CPU)
    with torch.inference_mode(False), arranged_in():
        arrangement.begin()
        assert all(map(is_channels_last, convolutions(network)))
        arrangement.end()
    assert all(map(torch.equal, convolutions(network), before))


@pytest.mark.parametrize(
    ("shape", "has"),
    [((8, 4, 3, 3), True), ((8, 4, 1, 3), True), ((8, 4, 1, 1), False), ((8, 1, 3, 3), False), ((8, 4), False),
     ((8, 4, 3, 3, 3), False)],
)  # fmt: skip
def test_has_layouts_only_if_the_layouts_differ(shape, has):
    weight = torch.empty(shape)
    assert has_layouts(weight) is has
    if weight.ndim == 4:
        assert has_layouts(weight.contiguous(memory_format=torch.channels_last)) is has
        assert not has_layouts(torch.empty(9, *shape[1:])[::3])


@pytest.mark.parametrize("alias", [lambda w: w.detach(), lambda w: nn.Parameter(w.detach()), lambda w: w[1:]])
def test_shared_memory_is_left_alone(network, alias):
    shared, *others = convolutions(network)
    value = shared.detach().clone()
    kept = alias(shared)
    ChannelsLastWeights(network, CPU).begin()
    assert shared.is_contiguous()
    assert torch.equal(shared, value)
    assert torch.equal(kept, alias(value))
    assert all(map(is_channels_last, others))


def test_weight_shared_since_begin_stays_arranged(network):
    weight = convolutions(network)[0]
    arrangement = ChannelsLastWeights(network, CPU)
    arrangement.begin()
    kept, value = weight.detach(), weight.detach().clone()
    arrangement.end()
    assert torch.equal(kept, value)
    assert torch.equal(weight, value)
    del kept
    arrangement.begin()
    arrangement.end()
    assert torch.equal(weight, value)


def test_a_weight_that_two_modules_share_is_arranged_once(network):
    network.blocks[1].conv.weight = network.blocks[0].conv.weight
    before = copy.deepcopy(network)
    arrangement = ChannelsLastWeights(network, CPU)
    arrangement.begin()
    assert torch.equal(network.blocks[1].conv.weight, before.blocks[1].conv.weight)
    arrangement.end()
    assert torch.equal(network.blocks[1].conv.weight, before.blocks[1].conv.weight)


def test_weights_elsewhere_or_replaced_are_left_alone(network):
    network.stem.to("meta")
    arrangement = ChannelsLastWeights(network, CPU)
    arrangement.begin()
    assert network.stem.weight.is_contiguous()
    new = nn.Parameter(torch.randn_like(network.blocks[0].conv.weight, memory_format=torch.contiguous_format))
    value = new.detach().clone()
    network.blocks[0].conv.weight = new
    moved = network.blocks[1].conv.weight
    moved.data = torch.full_like(moved, 2.0, memory_format=torch.contiguous_format)
    arrangement.end()
    assert torch.equal(new, value)
    assert bool((moved == 2.0).all())
    assert network.blocks[2].conv.weight.is_contiguous()


def test_a_network_that_was_in_channels_last_stays_so(network):
    network.to(memory_format=torch.channels_last)
    arrangement = ChannelsLastWeights(network, CPU)
    arrangement.begin()
    arrangement.end()
    assert all(map(is_channels_last, convolutions(network)))


def test_too_little_memory_leaves_the_rest_contiguous(network, monkeypatch):
    def clone(tensor, *_):
        if len([w for w in convolutions(network) if is_channels_last(w)]) == 2:
            raise torch.cuda.OutOfMemoryError("none left")
        return torch.empty_like(tensor).copy_(tensor)

    values = [weight.detach().clone() for weight in convolutions(network)]
    monkeypatch.setattr(torch.Tensor, "clone", clone)
    arrangement = ChannelsLastWeights(network, CPU)
    arrangement.begin()
    assert [is_channels_last(weight) for weight in convolutions(network)] == [True, True, False, False]
    assert all(map(torch.equal, convolutions(network), values))


def test_layout_is_not_in_an_arranged_regions_fingerprint():
    contiguous, other = ResidualBlock(), ResidualBlock().to(memory_format=torch.channels_last)
    assert fingerprint(contiguous, ArrangingHost()) == fingerprint(other, ArrangingHost())
    assert fingerprint(contiguous, ArrangingHost()) == fingerprint(contiguous, Host())


class Watching(EagerBackend):
    """Records the addresses and layouts of the convolution weights that its executables get."""

    def __init__(self):
        self.seen = []

    def compile(self, exported):
        return Watched(super().compile(exported), exported.spec, self.seen)


class Watched:
    def __init__(self, executable, spec, seen):
        self.executable, self.seen = executable, seen
        self.to_bytes = executable.to_bytes
        self.places = [place for place, weight in enumerate(spec.weights) if len(weight.shape) == 4]

    def __call__(self, *tensors):
        self.seen += [(tensors[place].data_ptr(), is_channels_last(tensors[place])) for place in self.places]
        return self.executable(*tensors)


def test_graphs_use_arranged_weights_and_copy_others(network, registry):
    reference, backend = copy.deepcopy(network), Watching()
    compiled = compile_network(network, registry, backend=backend, host=ArrangingHost())
    inputs, own = network.inputs(sizes()), [block.conv.weight.data_ptr() for block in network.blocks]
    arrangement = ChannelsLastWeights(network, CPU)
    network(*inputs)  # the first call is checked against eager
    for is_arranged in (False, True, True, False, True):
        (arrangement.begin if is_arranged else arrangement.end)()
        backend.seen.clear()
        torch.testing.assert_close(network(*inputs), reference(*inputs))
        assert all(is_laid_out for _, is_laid_out in backend.seen)
        assert ([at for at, _ in backend.seen] == own) is is_arranged
        assert len(backend.seen) == len(own)
    assert not compiled.counters.eager_calls
    assert compiled.counters.compiles == 1


def test_no_replay_on_weights_in_another_layout(network):
    class Recorded(ArrangingHost):
        def capture_blocker(self, context, strings):
            return None

        def steps(self, context):
            return MIN_STEPS

    recordings = StepReplay(network, Recorded(), CPU, Counters(), repeat)
    arrangement = ChannelsLastWeights(network, CPU)
    inputs = network.inputs(sizes())
    expected = network(*inputs)
    arrangement.begin()
    for _ in range(3):
        recordings.serve(network, inputs, {}, RunningCall(None))
    assert recordings.counters.replays == 1
    arrangement.end()
    torch.testing.assert_close(recordings.serve(network, inputs, {}, RunningCall(None)), expected)
    assert recordings.counters.replays == 1
