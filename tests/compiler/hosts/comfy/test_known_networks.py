"""Networks by name: ComfyUI takes their headers for what they are, and few blocks have the graphs of all."""

from __future__ import annotations

import json

import comfy.model_detection
import comfy.supported_models
import pytest
import torch
from compiled_graphs.compiler.hosts.comfy.known_networks import DTYPES, NETWORKS, header, network_of
from compiled_graphs.compiler.hosts.comfy.rules.host import HOST
from compiled_graphs.compiler.identity.fingerprint import fingerprint
from compiled_graphs.compiler.identity.regions import find_regions

PARAMETERS = {
    "SD15": 859_520_964,
    "SDXL": 2_567_463_684,
    "SD3": 2_028_328_000,
    "Flux": 11_901_408_320,
    "WAN21_T2V_1.3B": 1_418_996_800,
    "WAN21_T2V_14B": 14_288_491_584,
    "QwenImage": 20_430_401_088,
}
"""Of the published checkpoints."""


@pytest.fixture(params=NETWORKS)
def name(request):
    if not hasattr(comfy.supported_models, NETWORKS[request.param].cls):
        pytest.skip(f"this ComfyUI has no {NETWORKS[request.param].cls}")
    return request.param


def test_the_whole_network_has_the_size_of_the_published_one(name):
    network = network_of(NETWORKS[name], is_whole=True)
    assert PARAMETERS.get(name) in (None, sum(weight.numel() for weight in network.parameters()))


def test_few_blocks_have_the_kinds_of_all(name):
    whole, few = network_of(NETWORKS[name], is_whole=True), network_of(NETWORKS[name])
    kinds, same = ({fingerprint(region.module, HOST) for region in find_regions(each)} for each in (whole, few))
    assert kinds == same
    assert kinds


def test_comfyui_takes_the_header_for_the_network(name):
    data = header(NETWORKS[name], "bf16")
    fields = json.loads(data[8:])
    state = {key: torch.empty(each["shape"], dtype=torch.bfloat16, device="meta") for key, each in fields.items()}
    assert type(comfy.model_detection.model_config_from_unet(state, "")).__name__ == NETWORKS[name].cls
    assert {each["dtype"] for each in fields.values()} == {DTYPES["bf16"]}
