"""Pinned memory that ComfyUI hands from one layer to another, under copies that are still under way."""

from __future__ import annotations

import os
import random
from types import SimpleNamespace

import pytest
import torch
from compiled_graphs.compiler.hosts.comfy import comfy_compat
from compiled_graphs.compiler.hosts.comfy.rules.host import HOST
from compiled_graphs.compiler.hosts.comfy.streaming import streamed_weights, vbar_places
from compiled_graphs.compiler.hosts.comfy.streaming.pins import may_lose_pins, may_take_pin
from compiled_graphs.compiler.hosts.comfy.streaming.staging_ring import StagingRing
from compiled_graphs.compiler.hosts.comfy.streaming.vbar_places import resident
from test_streamed_weights import assert_image, compiled
from torch import nn
from vbar import PAGE, VBAR, pin

pinned_memory = pytest.importorskip("comfy.pinned_memory")
pytestmark = pytest.mark.skipif(not hasattr(pinned_memory, "_steal_pin"), reason="this ComfyUI hands no memory on")
WIDTHS = (8, 64)


@pytest.fixture
def state():
    """What ComfyUI knows of one model's pinned memory: nothing is pinned."""
    return {subset: (None, [], [0], [0], [0], {}) for subset in ("weights", "weights-loaded")}


def layer_with(state, width, priority=None):
    layer = nn.Linear(width, width)
    layer._pin_state = state
    if priority is not None:
        layer._pins = {"weights": {"balancer_priority": priority}}
    return layer


def size_of(layer):
    from comfy.memory_management import vram_aligned_size

    return vram_aligned_size([layer.weight, layer.bias])


def give_pin(layer, priority):
    """Have a layer's bytes in pinned memory, as `pin_memory` notes it."""
    _, stack, *_, buckets = layer._pin_state["weights"]
    pin = {"pin": torch.empty(size_of(layer), dtype=torch.uint8), "registered": True, "stack_index": len(stack)}
    layer._pins = {"weights": {**pin, "balancer_priority": priority}}
    stack.append((layer, 0))
    pinned_memory._add_to_bucket(layer, layer._pins["weights"], buckets, size_of(layer), priority)


def takes(layer, priority):
    """Have ComfyUI look for pinned memory for a layer; return whether it took another layer's."""
    _, stack, *_, buckets = layer._pin_state["weights"]
    layer.__dict__.setdefault("_pins", {}).setdefault("weights", {"balancer_priority": priority})
    return bool(pinned_memory._steal_pin(layer, stack, buckets, size_of(layer), priority, "weights"))


@pytest.mark.parametrize("seed", range(20))
def test_it_is_known_when_comfyui_takes_a_layers_memory(seed, state):
    chosen = random.Random(seed)
    for _ in range(chosen.randrange(4)):
        give_pin(layer_with(state, chosen.choice(WIDTHS)), chosen.randrange(10))
    priority = chosen.randrange(10)
    layer = layer_with(state, chosen.choice(WIDTHS), priority)
    assert may_take_pin(layer) == takes(layer, priority)


def test_a_layer_takes_memory_with_its_first_cast(state):
    give_pin(layer_with(state, 8), 1)
    assert may_take_pin(layer_with(state, 8, 2))
    assert not may_take_pin(layer_with(state, 64, 2))
    assert not may_take_pin(layer_with(state, 8))
    assert may_take_pin(layer_with(state, 8), is_cast=True)
    assert not may_take_pin(layer_with(state, 64), is_cast=True)
    assert takes(layer_with(state, 8), 2)


def test_layers_in_their_pages_take_none(state, vbar):
    give_pin(layer_with(state, 64), 1)
    layer = layer_with(state, 64, 2)
    layer._v, layer._v_signature = vbar.alloc(size_of(layer)), None
    assert may_lose_pins([layer])
    layer._v_signature = vbar.fault(layer._v)
    assert not may_lose_pins([layer])
    vbar.unpin(layer._v)
    vbar.evict()
    assert may_lose_pins([layer])
    assert vbar_places.fault(layer._v) is not None
    assert may_lose_pins([layer])  # its page is there again, and nothing in it


@pytest.mark.parametrize(("available", "pinned", "may_lose"), [(32, 0, False), (32, 60, True), (4, 0, True)])
def test_nothing_is_taken_where_there_is_ram(available, pinned, may_lose, state, vbar, monkeypatch):
    import comfy.model_management as management
    import psutil

    monkeypatch.setattr(management, "MAX_PINNED_MEMORY", 60 * 2**30)
    monkeypatch.setattr(management, "TOTAL_PINNED_MEMORY", pinned * 2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available * 2**30))
    give_pin(layer_with(state, 64), 1)
    layer = layer_with(state, 64, 2)
    layer._v, layer._v_signature = vbar.alloc(size_of(layer)), None
    assert may_lose_pins([layer]) == (may_lose or os.name == "nt")


def test_pages_of_two_vbars_are_told_apart(vbar):
    other = VBAR(4 * PAGE)
    places = [vbar.alloc(PAGE), other.alloc(PAGE)]
    other.fault(places[1])
    assert resident(places) == [False, True]
    vbar.fault(places[0])
    assert resident(places) == [True, True]


def test_no_page_is_there_beyond_those_of_the_vbar(vbar, monkeypatch):
    """ComfyUI has it reserve ten times the model, and comfy-aimdo no more than the GPU has."""
    inside, beyond = vbar.alloc(PAGE), vbar.alloc(2 * PAGE)
    vbar.fault(inside)
    flags = vbar.get_residency()[:1]
    monkeypatch.setattr(vbar, "get_residency", lambda: flags)
    assert resident([inside, beyond]) == [True, False]


class Copies:
    """Stands for the event after the last copy."""

    def __init__(self):
        self.waits = 0

    def synchronize(self):
        self.waits += 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in for a VBAR lies in the CPU's memory")
@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("may_lose", [True, False])
def test_nothing_is_copied_ahead_while_memory_may_be_taken(
    may_lose, model, plain, sample, registry, vbar, streams, monkeypatch
):
    ours = compiled(model)
    sample(ours, "tiny_sd15")
    pin(model)
    vbar.evict()
    vbar.limit = 0
    monkeypatch.setattr(comfy_compat, "can_bring_ahead", lambda: True)
    asked = []
    monkeypatch.setattr(
        streamed_weights, "may_lose_pins", lambda layers, are_cast=False: asked.append(are_cast) or may_lose
    )
    ring = streamed_weights.weights_of(model.model.diffusion_model, torch.device("cpu"), HOST).ring
    ring._copied = copies = Copies()
    staged, begin = [], StagingRing._begin_copy

    def note(*args):
        weights = begin(*args)
        staged.append(weights is not None)
        return weights

    monkeypatch.setattr(StagingRing, "_begin_copy", note)
    assert_image(sample, ours, plain, vbar, steps=2)
    assert any(staged) != may_lose
    assert bool(copies.waits) == may_lose
    assert set(asked) == {False, True}, "of all layers once a call, and of those that a block has cast"
