"""Weights that find no room in their pages pass through a ring: one block, and a part of the next."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from compiled_graphs.compiler.hosts.comfy import comfy_compat
from compiled_graphs.compiler.hosts.comfy.rules.host import HOST
from compiled_graphs.compiler.hosts.comfy.streaming import staging_ring, streamed_weights
from compiled_graphs.compiler.hosts.comfy.streaming.kept_weights import KeptWeights
from compiled_graphs.compiler.hosts.comfy.streaming.staging_ring import Staging, StagingRing
from rows import adapted, low_rank
from test_streamed_weights import assert_image, compiled, layers_of
from vbar import pin

pytestmark = [
    pytest.mark.usefixtures("traced_once"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in for a VBAR lies in the CPU's memory"),
]


@pytest.fixture(autouse=True)
def _another_stream(monkeypatch):
    """Weights come ahead, as on a GPU."""
    monkeypatch.setattr(comfy_compat, "can_bring_ahead", lambda: True)


@pytest.fixture
def staged(monkeypatch):
    """The sizes of what passes through rings, in order."""
    sizes, stage = [], StagingRing.stage

    def note(ring, staging, *args):
        before = staging.size
        is_whole = stage(ring, staging, *args)
        sizes.append(staging.size - before)
        return is_whole

    monkeypatch.setattr(StagingRing, "stage", note)
    return sizes


def stage(ring, layers, is_next=True):
    """Stage layers as one region; return where they lie."""
    staging = Staging(layers, torch.device("cpu"))
    ring.stage(staging, HOST, KeptWeights(), is_next)
    return staging


@pytest.fixture
def layers(model, sample, registry, vbar):
    """Layers in pinned memory that have no room in their pages."""
    sample(compiled(model), "tiny_sd15")
    pin(model)
    vbar.evict()
    vbar.limit = 0
    return layers_of(model)


def opened(size):
    """Return a ring for regions of this size."""
    ring = StagingRing(torch.device("cpu"))
    ring.reserve(size)
    ring.open()
    return ring


def bytes_in_ring(layers):
    return sum(-(-layer._pins["weights"]["pin"].nbytes // 512) * 512 for layer in layers)


def ring_of(model):
    return streamed_weights.weights_of(model.model.diffusion_model, torch.device("cpu"), HOST).ring


class Stream:
    """Notes the events that it waits for."""

    def __init__(self):
        self.waited = []
        self.wait_event = self.waited.append

    def as_context(self, stream):
        return nullcontext()


def test_each_part_of_what_is_overwritten_is_waited_for():
    """Weights that two streams overwrite, each a part of them."""
    ring, read = opened(1024), Staging([], torch.device("cpu"))
    ring.take(read, torch.zeros(1536, dtype=torch.uint8), Stream())
    read.end()
    read.done = "the graph that reads them"
    for size in (1024, 512):
        stream = Stream()
        ring.take(Staging([], torch.device("cpu")), torch.zeros(size, dtype=torch.uint8), stream)
        assert stream.waited == [read.done]


def test_copies_before_an_error_are_waited_for(layers, monkeypatch):
    """A later copy may overwrite what a region had begun to bring when it failed."""
    ring, end = opened(bytes_in_ring(layers)), object()
    memory = ring._allocated()
    monkeypatch.setattr(ring, "_allocated", lambda: memory)
    monkeypatch.setattr(ring, "_on_stream", nullcontext)
    ring._stream = SimpleNamespace(record_event=lambda: end, wait_event=lambda event: None)
    has_room, asked = staging_ring.has_room, []

    def fail_at_third(layer):
        asked.append(layer)
        if len(asked) == 3:
            raise RuntimeError("a fault failed")
        return has_room(layer)

    monkeypatch.setattr(staging_ring, "has_room", fail_at_third)
    staging = Staging(layers, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="a fault failed"):
        ring.stage(staging, HOST, KeptWeights(), True)
    assert len(staging.origins) == 2
    assert staging.arrived is end


@pytest.mark.parametrize("ahead", [0, 100_000, 2**24], ids=["no room ahead", "a part", "all of it"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_the_image_is_the_same(share, ahead, model, plain, sample, registry, vbar, staged, monkeypatch):
    monkeypatch.setattr(staging_ring, "AHEAD_BYTES", ahead)
    ours = compiled(model)
    assert_image(sample, ours, plain, vbar)
    assert sum(staged) == 0, "ComfyUI brings weights that are not in pinned memory"
    pin(ours)
    vbar.evict()
    vbar.limit = int(vbar.size * share)
    for seed in range(2):
        assert_image(sample, ours, plain, vbar, seed=seed, steps=3)
    assert sum(staged) > 0
    assert ring_of(ours)._memory is None, "the ring outlives the sampling"


def test_weights_that_have_room_do_not_pass_through(model, plain, sample, registry, vbar, staged):
    ours = compiled(model)
    assert_image(sample, ours, plain, vbar)
    pin(ours)
    vbar.evict()
    assert_image(sample, ours, plain, vbar, steps=3)
    assert sum(staged) == 0


def test_loras_are_left_to_comfyui(model, plain, sample, registry, vbar, staged):
    ours = compiled(model)
    assert_image(sample, ours, plain, vbar)
    pin(ours)
    vbar.evict()
    vbar.limit = 0
    for strength in (1.0, 0.5):
        assert_image(sample, adapted(low_rank)(ours, strength), adapted(low_rank)(plain, strength), vbar, steps=2)
    assert sum(staged) > 0, "layers without a LoRA pass through the ring"


def test_a_sampling_without_memory_for_the_ring_goes_on(model, plain, sample, registry, vbar, monkeypatch):
    ours = compiled(model)
    assert_image(sample, ours, plain, vbar)
    pin(ours)
    vbar.evict()
    vbar.limit = 0

    def refuse(ring):
        ring._is_open = False

    monkeypatch.setattr(StagingRing, "_allocated", refuse)
    assert_image(sample, ours, plain, vbar, steps=2)


def test_nothing_is_overwritten_that_somebody_waits_for(layers, monkeypatch):
    layers = layers[:6]
    monkeypatch.setattr(staging_ring, "AHEAD_BYTES", bytes_in_ring(layers) // 2)
    ring = opened(bytes_in_ring(layers))
    first = stage(ring, layers)
    second = stage(ring, layers)
    assert not first.left
    assert second.weights, "there is room for a part of the next region"
    assert second.left, "a region was overwritten before its graph ran"
    for layer in layers:
        assert torch.equal(first.weights[id(vars(layer))]["_v_weight"], layer.weight)
    first.end()
    third = stage(ring, layers)
    for layer in layers:
        for staging in (second, third):
            if found := staging.weights.get(id(vars(layer))):
                assert torch.equal(found["_v_weight"], layer.weight)
    assert third.weights


def test_a_later_region_waits_for_room_instead_of_being_left(layers, monkeypatch):
    layers = layers[:6]
    monkeypatch.setattr(staging_ring, "AHEAD_BYTES", bytes_in_ring(layers) // 2)
    ring = opened(bytes_in_ring(layers))
    first, later = stage(ring, layers), stage(ring, layers, is_next=False)
    assert later.weights
    assert later.pending
    assert not later.left
    first.end()
    assert ring.stage(later, HOST, KeptWeights(), True)
    assert not later.left
    for layer in layers:
        assert torch.equal(later.weights[id(vars(layer))]["_v_weight"], layer.weight)


def test_the_ring_fits_what_calls_need(layers):
    ring = opened(2 * staging_ring.AHEAD_BYTES)
    stage(ring, layers[:3]).end()
    ring.end_call()
    stage(ring, layers[:3]).end()
    assert ring._memory.numel() == 2 * bytes_in_ring(layers[:3])
    ring.end_call()
    ring.end_call()
    assert ring._memory is None, "a call for which all weights had room keeps no ring"
    ring.close()
    ring.open()
    assert ring._memory is None
    stage(ring, layers[:3]).end()
    ring.close()
    assert ring._memory is None
    ring.open()
    assert ring._memory is not None, "pages would be filled and emptied again"


@pytest.mark.parametrize("change", ["weight_function", "weight_lowvram_function", "pin", "layers", "nothing"])
def test_what_an_earlier_call_staged_is_looked_at_again(change, layers, model, monkeypatch):
    staging, layers = stage(opened(2**24), layers[:3]), layers[:3]
    if change == "pin":
        pin(model)
    elif change == "layers":
        layers = layers[:2]
    elif change != "nothing":
        monkeypatch.setattr(layers[1], change, [object()])
    assert staging.holds(layers, HOST, KeptWeights()) == (change == "nothing")


def test_the_first_regions_are_staged_between_calls(model, plain, sample, registry, vbar, monkeypatch):
    ours = compiled(model)
    assert_image(sample, ours, plain, vbar)
    pin(ours)
    vbar.evict()
    vbar.limit = 0
    found, holds = [], Staging.holds
    monkeypatch.setattr(Staging, "holds", lambda *args: found.append(holds(*args)) or found[-1])
    assert_image(sample, ours, plain, vbar, seed=1, steps=4)
    assert len(found) >= 3, "between four steps"
    assert all(found)
