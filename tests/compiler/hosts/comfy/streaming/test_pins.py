"""Pinned memory that ComfyUI hands from one layer to another, under copies that are still under way."""

from __future__ import annotations

import random

import pytest
import torch
from compiled_graphs.compiler.hosts.comfy.streaming.pins import may_take_pin
from compiled_graphs.compiler.hosts.comfy.streaming.staging_ring import StagingRing
from torch import nn

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
    assert not may_take_pin(layer) or "pin" not in layer._pins["weights"]


def test_a_layer_without_a_priority_may_take_any(state):
    give_pin(layer_with(state, 8), 9)
    assert may_take_pin(layer_with(state, 8))
    assert not may_take_pin(layer_with(state, 64))


class Copies:
    """Stands for the event after the last copy."""

    def __init__(self, is_over):
        self.is_over, self.waits = is_over, 0

    def query(self):
        return self.is_over

    def synchronize(self):
        self.waits += 1


@pytest.mark.parametrize(("is_over", "priority", "waits"), [(False, 5, 1), (True, 5, 0), (False, 1, 0)])
def test_the_cpu_waits_for_copies_only_where_memory_may_be_taken(is_over, priority, waits, state):
    give_pin(layer_with(state, 8), 3)
    ring = StagingRing(torch.device("cpu"))
    ring._copied = copies = Copies(is_over)
    ring.wait_for_pins([layer_with(state, 8, priority), nn.ReLU()])
    assert copies.waits == waits
