"""Clones with a model of their own, as ComfyUI makes them for another GPU: our wrappers run one network only."""

from __future__ import annotations

from types import SimpleNamespace

import comfy.model_patcher
import pytest
import torch
from compiled_graphs.compiler.hosts.comfy import compile as host
from compiled_graphs.compiler.hosts.comfy.coexistence import is_ours
from compiled_graphs.compiler.hosts.comfy.deep_cache import DeepCache, Settings

pytestmark = [
    pytest.mark.usefixtures("traced_once"),
    pytest.mark.skipif(
        not hasattr(comfy.model_patcher.ModelPatcher, "deepclone_multigpu"), reason="this ComfyUI has one GPU only"
    ),
]
OTHER = torch.device("cpu", 0)
"""Another device than "cpu" to ComfyUI, which computes alike."""


@pytest.fixture
def model(load):
    """A model that its loader can make again, with other weights to tell the two apart."""
    made = load("tiny_sd15")
    other = load("tiny_sd15")
    with torch.inference_mode():
        other.model.diffusion_model.out[2].weight.mul_(3)
    made.cached_patcher_init = (lambda *args, **kwargs: other, ())
    return made


def patches_of_ours(patcher):
    return [name for name, patch in patcher.object_patches.items() if is_ours(patch)]


def assert_eager(clone, sample):
    assert not patches_of_ours(clone)
    own = comfy.model_patcher.ModelPatcher(clone.model, clone.load_device, clone.offload_device)
    expected = sample(own, "tiny_sd15")
    assert torch.equal(sample(clone, "tiny_sd15"), expected)


def test_a_clone_for_another_gpu_runs_its_own_network(model, sample, registry):
    told = []
    ours, _ = host.compile_model(model, host.Request("eager", on_change=told.append))
    compiled = sample(ours, "tiny_sd15")
    clone = ours.deepclone_multigpu(OTHER)
    assert_eager(clone, sample)
    assert "runs uncompiled" in told[-1]
    assert patches_of_ours(ours)
    assert torch.equal(sample(ours, "tiny_sd15"), compiled)


def test_clones_that_are_made_anew_before_a_sampling_run_their_own_network(model, sample, registry):
    ours, _ = host.compile_model(model, host.Request("eager"))
    ours.set_additional_models("multigpu", [ours.deepclone_multigpu(OTHER)])
    ours.match_multigpu_clones()
    (clone,) = ours.get_additional_models_with_key("multigpu")
    assert_eager(clone, sample)


def test_a_node_after_the_split_compiles_the_first_gpus_network(model, sample, registry):
    model.set_additional_models("multigpu", [model.deepclone_multigpu(OTHER)])
    ours, _ = host.compile_model(model, host.Request("eager"))
    ours.match_multigpu_clones()
    (clone,) = ours.get_additional_models_with_key("multigpu")
    assert_eager(clone, sample)
    assert patches_of_ours(ours)


def test_clones_of_one_model_share_its_wrappers(model, registry):
    ours, _ = host.compile_model(model, host.Request("eager"))
    assert patches_of_ours(ours.clone()) == patches_of_ours(ours) != []


def test_clones_do_not_add_up_callbacks(model, registry):
    ours, _ = host.compile_model(model, host.Request("eager"))
    before = {moment: sum(map(len, keys.values())) for moment, keys in ours.callbacks.items()}
    again, _ = host.compile_model(ours, host.Request("eager"))
    assert {moment: sum(map(len, keys.values())) for moment, keys in again.callbacks.items()} == before


def test_deep_cache_keeps_nothing_of_another_gpus_network(model, load):
    cache = DeepCache(model.model.diffusion_model, Settings())
    other = SimpleNamespace(diffusion_model=load("tiny_sd15").model.diffusion_model)

    class Model(SimpleNamespace):
        def apply_model(self, x, timestep, **conditioning):
            return x + 1

    made = Model(diffusion_model=other.diffusion_model)
    arguments = {"input": torch.zeros(1), "timestep": torch.ones(1), "c": {}, "cond_or_uncond": [0]}
    for _ in range(2):
        assert torch.equal(cache(made.apply_model, arguments), torch.ones(1))
    assert not cache._features
    assert cache.whole == cache.shallow == 0
