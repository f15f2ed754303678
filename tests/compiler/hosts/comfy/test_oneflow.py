"""OneFlow in a real ComfyUI: models and VAEs through its own samplers and coders."""

from __future__ import annotations

import pytest
import torch
from compiled_graphs.compiler.backends.oneflow import backend
from compiled_graphs.compiler.common.counters import totals
from compiled_graphs.compiler.hosts.comfy import compile as host

pytestmark = pytest.mark.oneflow
BOUND = 1e-4


def assert_same(ours: torch.Tensor, eager: torch.Tensor) -> None:
    assert (ours - eager).abs().max() <= BOUND * eager.abs().max()


SIZES = [{}, {"height": 9, "width": 5, "batch": 3}, {"tokens": 154, "cfg": 1.0}, {}]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("tiny_sd15", SIZES), ("tiny_sdxl", SIZES[1:2]), ("tiny_sd3", SIZES), ("tiny_flux", [{}, {}])],
)
def test_images_of_a_model_are_eagers_at_every_size(name, sizes, load, sample, registry):
    model = load(name)
    compiled, text = host.compile_model(model, host.Request("oneflow"))
    assert "normal speed" not in text, text
    with totals.expect(compiles=0, retired=0):
        for change in sizes:
            assert_same(sample(compiled, name, **change), sample(model, name, **change))
    assert not compiled.object_patches["diffusion_model.forward"].compiled.counters.eager_calls


def test_a_lora_shows_in_the_next_prompt_and_builds_nothing(load, sample, registry):
    model = load("tiny_sd15")
    compiled, _ = host.compile_model(model, host.Request("oneflow"))
    sample(compiled, "tiny_sd15")
    built = backend.report("cpu")["built"]
    for strength in (1.0, 0.5):
        ours, theirs = (changed(patcher, strength) for patcher in (compiled, model))
        with totals.expect(compiles=0, retired=0):
            assert_same(sample(ours, "tiny_sd15"), sample(theirs, "tiny_sd15"))
    assert not torch.equal(sample(changed(compiled, 1.0), "tiny_sd15"), sample(compiled, "tiny_sd15"))
    assert backend.report("cpu")["built"] == built


def changed(patcher, strength):
    """What a LoRA loader does: a clone with differences of weights."""
    clone = patcher.clone()
    weights = {
        name: value for name, value in patcher.model.state_dict().items() if "attn" in name and name.endswith("weight")
    }
    generator = torch.Generator().manual_seed(3)
    patches = {name: (torch.randn(w.shape, generator=generator) * 0.02,) for name, w in weights.items()}
    assert clone.add_patches(patches, strength)
    return clone


@pytest.mark.parametrize("name", ["small_kl", "sd3", "taesd", "svd"])
def test_images_of_a_vae_are_eagers_in_both_directions(name, load_vae, registry):
    vae = load_vae(name)
    compiled, text = host.compile_vae(vae, host.Request("oneflow"), encode=True)
    assert "normal speed" not in text, text
    with totals.expect(compiles=0, retired=0), torch.inference_mode():
        for batch, height, width in ((1, 4, 6), (2, 3, 5), (1, 4, 6)):
            latent = torch.randn(batch, vae.latent_channels, height, width)
            assert_same(compiled.decode(latent), vae.decode(latent))
        pixels = torch.rand(1, 32, 48, 3)
        assert_same(*(_encode(coder, pixels) for coder in (compiled, vae)))


def _encode(vae, pixels):
    torch.manual_seed(5)  # ComfyUI of 2024 draws a latent where later versions take the mean
    return vae.encode(pixels)
