"""Layers with a low-rank branch: the same eagerly and in a graph, at every rank."""

from __future__ import annotations

import pytest
import torch
from compiled_graphs.compiler.common.host import Host
from compiled_graphs.compiler.common.tensor_slots import tensor_slots
from compiled_graphs.compiler.identity.call_signature import bind, read
from compiled_graphs.compiler.identity.fingerprint import fingerprint
from compiled_graphs.compiler.identity.low_rank import DOWN, is_factor, sizes_of
from compiled_graphs.compiler.tracing.export import export_region
from compiled_graphs.compiler.tracing.graph_request import GraphRequest
from compiled_graphs.compiler.tracing.low_rank import attach, detach
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x):
        return x + self.two(torch.nn.functional.gelu(self.one(input=x)))


def branched(*ranks, layers=("one", "two")):
    """Return a block whose layers have branches of these ranks, and how to take them away."""
    block, handles = Block(), []
    for name, rank in zip(layers, ranks, strict=True):
        layer = getattr(block, name)
        down, up = torch.randn(rank, layer.in_features), torch.randn(rank, layer.out_features)
        handles.append((layer, attach(layer, down, up)))
    return block, handles


def exported(block, shape=(2, 32, 24), device="cpu"):
    signature, _ = read(bind(Block, (torch.randn(*shape),), {}, frozenset()))
    sizes = (shape,), ((True, True, False),)
    device = torch.device(device)
    request = GraphRequest("block", block, fingerprint(block, Host()), signature, device, (torch.float32,), *sizes)
    return export_region(request, Host())


def weights_of(block):
    return [group[name] for _, (group, name) in tensor_slots(block)]


def merged(block):
    """Return a block with the branches in its weights."""
    plain = Block()
    with torch.no_grad():
        for name in ("one", "two"):
            layer, own = getattr(block, name), getattr(plain, name)
            down, up = (layer._buffers[key] for key in sorted(layer._buffers))
            own.weight.copy_(layer.weight + up.t() @ down)
            own.bias.copy_(layer.bias)
    return plain


@torch.no_grad()
def test_one_graph_serves_every_rank():
    program = exported(branched(16, 16)[0]).program.module()
    for rank in (16, 48, 160):
        block, _ = branched(rank, rank)
        x = torch.randn(3, 7, 24)
        expected = merged(block)(x)
        torch.testing.assert_close(block(x), expected, atol=1e-2, rtol=1e-4)
        torch.testing.assert_close(program(weights_of(block), [x]), block(x))


def test_a_branch_is_part_of_what_a_block_is_and_its_rank_is_not():
    blocks = [Block(), branched(16, 16)[0], branched(32, 32)[0], branched(16, layers=("one",))[0]]
    plain, one, other, in_part = (fingerprint(block, Host()) for block in blocks)
    assert one == other
    assert len({plain, one, in_part}) == 3


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_spec_has_the_rank_as_a_symbol_and_no_guard_on_it(device):
    spec = exported(branched(16, 16)[0], device=device).spec
    factors = [weight for weight in spec.weights if is_factor(weight.name)]
    ranks = {weight.shape[0] for weight in factors}
    assert len(factors) == 4
    assert len(ranks) == 1
    assert all(isinstance(rank, str) for rank in ranks)
    assert not any(rank in guard for rank in ranks for guard in spec.guards)
    assert ranks.isdisjoint(size for item in spec.inputs for size in item.sizes)
    assert all(isinstance(size, int) for weight in spec.weights if weight not in factors for size in weight.shape)


def test_a_layer_without_its_branch_is_as_before():
    block, handles = branched(16, 16)
    before = Block()
    assert block.state_dict().keys() == before.state_dict().keys()
    for layer, handle in handles:
        detach(layer, handle)
    assert fingerprint(block, Host()) == fingerprint(before, Host())
    assert not any(module._forward_hooks or module._buffers for module in block.modules())


@torch.no_grad()
def test_factors_of_another_dtype_are_cast():
    block, _ = branched(16, 16)
    x = torch.randn(3, 7, 24)
    expected = block(x)
    for layer in (block.one, block.two):
        for name, factor in layer._buffers.items():
            layer._buffers[name] = factor.double()
    assert torch.equal(block(x), expected)


def test_only_the_rank_is_left_out_of_sizes():
    assert sizes_of(f"attn.{DOWN}", (16, 40)) == ("rank", 40)
    assert sizes_of("weight", (16, 40)) == (16, 40)
