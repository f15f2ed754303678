from __future__ import annotations

from compiled_graphs.compiler.common.tensor_slots import layer_slots, modules_of, owned_tensor_slots
from networks import transformer
from torch import nn


def network():
    """A network with a shared module, an absent one and an absent tensor."""
    made = nn.ModuleList([transformer(), nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)])
    made.append(made[1])
    made.register_module("absent", None)
    return made


def test_modules_come_in_torchs_order():
    made = network()
    assert modules_of(made) == list(made.modules())


def test_layers_and_slots_are_those_with_names():
    made = network()
    named = [(layer, id(group), name) for _, layer, (group, name) in owned_tensor_slots(made)]
    assert [(layer, id(group), name) for layer, (group, name) in layer_slots(made)] == named
