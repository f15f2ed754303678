"""What a network's regions are, through changes that come and go."""

from __future__ import annotations

import pytest
import torch
from compiled_graphs.compiler.backends.eager.backend import EagerBackend
from compiled_graphs.compiler.common.host import Host
from compiled_graphs.compiler.runtime.region_kinds import RegionKinds, Target
from networks import transformer

PATHS = ["blocks.0", "blocks.1"]


def kinds_of(network, device="cpu"):
    return RegionKinds(network, PATHS, Target(torch.device(device), EagerBackend(), Host()))


def test_a_description_is_taken_again():
    network = transformer()
    kinds, eps = kinds_of(network), network.blocks[0].eps
    first = kinds.paths()
    network.blocks[0].eps = 0.5
    assert not kinds.go_back()
    kinds.describe_again()
    assert kinds.paths() != first
    network.blocks[0].eps = eps
    assert kinds.go_back()
    assert kinds.paths() == first
    assert kinds.are_unchanged()


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_a_description_from_before_a_move_is_not_taken_again(device):
    """No watch sees a dtype. The regions notice it when they are called, and are described one by one."""
    network = transformer()
    kinds, eps = kinds_of(network, device), network.blocks[0].eps
    network.double()
    now = [kinds.describe(path).fingerprint for path in PATHS]
    network.blocks[0].eps = 0.5
    kinds.describe_again()
    network.blocks[0].eps = eps
    kinds.go_back()
    assert [kinds.at(path).fingerprint for path in PATHS] == now


def test_a_region_that_is_gone_while_the_others_move_is_described_for_their_device_when_it_comes_back():
    network = transformer()
    network.blocks[1].eps = 0.5
    kinds, gone = kinds_of(network, "cuda:0"), network.blocks[1]
    fingerprint = kinds.at(PATHS[1]).fingerprint
    del network.blocks[1]
    kinds.describe(PATHS[0])  # its weights are on the CPU
    assert [kinds.at(path).device.type for path in PATHS] == ["cpu", "cuda"]
    assert sum(kind.blocks for kind in kinds.in_use()) == 2
    network.blocks.append(gone)
    kinds.describe_again()
    assert kinds.at(PATHS[1]).fingerprint == fingerprint
    assert kinds.at(PATHS[1]).device.type == "cpu"
