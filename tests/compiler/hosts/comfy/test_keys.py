"""A region has one fingerprint, whatever ComfyUI has done to its model: it decides which graph is found."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import comfy.model_management
import comfy.ops
import pytest
import torch
from compiled_graphs.compiler.common.tensor_slots import tensor_slots
from compiled_graphs.compiler.compile_cache.worker_pool import Workers
from compiled_graphs.compiler.hosts.comfy import synthetic_calls, worker_setup
from compiled_graphs.compiler.hosts.comfy.rules.host import HOST
from compiled_graphs.compiler.identity.fingerprint import Describer
from compiled_graphs.compiler.identity.regions import find_regions
from compiled_graphs.compiler.tracing.shape_discovery import discover_requests

NAMES = ["tiny_sd15", "tiny_sd15_inpaint", "tiny_svd", "tiny_sdxl", "tiny_sd3", "tiny_flux"]


def wan() -> torch.nn.Module:
    """Blocks of it ask `comfy.ops` for their weights themselves."""
    module = pytest.importorskip("comfy.ldm.wan.model")
    config = {"model_type": "t2v", "dim": 128, "in_dim": 16, "out_dim": 16, "num_heads": 4, "ffn_dim": 256}
    config |= {"freq_dim": 64, "text_dim": 64, "num_layers": 2, "patch_size": (1, 2, 2), "window_size": (-1, -1)}
    return module.WanModel(**config, dtype=torch.float32, device="meta", operations=comfy.ops.disable_weight_init)


def lumina() -> torch.nn.Module:
    module = pytest.importorskip("comfy.ldm.lumina.model")
    config = {"patch_size": 2, "in_channels": 16, "dim": 96, "cap_feat_dim": 64, "n_layers": 2, "qk_norm": True}
    config |= {"n_heads": 4, "n_kv_heads": 2, "axes_dims": [8, 8, 8], "axes_lens": [300, 512, 512]}
    cls = getattr(module, "NextDiT", None) or pytest.skip("this ComfyUI has no NextDiT")
    return cls(**config, dtype=torch.float32, device="meta", operations=comfy.ops.disable_weight_init)


NETWORKS: dict[str, Callable[[], torch.nn.Module]] = {"wan": wan, "lumina": lumina}


def fingerprints(network: torch.nn.Module) -> dict[str, str]:
    describer = Describer(HOST)
    found = {region.path: describer.describe(region.module) for region in find_regions(network)}
    assert not any(description.obscure for description in found.values())
    return {path: description.fingerprint for path, description in found.items()}


@pytest.mark.parametrize("name", NAMES)
def test_the_key_is_the_same_loaded_unloaded_and_after_prompts(load, sample, name):
    if name in ("tiny_svd", "tiny_sd15_inpaint"):
        pytest.skip("the sampler of these tests gives it no conditions")
    model = load(name)
    before = fingerprints(model.model.diffusion_model)
    comfy.model_management.load_models_gpu([model])
    assert fingerprints(model.model.diffusion_model) == before
    for seed in range(3):
        sample(model, name, seed=seed)
    assert fingerprints(model.model.diffusion_model) == before
    comfy.model_management.unload_all_models()
    assert fingerprints(model.model.diffusion_model) == before
    assert fingerprints(load(name).model.diffusion_model) == before


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.nn.Module, int], None]:
    """Mark a network as a core does that streams its weights (`ModelPatcherDynamic.load`), and move its counters."""

    def mark(network: torch.nn.Module, turn: int) -> None:
        for path, module in network.named_modules():
            if not hasattr(module, "comfy_cast_weights"):
                continue
            module.comfy_cast_weights = module.comfy_force_cast_weights = True
            module.seed_key, module._v, module._v_signature = path, (object(), turn, 4096), object()
            module._v_weight, module._pin_state, module._prefetch = torch.ones(1), {}, {"signature": turn}
            module.weight_lowvram_function = module.bias_lowvram_function = None
        for name, value in {"TOTAL_PINNED_MEMORY": turn, "LARGEST_AIMDO_CASTED_WEIGHT": (None, turn)}.items():
            monkeypatch.setattr(comfy.model_management, name, value, raising=False)
        memory = sys.modules.get("comfy.memory_management")
        for name in ("RAM_CACHE_HEADROOM", "aimdo_enabled") if memory else ():
            monkeypatch.setattr(memory, name, turn, raising=False)

    return mark


@pytest.mark.parametrize("name", [*NAMES, *NETWORKS])
def test_the_key_is_the_same_with_streamed_weights(load, streamed, name):
    network = NETWORKS[name]() if name in NETWORKS else load(name).model.diffusion_model
    before = fingerprints(network)
    for turn in range(2):
        streamed(network, turn)
        assert fingerprints(network) == before


def test_the_key_has_the_dtype_that_weights_arrive_in(load, streamed):
    """A file may hold another one: `ModelPatcherDynamic.load` casts layer by layer."""
    pytest.importorskip("comfy.memory_management")
    network = load("tiny_sd15").model.diffusion_model
    streamed(network, 1)
    before = fingerprints(network)
    for layer in network.modules():
        for name, weight in layer._parameters.items():
            if hasattr(layer, "comfy_cast_weights") and weight is not None:
                vars(layer)[f"{name}_comfy_model_dtype"] = weight.dtype
                weight.data = weight.data.to(torch.float64)
    assert fingerprints(network) == before


@pytest.fixture
def filled_from_a_file(load, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], torch.nn.Module]:
    """Load a network as a core does that streams: its layers are empty until a file fills them in the file's order."""

    def load_filled(name: str) -> torch.nn.Module:
        memory = pytest.importorskip("comfy.memory_management")
        network = load(name).model.diffusion_model
        weights = {name: network.state_dict()[name] for name in sorted(network.state_dict())}
        with monkeypatch.context() as patch:
            patch.setattr(memory, "aimdo_enabled", True)
            filled = type(network)(
                **load(name).model.model_config.unet_config, operations=comfy.ops.disable_weight_init
            )
            filled.eval().load_state_dict(weights, assign=True)
        return filled

    return load_filled


@pytest.mark.parametrize("name", NAMES)
def test_the_key_is_the_same_for_layers_that_a_file_has_filled(load, filled_from_a_file, name):
    filled = filled_from_a_file(name)
    network = load(name).model.diffusion_model
    assert fingerprints(filled) == fingerprints(network)
    assert [name for name, _ in tensor_slots(filled)] == [name for name, _ in tensor_slots(network)]


@pytest.mark.parametrize("name", NAMES)
def test_bookkeeping_of_the_host_is_no_change(load, streamed, name):
    network = load(name).model.diffusion_model
    describer = Describer(HOST)
    for region in find_regions(network):
        describer.describe(region.module)
    for turn in range(2):
        streamed(network, turn)
        assert describer.watch.holds()


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    workers = Workers(worker_setup.setup, HOST, count=1)
    yield workers
    workers.stop()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("tiny_svd", "tiny_flux")])
def test_a_worker_process_finds_the_same_key(load, sample, workers, name):
    model = load(name)
    if name != "tiny_sd15_inpaint":
        sample(model, name)  # loaded: what the core has marked by then must not travel as something else
    network = model.model.diffusion_model
    regions = find_regions(network)
    known = fingerprints(network)
    call: Any = synthetic_calls.SamplingCall(model, HOST)
    device = next(network.parameters()).device
    variants = discover_requests(network, {r: known[r.path] for r in regions}, device, HOST, call)
    assert variants
    for variant in variants:
        workers.compile(variant, "eager")  # raises WorkerError if it is another block there
