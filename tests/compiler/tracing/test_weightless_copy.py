from __future__ import annotations

import threading

import torch
from compiled_graphs.compiler.common.host import Host
from compiled_graphs.compiler.common.tensor_slots import tensor_slots
from compiled_graphs.compiler.tracing.weightless_copy import weightless_copy
from networks import ResidualBlock, TransformerBlock, transformer
from torch import nn


class Manager(Host):
    volatile_attributes = frozenset({"loaded_bytes", "casts"})
    traced_attributes = frozenset({"casts"})


def copy_of(module, host=None):
    return weightless_copy(module, host or Host(), lambda t: torch.empty_like(t, device="meta"))


def names(module):
    return [name for name, _ in tensor_slots(module)]


def test_every_parameter_and_buffer_is_replaced():
    block = TransformerBlock()
    block.register_buffer("table", torch.ones(3))
    copied = copy_of(block)
    assert names(copied) == names(block)
    assert all(group[name].device.type == "meta" for _, (group, name) in tensor_slots(copied))


def test_the_model_keeps_its_own_weights():
    block = TransformerBlock()
    before = dict(block.named_parameters())
    copy_of(block)
    assert all(block.get_parameter(name) is weight for name, weight in before.items())


def test_skeleton_weights_are_not_the_models():
    block = TransformerBlock()
    gate = block.gate
    for _, (group, name) in tensor_slots(copy_of(block)):
        group[name] = torch.zeros(1)
    assert block.gate is gate


def test_skeleton_attributes_are_not_the_models():
    block = TransformerBlock()
    block.seen = {}
    block.order = []
    copied = copy_of(block)
    copied.eps = 5.0
    copied.seen["call"] = 1
    copied.order.append(1)
    assert (block.eps, block.seen, block.order) == (1e-6, {}, [])


def test_hooks_are_left_out():
    network = transformer()
    network.blocks[0].mlp.register_forward_hook(lambda *args: args.missing)
    network.blocks[1].register_forward_pre_hook(lambda *args: args.missing)
    assert copy_of(network)(torch.zeros(1, 3, 16, device="meta")).shape == (1, 3, 16)


def test_hooks_on_a_skeleton_stay_on_it():
    block = TransformerBlock()
    copy_of(block).register_forward_pre_hook(lambda *args: None)
    assert not block._forward_pre_hooks


def test_a_replaced_forward_is_left_out():
    block = ResidualBlock()
    block.forward = block.conv.forward = lambda *args: None
    copied = copy_of(block)
    assert "forward" not in copied.__dict__
    assert "forward" not in copied.conv.__dict__


def test_the_hosts_volatile_attributes_are_left_out():
    block = ResidualBlock()
    block.loaded_bytes = 7
    assert not hasattr(copy_of(block, Manager()), "loaded_bytes")
    assert copy_of(block).loaded_bytes == 7


def test_traced_attributes_are_copied():
    block = ResidualBlock()
    block.casts = True
    assert copy_of(block, Manager()).casts


def test_a_module_that_stands_twice_is_copied_once():
    linear = nn.Linear(2, 2)
    copied = copy_of(nn.ModuleList([linear, linear]))
    assert copied[0] is copied[1]
    assert copied[0] is not linear


def test_absent_parameters_and_modules_stay_absent():
    block = nn.Linear(2, 2, bias=False)
    block.register_module("extra", None)
    copied = copy_of(block)
    assert copied.bias is None
    assert copied.extra is None


def test_configuration_is_kept():
    copied = copy_of(TransformerBlock(heads=4, eps=1e-3).eval())
    assert (copied.attention.heads, copied.eps, copied.training) == (4, 1e-3, False)


def test_slots_are_all_named_parameters():
    block = TransformerBlock()
    assert sorted(names(block)) == sorted(name for name, _ in block.named_parameters())


def test_slots_do_not_depend_on_registration_order():
    """A host that fills empty layers from a file registers them in the file's order."""
    block, other = TransformerBlock(), TransformerBlock()
    for layer in other.modules():
        layer._parameters = dict(reversed(layer._parameters.items()))
    assert [name for name, _ in other.named_parameters()] != [name for name, _ in block.named_parameters()]
    assert names(other) == names(block)


def test_slots_of_equal_blocks_match():
    assert names(TransformerBlock()) == names(TransformerBlock())


def test_a_slot_is_where_the_module_keeps_the_tensor():
    block = TransformerBlock()
    slots = dict(tensor_slots(block))
    group, name = slots["mlp.0.weight"]
    group[name] = nn.Parameter(torch.zeros(1))
    assert block.mlp[0].weight is group[name]


def test_a_module_with_a_lock_can_be_copied():
    block = ResidualBlock()
    block.lock = threading.Lock()
    assert copy_of(block).lock is block.lock
