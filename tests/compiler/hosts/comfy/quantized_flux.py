"""A small Flux with weights in any format of ComfyUI's, and how to sample it."""

from __future__ import annotations

import json

import comfy.ops
import comfy.sample
import comfy.sd
import pytest
import torch

quant_ops = pytest.importorskip("comfy.quant_ops", reason="this ComfyUI has no quantised weights")
if not getattr(quant_ops, "_CK_AVAILABLE", False):
    pytest.skip("comfy_kitchen is not installed", allow_module_level=True)

FLUX = {
    "image_model": "flux", "in_channels": 16, "out_channels": 16, "patch_size": 2, "vec_in_dim": 64,
    "context_in_dim": 64, "hidden_size": 256, "mlp_ratio": 4.0, "num_heads": 2, "depth": 2, "depth_single_blocks": 2,
    "axes_dim": [16, 56, 56], "theta": 10000, "qkv_bias": True, "guidance_embed": True, "txt_ids_dims": [],
}  # fmt: skip
KIND_OF_SCALE = {"float8_e4m3fn": {"scale": "recalculate"}, "float8_e5m2": {"scale": "recalculate"}}


def flux_state():
    """The weights of a small Flux, in bfloat16."""
    from comfy.ldm.flux.model import Flux

    settings = {name: value for name, value in FLUX.items() if name != "image_model"}
    network = Flux(**settings, dtype=torch.float32, device="cpu", operations=comfy.ops.disable_weight_init)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if weight.ndim > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * weight[0].numel() ** -0.5)
            else:
                weight.fill_(1.0 if name.endswith(("weight", "scale")) else 0.02)
    return {name: weight.to(torch.bfloat16) for name, weight in network.state_dict().items()}


def quantized(state, chosen, **settings):
    """Quantise the blocks' matrices as a checkpoint has them. `chosen` names a format, or returns one for a key."""
    out = {}
    for key, weight in state.items():
        format_ = chosen(key) if callable(chosen) else chosen
        out[key] = weight
        if format_ is None or weight.ndim != 2 or "_blocks." not in key or not key.endswith(".weight"):
            continue
        layout = quant_ops.QUANT_ALGOS[format_]["comfy_tensor_layout"]
        made = quant_ops.QuantizedTensor.from_float(weight, layout, **KIND_OF_SCALE.get(format_, {}))
        out.update(made.state_dict(key))
        note = json.dumps({"format": format_, **settings}).encode()
        out[f"{key.removesuffix('weight')}comfy_quant"] = torch.tensor(list(note), dtype=torch.uint8)
    return out


def load_flux(state, chosen, **settings):
    """Load the small Flux with weights in a format, as the nodes load it."""
    with torch.inference_mode():
        return comfy.sd.load_diffusion_model_state_dict(quantized(state, chosen, **settings))


def sampled(model, height=16, width=24, tokens=20, steps=2):
    """Sample; sizes in latent units."""
    latent = torch.zeros(1, 16, height, width)
    text, pooled = (
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        for seed, shape in ((1, (1, tokens, 64)), (2, (1, 64)))
    )
    with torch.inference_mode():
        conditioning = [[text, {"pooled_output": pooled}]]
        noise = comfy.sample.prepare_noise(latent, 1)
        arguments = (model, noise, steps, 1.0, "euler", "simple", conditioning, conditioning, latent)
        return comfy.sample.sample(*arguments, disable_pbar=True, seed=1)


def error(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()
