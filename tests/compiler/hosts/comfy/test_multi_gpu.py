"""Copies of a model that ComfyUI makes for other devices, each with a network of its own: compiled like the first."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import comfy.model_patcher
import pytest
import torch
from compiled_graphs.compiler.common.counters import totals
from compiled_graphs.compiler.hosts.comfy import compile as host
from compiled_graphs.compiler.hosts.comfy import install
from compiled_graphs.compiler.hosts.comfy.coexistence import is_ours
from compiled_graphs.compiler.hosts.comfy.deep_cache import DeepCache, Settings
from compiled_graphs.compiler.runtime.network_wrapper import NetworkWrapper
from vbar import stream

pytestmark = [
    pytest.mark.usefixtures("traced_once"),
    pytest.mark.skipif(
        not hasattr(comfy.model_patcher.ModelPatcher, "deepclone_multigpu"), reason="this ComfyUI has one GPU only"
    ),
]
BOUND = 1e-4
OTHER = torch.device("cpu", 0)
"""Another device than "cpu" to ComfyUI, which computes alike."""


@pytest.fixture
def model(load):
    """A model that its loader can make again, as on another device."""
    made = load("tiny_sd15")
    made.cached_patcher_init = (lambda *args, **kwargs: load("tiny_sd15"), ())
    return made


@pytest.fixture
def eager_image(load, sample):
    """What the model gives without us."""
    return sample(load("tiny_sd15"), "tiny_sd15", steps=2)


def split(model):
    """Do as MultiGPU CFG Split does, which asks CUDA what devices there are."""
    model = model.clone()
    copied = model.deepclone_multigpu(OTHER)
    copied.is_multigpu_base_clone = True
    model.set_additional_models("multigpu", [copied])
    model.match_multigpu_clones()
    model.model_options["multigpu_options"] = {}
    return model


def compiled(model, **options):
    return host.compile_model(model, host.Request("eager", **options))[0]


def patches_of_ours(patcher):
    return [name for name, patch in patcher.object_patches.items() if is_ours(patch)]


def assert_alike(image, expected):
    assert (image - expected).norm() <= BOUND * expected.norm()


def wrapper_of(patcher):
    return patcher.object_patches["diffusion_model.forward"]


def assert_runs_compiled(patcher, image):
    """Every block of the network has run by its graph, and none but for it."""
    counters = wrapper_of(patcher).compiled.counters
    assert counters.calls > 0
    assert not counters.eager_calls
    assert torch.isfinite(image).all()


@pytest.mark.parametrize("order", ["compile, then split", "split, then compile"])
def test_the_split_runs_compiled_on_each_device(order, model, sample, eager_image, registry):
    before = totals.compiles
    ours = split(compiled(model)) if order == "compile, then split" else compiled(split(model))
    made = totals.compiles - before
    image = sample(ours, "tiny_sd15", steps=2)
    assert_alike(image, eager_image)
    (copied,) = ours.get_additional_models_with_key("multigpu")
    assert wrapper_of(copied).network() is copied.model.diffusion_model
    assert wrapper_of(copied).compiled is not wrapper_of(ours).compiled
    for patcher in (ours, copied):
        assert_runs_compiled(patcher, image)
    assert wrapper_of(copied).compiled.counters.compiles == 0
    assert totals.compiles - before == made > 0


def test_each_sampling_finds_what_was_compiled_for_a_copy(model, sample, registry):
    ours = split(compiled(model))
    first = sample(ours, "tiny_sd15", steps=2)
    (copied,) = ours.get_additional_models_with_key("multigpu")
    with totals.expect(compiles=0, from_memory=0, retired=0):
        assert torch.equal(sample(ours, "tiny_sd15", steps=2), first)
    (again,) = ours.get_additional_models_with_key("multigpu")
    assert again is not copied
    assert wrapper_of(again) is wrapper_of(copied)


def test_a_model_on_a_selected_device_runs_compiled_there(model, sample, eager_image, registry):
    selected = compiled(model).clone().deepclone_multigpu(OTHER)
    image = sample(selected, "tiny_sd15", steps=2)
    assert_alike(image, eager_image)
    assert_runs_compiled(selected, image)
    assert_runs_compiled(split(selected).clone(), sample(split(selected), "tiny_sd15", steps=1))


def test_a_model_may_be_compiled_on_its_selected_device(model, sample, eager_image, registry):
    ours = compiled(model.deepclone_multigpu(OTHER))
    image = sample(ours, "tiny_sd15", steps=2)
    assert_alike(image, eager_image)
    assert_runs_compiled(ours, image)


def test_a_device_without_graphs_runs_uncompiled_and_says_why(model, sample, eager_image, registry, monkeypatch):
    told, choose = [], install.choose_backend
    ours = compiled(model, on_change=told.append)
    monkeypatch.setattr(install, "choose_backend", lambda name, device, only_loads: (None, "this GPU is too old"))
    ours = split(ours)
    monkeypatch.setattr(install, "choose_backend", choose)
    assert_alike(sample(ours, "tiny_sd15", steps=2), eager_image)
    assert "cpu: not compiled: this GPU is too old" in told[-1]
    (copied,) = ours.get_additional_models_with_key("multigpu")
    assert not any(isinstance(patch, NetworkWrapper) for patch in copied.object_patches.values())
    assert_runs_compiled(ours, eager_image)


@pytest.mark.parametrize(("device", "what"), [(OTHER, "on another device"), (None, "without dynamic VRAM")])
def test_a_copy_that_streams_no_weights_is_told_of(device, what, model, registry, vbar):
    """ComfyUI makes one on the same device for LoRA hooks."""
    told, cls = [], type(model)
    ours, _ = host.compile_model(stream(model, vbar), host.Request("eager", on_change=told.append))
    other = copy.copy(ours)
    other.__class__, other.model, other.object_patches = cls, copy.copy(ours.model), dict(ours.object_patches)
    other.load_device = device or ours.load_device
    for function in ours.get_all_callbacks("on_clone"):
        function(ours, other)
    assert not patches_of_ours(other)
    assert what in told[-1]


def test_the_node_says_how_each_device_stands(model, sample, registry):
    told = []
    ours = split(compiled(model, node_id="7", workflow=lambda: "w", on_change=told.append))
    sample(ours, "tiny_sd15", steps=1)
    assert any(line.startswith("cpu: Ready") for line in told[-1].splitlines())
    assert sorted(registry.report()["workflows"]["w"]["roles"]) == ["7:base UNet", "7:base UNet cpu"]


def test_a_lora_reaches_each_device(model, load, sample, registry):
    def with_patch(patcher):
        patcher = patcher.clone()
        weight = patcher.model.diffusion_model.out[2].weight
        patcher.add_patches({"diffusion_model.out.2.weight": (torch.ones_like(weight),)}, 0.5)
        return patcher

    expected = sample(with_patch(load("tiny_sd15")), "tiny_sd15", steps=2)
    assert_alike(sample(split(with_patch(compiled(model))), "tiny_sd15", steps=2), expected)


def test_a_vae_on_a_selected_device_runs_compiled_there(load_vae, registry):
    vae = load_vae("taesd")
    vae.patcher.cached_patcher_init = (lambda *args, **kwargs: load_vae("taesd").patcher, ())
    latent = torch.randn(1, 4, 8, 8)
    expected = vae.decode(latent)
    ours, _ = host.compile_vae(vae, host.Request("eager"))
    selected = copy.copy(ours)
    selected.patcher = ours.patcher.deepclone_multigpu(OTHER)
    selected.first_stage_model, selected.device = selected.patcher.model, OTHER
    assert_alike(selected.decode(latent), expected)
    wrapper = selected.patcher.object_patches["decode"]
    assert wrapper.network() is selected.first_stage_model
    assert wrapper.compiled.counters.calls > 0
    assert not wrapper.compiled.counters.eager_calls


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
