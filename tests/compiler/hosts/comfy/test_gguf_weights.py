"""Layers as ComfyUI-GGUF has them: the bytes of the file are inputs of a graph."""

from __future__ import annotations

import comfy.lora
import pytest
import torch
from compiled_graphs.compiler.common.counters import totals
from compiled_graphs.compiler.common.reason import Reason, ReasonCode
from compiled_graphs.compiler.compile_cache.worker_pool import Workers
from compiled_graphs.compiler.hosts.comfy import comfy_compat, low_rank, sampling_hooks, synthetic_calls, worker_setup
from compiled_graphs.compiler.hosts.comfy import compile as host
from compiled_graphs.compiler.hosts.comfy.deep_cache import Settings, use_deep_cache
from compiled_graphs.compiler.hosts.comfy.rules.host import HOST
from compiled_graphs.compiler.identity.fingerprint import fingerprint
from compiled_graphs.compiler.identity.regions import find_regions
from compiled_graphs.compiler.tracing.shape_discovery import discover_requests
from gguf_double import GGMLLinear, GGMLTensor, Type
from recorders import repeat
from rows import random
from torch import nn

pytestmark = pytest.mark.usefixtures("traced_once")

DEVICE = comfy_compat.torch_device()
BOUND = 5e-2 if torch.cuda.is_available() else 1e-3
SCALE = 0.08
"""Of the matrices in a LoRA. With 0.2, two steps of random weights make a rounding a thousand times larger."""
SIZES = ({}, {"height": 16, "width": 8}, {"batch": 2, "tokens": 154})


@pytest.fixture
def gguf(load):
    """Load tiny SD1.5 with matrices of a type in the blocks' attention, and a layer of its own outside of them."""

    def make(kind):
        model = load("tiny_sd15")
        for region in find_regions(model.model.diffusion_model):
            for module in list(region.module.modules()):
                for name, child in list(module.named_children()):
                    if isinstance(child, nn.Linear) and child.in_features % 32 == 0:
                        setattr(module, name, GGMLLinear(child, kind))
        outside = model.model.diffusion_model.time_embed
        outside[0] = GGMLLinear(outside[0], Type.F16)
        assert any(isinstance(weight, GGMLTensor) for weight in model.model.diffusion_model.parameters())
        return model

    return make


def compiled(model, backend="eager"):
    return host.compile_model(model, host.Request(backend, verify=False))


def assert_images(sample, ours, model):
    for size in SIZES:
        image, expected = sample(ours, "tiny_sd15", **size), sample(model, "tiny_sd15", **size)
        assert (image - expected).norm() <= BOUND * expected.norm()


def assert_compiled(sample, ours, model):
    """No block runs eagerly, and nothing is compiled."""
    before = totals.eager_calls.copy()
    with totals.expect(compiles=0, retired=0):
        assert_images(sample, ours, model)
    assert totals.eager_calls == before


def layers(model):
    return [m for m in model.model.diffusion_model.modules() if isinstance(m, GGMLLinear)]


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0, Type.F16])
def test_a_gguf_model_is_compiled_for_every_size(kind, gguf, sample, registry):
    model = gguf(kind)
    ours, text = compiled(model)
    assert "normal speed" not in text
    assert_compiled(sample, ours, model)


def test_a_type_that_is_not_known_is_named(gguf, sample, registry):
    model = gguf(Type.IQ4_NL)
    ours, text = compiled(model)
    assert "IQ4_NL of GGUF, which is not known" in text
    assert_images(sample, ours, model)


def test_types_are_kinds_of_their_own(gguf):
    blocks = [find_regions(gguf(kind).model.diffusion_model)[0].module for kind in (Type.Q8_0, Type.Q4_0, Type.F16)]
    assert len({fingerprint(block, HOST) for block in blocks}) == 3


def test_a_lora_that_the_layer_adds_keeps_its_block_eager(gguf, sample, registry):
    model = gguf(Type.Q8_0)
    ours, _ = compiled(model)
    layer = next(layer for layer in layers(model) if layer.weight.tensor_type is Type.Q8_0)
    layer.weight.patches = [1.5]
    before = totals.eager_calls.copy()
    assert_images(sample, ours, model)
    assert totals.eager_calls - before == {Reason(ReasonCode.WEIGHT_FUNCTION, "a LoRA on Q8_0 of GGUF"): len(SIZES)}
    layer.weight.patches = []
    assert_compiled(sample, ours, model)


def test_weights_that_are_moved_are_read_where_they_are(gguf, sample, registry):
    model = gguf(Type.Q8_0)
    ours, _ = compiled(model)
    assert_images(sample, ours, model)
    for layer in layers(model):  # as `Module.to` and loaders do it
        moved = layer.weight.data.clone()
        moved[:, 0] += 1
        layer.weight.data = moved
    with totals.expect(compiles=0, retired=0):
        assert_images(sample, ours, model)


@pytest.fixture(scope="module")
def workers():
    workers = Workers(worker_setup.setup, HOST, count=1)
    yield workers
    workers.stop()


def test_a_worker_process_makes_the_graph_of_a_gguf_model(gguf, workers):
    network = gguf(Type.Q8_0).model.diffusion_model
    region = find_regions(network)[0]
    call = synthetic_calls.SamplingCall(gguf(Type.Q8_0), HOST)
    (request, *_) = discover_requests(network, {region: fingerprint(region.module, HOST)}, DEVICE, HOST, call)
    workers.compile(request, "eager")  # raises WorkerError if it is another block there


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.F16])
def test_steps_of_a_gguf_model_are_replayed(kind, gguf, sample, registry, monkeypatch):
    if not torch.cuda.is_available():
        monkeypatch.setattr(sampling_hooks, "can_capture", lambda device: True)
        monkeypatch.setattr(sampling_hooks, "capture_within", lambda context: repeat)
    model = gguf(kind)
    if not hasattr(model, "add_callback_with_key"):
        pytest.skip("this ComfyUI does not say when a sampling ends")
    ours, _ = compiled(model)
    image, expected = sample(ours, "tiny_sd15", steps=9), sample(model, "tiny_sd15", steps=9)
    assert (image - expected).norm() <= BOUND * expected.norm()
    counters = ours.object_patches["diffusion_model.forward"].compiled.counters
    assert counters.replays > 0
    assert counters.eager_calls == {}


@pytest.mark.usefixtures("cpp_compiler")
def test_inductor_gives_a_gguf_models_image(gguf, sample, registry):
    model = gguf(Type.Q4_0)
    ours, text = compiled(model, "inductor")
    assert "normal speed" not in text
    assert_images(sample, ours, model)


def with_lora(patcher, rank, strength):
    """Return a clone with a LoRA on the layers that read the text."""
    patcher, keys = patcher.clone(), []
    for path, module in patcher.model.diffusion_model.named_modules():
        if path.endswith(("attn2.to_k", "attn2.to_v")):
            keys.append(f"diffusion_model.{path}.weight")
            up, down = random(module.weight.shape[0], rank, seed=1, scale=SCALE), random(rank, 768, seed=2, scale=SCALE)
            file = {"a.lora_up.weight": up, "a.lora_down.weight": down}
            assert len(patcher.add_patches(comfy.lora.load_lora(file, {"a": keys[-1]}), strength)) == 1
    assert keys
    return patcher


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0])
def test_a_lora_beside_weights_of_gguf_compiles_nothing(kind, gguf, load, sample, registry):
    model, plain = gguf(kind), load("tiny_sd15")
    regions = [region.path for region in find_regions(model.model.diffusion_model)]
    if not comfy_compat.wraps_samplings(model):
        pytest.skip("this ComfyUI does not say when a sampling begins")
    with torch.no_grad():
        for path, layer in model.model.diffusion_model.named_modules():
            if isinstance(layer, GGMLLinear):
                own = plain.model.diffusion_model.get_submodule(path)
                own.weight.copy_(layer.get_weight(layer.weight, torch.float32))
                if own.bias is not None:
                    own.bias.copy_(layer.get_weight(layer.bias, torch.float32))
    for layer in layers(model):  # a LoRA of an earlier sampling, which ComfyUI-GGUF takes out when it loads the model
        layer.weight.patches = [1.5]
    assert low_rank.branches_of(with_lora(model, 4, 1.0), model.model.diffusion_model, frozenset(regions))
    for layer in layers(model):
        layer.weight.patches = []
    ours, _ = host.compile_model(model, host.Request("eager", verify=False, low_rank=True))
    sample(with_lora(ours, 4, 1.0), "tiny_sd15")
    before = totals.eager_calls.copy()
    with totals.expect(compiles=0, retired=0):
        for rank, strength in ((4, 1.0), (4, 0.5), (20, 1.0)):
            image = sample(with_lora(ours, rank, strength), "tiny_sd15")
            expected = sample(with_lora(plain, rank, strength), "tiny_sd15")
            assert (image - expected).norm() <= BOUND * expected.norm()
            assert (image - sample(plain, "tiny_sd15")).norm() > 10 * BOUND * expected.norm()
        both = [use_deep_cache(with_lora(each, 4, 1.0), Settings(), lambda text: None)[0] for each in (ours, plain)]
        image, expected = (sample(each, "tiny_sd15", steps=4) for each in both)
        assert (image - expected).norm() <= BOUND * expected.norm()
    assert totals.eager_calls == before
