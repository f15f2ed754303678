from __future__ import annotations

import pytest
import torch
from compiled_graphs.compiler.identity.regions import LISTED, Region, find_regions
from networks import ConvolutionNetwork, ResidualBlock, TransformerBlock, transformer
from torch import nn


def listed_class(name="comfy.ldm.flux.layers.DoubleStreamBlock"):
    module, _, qualname = name.rpartition(".")
    return type(qualname, (ResidualBlock,), {"__module__": module, "__qualname__": qualname})


def paths(network):
    return [region.path for region in find_regions(network)]


@pytest.mark.parametrize("name", sorted(LISTED))
def test_a_listed_class_is_a_region_even_alone(name):
    assert paths(nn.Sequential(nn.Conv2d(3, 8, 1), listed_class(name)())) == ["1"]


def test_a_subclass_of_a_listed_class_is_a_region():
    class Patched(listed_class()):
        pass

    assert paths(nn.Sequential(Patched())) == ["0"]


def test_a_class_of_the_same_name_elsewhere_is_not_listed():
    assert paths(nn.Sequential(listed_class("other.layers.DoubleStreamBlock")())) == []


def test_repeated_blocks_are_regions_in_model_order():
    assert paths(ConvolutionNetwork(depth=3)) == ["blocks.0", "blocks.1", "blocks.2"]


def test_regions_carry_the_models_own_modules():
    network = ConvolutionNetwork()
    assert [region.module for region in find_regions(network)] == list(network.blocks)


def test_a_single_block_is_no_region():
    assert paths(transformer(depth=1)) == []


def test_blocks_of_unlike_classes_are_no_regions():
    assert paths(nn.Sequential(nn.ModuleList([ResidualBlock(), TransformerBlock()]))) == []


def test_repeated_leaves_are_no_regions():
    assert paths(nn.Sequential(nn.ModuleList(nn.Linear(4, 4) for _ in range(3)))) == []


def test_containers_without_a_forward_are_no_regions():
    assert paths(nn.Sequential(nn.ModuleList(nn.ModuleList([nn.Linear(4, 4)]) for _ in range(3)))) == []


def test_torchscript_modules_are_no_regions():
    scripted = [torch.jit.script(nn.Sequential(nn.Linear(4, 4))) for _ in range(2)]
    assert paths(nn.Sequential(nn.ModuleList(scripted))) == []


def test_regions_are_found_in_plain_modules_that_hold_others():
    network = nn.Module()
    network.stages = nn.ModuleList(nn.Module() for _ in range(2))
    for stage in network.stages:
        stage.blocks = nn.ModuleList(TransformerBlock() for _ in range(2))
    assert paths(network) == [f"stages.{stage}.blocks.{block}" for stage in range(2) for block in range(2)]


def test_blocks_repeated_in_a_sequential_are_no_regions():
    assert paths(nn.Sequential(nn.Sequential(ResidualBlock(), ResidualBlock()))) == []


def test_regions_do_not_nest():
    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(TransformerBlock() for _ in range(2))

        def forward(self, x):
            return self.blocks[1](self.blocks[0](x))

    network = nn.Module()
    network.stages = nn.ModuleList(Stage() for _ in range(2))
    assert paths(network) == ["stages.0", "stages.1"]


def test_container_of_listed_layers_is_no_region():
    layer = listed_class()
    network = nn.Module()
    network.stages = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 1), layer()) for _ in range(2))
    assert paths(network) == ["stages.0.1", "stages.1.1"]


def test_a_listed_model_is_a_region_itself():
    (region,) = find_regions(listed_class()())
    assert region.path == ""
    assert region.label == type(region.module).__name__


def test_a_block_that_stands_in_two_places_is_one_region():
    block = TransformerBlock()
    network = nn.Module()
    network.blocks = nn.ModuleList([block, block])
    assert paths(network) == ["blocks.0"]


def test_a_network_without_blocks_has_no_regions():
    assert paths(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))) == []


def test_a_label_names_the_class_and_the_place():
    assert Region("blocks.3", TransformerBlock()).label == "TransformerBlock (blocks.3)"


def test_what_torch_compiles_has_no_regions():
    network = transformer()
    before = paths(network)
    network.blocks[0].compile(backend="eager")
    assert paths(network) == before[1:]
    assert paths(torch.compile(network, backend="eager")) == []
