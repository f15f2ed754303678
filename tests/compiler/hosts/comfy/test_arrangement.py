"""A UNet's convolution weights lie in channels_last while ComfyUI samples, and at no other time."""

from __future__ import annotations

import pytest
import torch
from compiled_graphs.compiler.hosts.comfy import compile as host
from compiled_graphs.compiler.hosts.comfy.rules.host import HOST
from compiled_graphs.compiler.identity.memory_format import has_layouts

pytestmark = pytest.mark.usefixtures("traced_once")

BOUND = 5e-2 if torch.cuda.is_available() else 2e-4


@pytest.fixture(autouse=True)
def _arranged_here(monkeypatch, load):
    if not hasattr(load("tiny_sd15"), "add_callback_with_key"):
        pytest.skip("this ComfyUI does not say when a sampling begins")
    monkeypatch.setattr(HOST, "channels_last_on", frozenset({"cuda", "cpu"}), raising=False)


@pytest.fixture
def model(load):
    return load("tiny_sd15")


def layouts(model):
    """Whether the weights that have a layout lie in channels_last."""
    return {not weight.is_contiguous() for weight in model.model.diffusion_model.parameters() if has_layouts(weight)}


def watched(model, seen):
    """Note the layouts at each step of a sampling with this model."""
    return lambda *_: seen.append(layouts(model))


@pytest.mark.parametrize("name", ["tiny_sd15", "tiny_sdxl"])
def test_from_the_first_step_to_the_last(name, load, sample, registry):
    model = load(name)
    weights = {key: weight.clone() for key, weight in model.model.state_dict().items()}
    expected = sample(model, name, steps=3)
    ours = host.compile_model(model, host.Request("eager"))[0]
    assert layouts(model) == {False}
    for _ in range(2):
        seen = []
        image = sample(ours, name, steps=3, callback=watched(model, seen))
        assert seen == [{True}] * 3
        assert layouts(model) == {False}
        assert ((image - expected).norm() / expected.norm()).item() <= BOUND
    assert not host.compiled_model(ours).counters.eager_calls
    seen = []
    again = sample(model, name, steps=3, callback=watched(model, seen))
    assert seen == [{False}] * 3
    assert all(torch.equal(weight.cpu(), weights[key].cpu()) for key, weight in model.model.state_dict().items())
    if not torch.cuda.is_available():  # a GPU's sums come in no fixed order
        assert torch.equal(again, expected)


def test_compiled_twice_once_and_not_at_all(model, sample, registry):
    ours = host.compile_model(model, host.Request("eager"))[0]
    again = host.compile_model(ours, host.Request("eager"))[0]
    assert len(again.get_all_callbacks("on_pre_run")) == len(ours.get_all_callbacks("on_pre_run"))
    assert not model.get_all_callbacks("on_pre_run")
    seen = []
    sample(again, "tiny_sd15", steps=2, callback=watched(model, seen))
    assert seen == [{True}] * 2


def test_an_error_in_a_sampling_puts_them_back(model, sample, registry):
    ours = host.compile_model(model, host.Request("eager"))[0]

    def stop(*_):
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        sample(ours, "tiny_sd15", steps=2, callback=stop)
    assert layouts(model) == {False}


def with_lora(model):
    """Return a clone with patches for every convolution."""
    generator = torch.Generator().manual_seed(7)
    clone = model.clone()
    weights = {key: weight for key, weight in model.model.state_dict().items() if has_layouts(weight)}
    patches = {key: (0.02 * torch.randn(weight.shape, generator=generator),) for key, weight in weights.items()}
    assert len(clone.add_patches(patches, 1.0)) == len(weights)
    return clone


def test_a_lora_on_convolutions_comes_and_goes(model, sample, registry):
    ours = host.compile_model(model, host.Request("eager"))[0]
    sample(ours, "tiny_sd15")
    plain, changed = (sample(patcher, "tiny_sd15", steps=2) for patcher in (model, with_lora(model)))
    assert not torch.allclose(plain, changed, rtol=0.01, atol=0.01)
    compiles = host.compiled_model(ours).counters.compiles
    for patcher, expected in ((with_lora(ours), changed), (ours, plain), (with_lora(ours), changed)):
        seen = []
        image = sample(patcher, "tiny_sd15", steps=2, callback=watched(model, seen))
        assert ((image - expected).norm() / expected.norm()).item() <= BOUND
        assert seen == [{True}] * 2
    assert layouts(model) == {False}
    assert host.compiled_model(ours).counters.compiles == compiles


def test_a_model_without_such_blocks_is_not_arranged(load, registry, sample):
    model = load("tiny_sd3")
    ours = host.compile_model(model, host.Request("eager"))[0]
    seen = []
    sample(ours, "tiny_sd3", steps=2, callback=watched(model, seen))
    assert True not in set().union(*seen)
