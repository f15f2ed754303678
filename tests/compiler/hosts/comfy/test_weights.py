"""Compile Model on weights of every dtype that ComfyUI stores, on quantised ones, and where memory is short."""

from __future__ import annotations

import comfy.cli_args
import comfy.model_management
import comfy.sd
import comfy.utils
import pytest
import torch
from compiled_graphs.compiler.common.counters import totals
from compiled_graphs.compiler.common.reason import Reason, ReasonCode
from compiled_graphs.compiler.hosts.comfy import compile as host
from rows import adapted, low_rank
from torch import nn

pytestmark = pytest.mark.usefixtures("traced_once")

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
BOUND = 5e-2 if torch.cuda.is_available() else 1e-3
"""Relative error of a sampled latent."""
PROMPTS = ({}, {"height": 16, "width": 8, "seed": 5}, {"batch": 2, "tokens": 154})


def compiled(model, **options):
    return host.compile_model(model, host.Request("eager", verify=False, **options))


def assert_same(ours, theirs, bound=BOUND):
    assert ours.isfinite().all()
    error = ((ours - theirs).norm() / theirs.norm()).item()
    assert error <= bound, f"relative error {error:.1e}"


def set_flag(monkeypatch, flag):
    """As on the command line; some builds keep flags as items of a dictionary."""
    put = monkeypatch.setitem if isinstance(comfy.cli_args.args, dict) else monkeypatch.setattr
    put(comfy.cli_args.args, flag, True)


def assert_images(sample, name, ours, theirs, bound=BOUND):
    for prompt in PROMPTS:
        assert_same(sample(ours, name, **prompt), sample(theirs, name, **prompt), bound)


@pytest.mark.parametrize("flag", ["fp8_e4m3fn_unet", "fp8_e5m2_unet", "fp16_unet", "bf16_unet", "force_fp16"])
@pytest.mark.parametrize("name", ["tiny_sd15", "tiny_sd3"])
def test_the_dtype_that_a_flag_asks_for_is_compiled(flag, name, load, sample, registry, monkeypatch):
    set_flag(monkeypatch, flag)
    monkeypatch.setattr(comfy.model_management, "FORCE_FP16", flag == "force_fp16", raising=False)
    model = load(name)
    before = totals.eager_calls.copy()
    ours, text = compiled(model)
    assert "normal speed" not in text
    computed_in = model.model.manual_cast_dtype or model.model.get_dtype()
    bound = {torch.bfloat16: 0.1, torch.float16: 2e-2}.get(computed_in, BOUND)  # a step is amplified by guidance
    with totals.expect(compiles=0, retired=0):
        assert_images(sample, name, ours, model, bound)
        assert_images(sample, name, adapted(low_rank)(ours, 1.0), adapted(low_rank)(model, 1.0), bound)
    assert totals.eager_calls == before
    if flag.startswith("fp8") and name == "tiny_sd15":  # SD3 of 2024 has a dtype of its own
        stored = {weight.dtype for weight in model.model.diffusion_model.parameters()}
        assert any("float8" in str(dtype) for dtype in stored)


def scaled_fp8(state):
    """A checkpoint's linear layers as scaled float8, in the form that ComfyUI reads."""
    out = {}
    for key, weight in state.items():
        out[key] = weight
        if weight.ndim == 2 and key.endswith(".weight") and "joint_blocks" in key:
            scale = weight.abs().max().float() / 448
            out[key] = (weight.float() / scale).to(torch.float8_e4m3fn)
            out[key.removesuffix("weight") + "scale_weight"] = scale
    return out | {"scaled_fp8": torch.empty(0, dtype=torch.float8_e4m3fn)}


def test_scaled_fp8_gives_eagers_image(load, sample, registry):
    if not hasattr(comfy.sd, "load_diffusion_model_state_dict"):
        pytest.skip("this ComfyUI has no scaled fp8")
    plain = load("tiny_sd3")
    with torch.inference_mode():  # as the nodes load it
        model = comfy.sd.load_diffusion_model_state_dict(scaled_fp8(plain.model.diffusion_model.state_dict()))
    weights = [*model.model.diffusion_model.parameters()]
    quantised = any(type(weight).__name__ == "QuantizedTensor" for weight in weights)  # as ComfyUI of 2026 loads it
    assert quantised or any(weight.dtype == torch.float8_e4m3fn for weight in weights)
    before = totals.eager_calls.copy()
    ours, _ = compiled(model)
    sample(ours, "tiny_sd3")
    with totals.expect(compiles=0, retired=0):
        assert_images(sample, "tiny_sd3", ours, model)
        assert_images(sample, "tiny_sd3", adapted(low_rank)(ours, 1.0), adapted(low_rank)(model, 1.0))
    assert totals.eager_calls == before


class Packed(torch.Tensor):
    """A weight that is kept as bytes, as GGUF loaders have it."""


class PackedLinear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.data.float()
        self.register_buffer("scale", weight.abs().max() / 127)
        packed = torch.Tensor._make_subclass(Packed, (weight / self.scale).round().to(torch.int8), False)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias

    def forward(self, x):
        weight = self.weight.as_subclass(torch.Tensor).float() * self.scale
        return nn.functional.linear(x, weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


def test_packed_weights_pass_through_with_their_type_and_the_rest_is_compiled(load, sample, registry):
    model = load("tiny_sd15")
    block = model.model.diffusion_model.middle_block[1]
    attention = block.transformer_blocks[0].attn1
    attention.to_q = PackedLinear(attention.to_q)
    assert type(attention.to_q.weight) is Packed
    before = totals.eager_calls.copy()
    ours, text = compiled(model)
    assert text.splitlines()[1].startswith("Not compiled: spatial transformer. ")
    assert text.splitlines()[1].endswith(" (weights of type Packed)")
    steps = 2
    calls = totals.calls
    assert_same(sample(ours, "tiny_sd15", steps=steps), sample(model, "tiny_sd15", steps=steps))
    eager = totals.eager_calls - before
    assert eager == {Reason(ReasonCode.WEIGHT_TYPE, "Packed"): steps}
    assert totals.calls - calls > 3 * steps


# Where memory is short. ComfyUI then keeps some weights on the CPU, and copies them at each call.


@pytest.fixture
def free_memory(monkeypatch):
    """Let ComfyUI see as much free memory on the GPU as one likes."""
    measure = comfy.model_management.get_free_memory
    seen = [None]

    def report(device=None, torch_free_too=False):
        if seen[0] is None or (device is not None and torch.device(device).type == "cpu"):
            return measure(device, torch_free_too)
        return (seen[0], 0) if torch_free_too else seen[0]

    monkeypatch.setattr(comfy.model_management, "get_free_memory", report)
    monkeypatch.setattr(comfy.model_management, "minimum_inference_memory", lambda: 0)
    return lambda size: seen.__setitem__(0, size)


def memory_in_use():
    """Bytes in tensors. cuBLAS has some for each stream that it was used on, and ComfyUI makes streams and buffers."""
    getattr(comfy.model_management, "reset_cast_buffers", lambda: None)()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


@on_gpu
@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("state", ["NORMAL_VRAM", "LOW_VRAM", "NO_VRAM"])
def test_any_part_of_the_weights_may_be_on_the_gpu(state, streams, load, sample, registry, free_memory, monkeypatch):
    management = comfy.model_management
    monkeypatch.setattr(management, "NUM_STREAMS", streams, raising=False)
    model = load("tiny_sdxl")
    ours, _ = compiled(model)
    theirs = [sample(model, "tiny_sdxl", **prompt) for prompt in PROMPTS]
    management.unload_all_models()
    held = memory_in_use()
    monkeypatch.setattr(management, "vram_state", management.VRAMState[state])
    monkeypatch.setattr(model, "memory_required", lambda shape: 0, raising=False)
    whole = model.model_size()
    eager = totals.eager_calls.copy()
    with totals.expect(compiles=0, retired=0):
        for share in (1.5, 0.5, 0.2, 0.8, 0.0):
            free_memory(int(whole * share) + 1)
            for changed, reference in ((ours, theirs), (adapted(low_rank)(ours, 0.5), None)):
                for prompt, expected in zip(PROMPTS, reference or (None,) * 3, strict=True):
                    image = sample(changed, "tiny_sdxl", **prompt)
                    if expected is None:
                        expected = sample(adapted(low_rank)(model, 0.5), "tiny_sdxl", **prompt)
                    assert_same(image, expected)
            management.unload_all_models()
        monkeypatch.undo()
        assert_same(sample(ours, "tiny_sdxl"), theirs[0])
        assert totals.eager_calls == eager
    management.unload_all_models()
    assert memory_in_use() <= held + 2**20


@on_gpu
def test_weights_that_wait_in_pinned_memory_are_weights_on_the_cpu(load, sample, registry, free_memory, monkeypatch):
    """As newer cores keep what does not fit."""
    model = load("tiny_sdxl")
    ours, _ = compiled(model)
    theirs = [sample(model, "tiny_sdxl", **prompt) for prompt in PROMPTS]
    comfy.model_management.unload_all_models()
    monkeypatch.setattr(model, "memory_required", lambda shape: 0, raising=False)
    free_memory(model.model_size() // 2)
    sample(ours, "tiny_sdxl")
    waiting = [weight for weight in model.model.parameters() if weight.device.type == "cpu"]
    assert waiting
    for weight in waiting:
        weight.data = weight.data.pin_memory()
    before = totals.eager_calls.copy()
    with totals.expect(compiles=0, retired=0):
        for prompt, expected in zip(PROMPTS, theirs, strict=True):
            assert_same(sample(ours, "tiny_sdxl", **prompt), expected)
    assert totals.eager_calls == before


@on_gpu
def test_graphs_hold_no_memory_that_comfyui_does_not_know_of(load, sample, registry):
    management = comfy.model_management
    model = load("tiny_sdxl")
    sample(model, "tiny_sdxl")
    device = model.load_device
    management.soft_empty_cache()
    eager = management.get_free_memory(device)
    ours, _ = compiled(model)
    for prompt in PROMPTS:
        sample(ours, "tiny_sdxl", **prompt)
    management.soft_empty_cache()
    assert management.get_free_memory(device) >= eager - 32 * 2**20


@on_gpu
def test_a_vae_on_the_cpu_beside_a_gpu(load_vae, registry, monkeypatch):
    set_flag(monkeypatch, "cpu_vae")
    vae = load_vae("small_kl")
    assert vae.device.type == "cpu"
    ours, text = host.compile_vae(vae, host.Request("eager", verify=False))
    assert "normal speed" not in text
    latent = torch.randn(1, 4, 8, 12, generator=torch.Generator().manual_seed(0))
    assert_same(ours.decode(latent), vae.decode(latent))
