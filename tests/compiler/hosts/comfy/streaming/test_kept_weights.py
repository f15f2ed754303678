"""Where weights do not fit, some stay on the GPU for a sampling, and all blocks wait for equally many bytes."""

from __future__ import annotations

import itertools

import pytest
import torch
from compiled_graphs.compiler.hosts.comfy.rules.host import HOST
from compiled_graphs.compiler.hosts.comfy.streaming import casts, kept_weights, streamed_weights
from compiled_graphs.compiler.hosts.comfy.streaming.kept_weights import KeptWeights, evenly
from rows import adapted, low_rank
from test_streamed_weights import assert_image, compiled, layers_of
from torch import nn
from vbar import pin

pytestmark = [
    pytest.mark.usefixtures("traced_once"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in for a VBAR lies in the CPU's memory"),
]


@pytest.fixture
def half_full(model, plain, sample, registry, vbar):
    """A compiled model, in pinned memory, half of whose weights fit."""
    ours = compiled(model)
    assert_image(sample, ours, plain, vbar)
    pin(ours)
    vbar.evict()
    vbar.limit = vbar.size // 2
    return ours


@pytest.fixture
def kept_bytes(monkeypatch):
    """How much was kept when each call of a network had ended."""
    noted, plan = [], streamed_weights.StreamedWeights._plan_what_stays

    def note(weights):
        noted.append(sum(copy.weights["_v_weight"].nbytes for kept in alive for copy in kept._copies.values()))
        return plan(weights)

    alive, make = [], KeptWeights.__init__

    def remember(kept):
        make(kept)
        alive.append(kept)

    monkeypatch.setattr(KeptWeights, "__init__", remember)
    monkeypatch.setattr(streamed_weights.StreamedWeights, "_plan_what_stays", note)
    return noted


def kept_of(model):
    return streamed_weights.weights_of(model.model.diffusion_model, torch.device("cpu"), HOST).kept


def test_a_share_of_all_weights_stays(kept_bytes, half_full, plain, sample, vbar):
    assert_image(sample, half_full, plain, vbar, seed=1, steps=4)
    first, *others = kept_bytes[-4:]
    assert first == 0, "the first call tells how much room there is"
    assert min(others) > 0.3 * vbar.size
    assert kept_of(half_full).is_empty, "copies outlive the sampling"


def test_the_next_sampling_keeps_them_from_its_first_call(kept_bytes, half_full, plain, sample, vbar):
    for seed in (1, 2):
        assert_image(sample, half_full, plain, vbar, seed=seed, steps=3)
    assert min(kept_bytes[-3:]) > 0.3 * vbar.size


def test_what_stays_is_copied_once(half_full, plain, sample, vbar, monkeypatch):
    asked, memory = [], KeptWeights.memory
    monkeypatch.setattr(KeptWeights, "memory", lambda *args: asked.append(made := memory(*args)) or made)
    assert_image(sample, half_full, plain, vbar, seed=1, steps=5)
    wanted = kept_of(half_full)._wanted
    assert 0 < sum(made is not None for made in asked) <= 2 * len(wanted), "the plan may grow once"


def test_a_region_that_runs_longer_brings_more(half_full, plain, sample, vbar, monkeypatch):
    def kept_of_longer():
        return sum(vars(layer)["_v"][2] for layer in longer.layers() if id(vars(layer)) in kept_of(half_full)._wanted)

    assert_image(sample, half_full, plain, vbar, seed=1, steps=3)
    weights = streamed_weights.weights_of(half_full.model.diffusion_model, torch.device("cpu"), HOST)
    longer = max(weights.prefetcher.order(), key=lambda source: source.size)
    before = kept_of_longer()
    assert before > 0
    seconds = property(lambda source: 100.0 if source is longer else 1.0)
    monkeypatch.setattr(streamed_weights.StreamedSource, "seconds", seconds)
    assert_image(sample, half_full, plain, vbar, seed=2, steps=3)
    assert kept_of_longer() < before


def test_weights_that_fit_again_are_left_to_their_pages(half_full, plain, sample, vbar):
    assert_image(sample, half_full, plain, vbar, seed=1, steps=3)
    assert kept_of(half_full)._wanted
    vbar.limit = 2 * vbar.size
    assert_image(sample, half_full, plain, vbar, seed=2, steps=3)
    assert not kept_of(half_full)._wanted


def test_loras_stay_merged(half_full, plain, sample, vbar, monkeypatch):
    """A LoRA is merged into what stays once, and into the rest at each call."""
    merged, resolve = [], casts.resolve

    def note(layer, *args, **kwargs):
        merged.append(vars(layer)["weight_lowvram_function"] is not None)
        return resolve(layer, *args, **kwargs)

    monkeypatch.setattr(casts, "resolve", note)
    counts = []
    for wants in (lambda *args: False, KeptWeights.wants):
        monkeypatch.setattr(KeptWeights, "wants", wants)
        for strength in (1.0, 0.5):
            merged.clear()
            ours, theirs = adapted(low_rank)(half_full, strength), adapted(low_rank)(plain, strength)
            assert_image(sample, ours, theirs, vbar, seed=1, steps=4)
            counts.append(sum(merged))
    assert counts[0] == counts[1] > 0
    assert counts[3] < 0.75 * counts[1]


@pytest.mark.parametrize("where", ["_empty", "_copied"])
def test_too_little_memory_for_a_copy_keeps_fewer(where, half_full, plain, sample, vbar, monkeypatch):
    made = []

    def refuse(*args, **kwargs):
        made.append(1)
        raise torch.cuda.OutOfMemoryError

    if where == "_copied":
        monkeypatch.setattr(KeptWeights, "memory", lambda *args: None)
    monkeypatch.setattr(kept_weights, where, refuse)
    assert_image(sample, half_full, plain, vbar, seed=1, steps=3)
    assert len(made) == 1, "there is no second try"
    assert not kept_of(half_full)._wanted


def test_a_call_without_memory_lets_copies_go(half_full, sample, registry, vbar):
    kept = kept_of(half_full)
    layers = layers_of(half_full)
    kept.open()
    kept.plan([layers], sum(vars(layer)["_v"][2] for layer in layers), [1.0])
    for layer in layers:
        kept.keep(layer, {"_v_weight": layer.weight, "_v_bias": layer.bias})
    most = sum(layer.weight.nbytes + (0 if layer.bias is None else layer.bias.nbytes) for layer in layers) // 2
    weights = streamed_weights.weights_of(half_full.model.diffusion_model, torch.device("cpu"), HOST)
    assert weights.give_way(1)
    assert kept.is_empty
    kept.plan([layers], 10 * most, [1.0])
    assert 0 < sum(vars(layer)["_v"][2] for layer in layers if kept.wants(layer)) <= most


@pytest.mark.parametrize("change", ["weight_lowvram_function", "weight_function"])
def test_a_changed_layer_has_no_copy(change, half_full, monkeypatch):
    kept, layer = kept_of(half_full), layers_of(half_full)[0]
    kept.open()
    kept.plan([[layer]], 2 * vars(layer)["_v"][2], [1.0])
    assert kept.keep(layer, {"_v_weight": layer.weight})["_v_weight"] is not layer.weight
    assert kept.find(layer) is not None
    monkeypatch.setattr(layer, change, [object()])
    assert kept.find(layer) is None


@pytest.mark.parametrize("pace", [1, 3], ids=["regions run alike", "the last ones run longer"])
@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_no_region_has_more_to_bring_while_it_runs(share, pace):
    regions = [[nn.Module() for _ in range(12)] for _ in range(10)]
    seconds = [1.0] * 5 + [float(pace)] * 5
    for index, layer in enumerate(itertools.chain(*regions)):
        layer._v = (None, 0, 1000 + 37 * index % 911 * (1 + index // 60))
    total, largest = (each(layer._v[2] for layer in itertools.chain(*regions)) for each in (sum, max))
    chosen = {id(layer) for layer in evenly(regions, int(share * total), seconds)}
    rests = [sum(layer._v[2] for layer in region if id(layer) not in chosen) for region in regions]
    wholes = [sum(layer._v[2] for layer in region) for region in regions]
    assert total - int(share * total) <= sum(rests) <= total - share * total + 2 * largest
    most = max(rest / each for rest, each in zip(rests, seconds, strict=True))
    for rest, whole, each in zip(rests, wholes, seconds, strict=True):
        assert most - rest / each <= largest or rest == whole, "a region brings all it has, or as much as the others"


def test_a_layer_of_two_regions_counts_once():
    layer = nn.Module()
    layer._v = (None, 0, 100)
    assert evenly([[layer], [layer]], 150, [1.0, 1.0]) == [layer]


def test_copies_share_one_allocation(half_full, plain, sample, vbar, monkeypatch):
    sizes, empty = [], kept_weights._empty
    monkeypatch.setattr(kept_weights, "_empty", lambda size, device: sizes.append(size) or empty(size, device))
    for seed in (1, 2):
        sizes.clear()
        assert_image(sample, half_full, plain, vbar, seed=seed, steps=3)
    assert len(sizes) == 1
    assert sizes[0] > 0.3 * vbar.size
