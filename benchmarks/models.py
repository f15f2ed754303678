"""Real architectures at real sizes with random weights, as ComfyUI's own objects."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

SDXL = {
    "image_size": 32,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 320,
    "num_res_blocks": [2, 2, 2],
    "channel_mult": [1, 2, 4],
    "transformer_depth": [0, 0, 2, 2, 10, 10],
    "transformer_depth_middle": 10,
    "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
    "context_dim": 2048,
    "num_head_channels": 64,
    "num_heads": -1,
    "use_spatial_transformer": True,
    "use_linear_in_transformer": True,
    "num_classes": "sequential",
    "adm_in_channels": 2816,
    "use_checkpoint": False,
    "legacy": False,
    "use_temporal_attention": False,
}
SD15 = {
    "image_size": 32,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 320,
    "num_res_blocks": [2, 2, 2, 2],
    "channel_mult": [1, 2, 4, 4],
    "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0],
    "transformer_depth_middle": 1,
    "transformer_depth_output": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
    "context_dim": 768,
    "num_heads": 8,
    "num_head_channels": -1,
    "use_spatial_transformer": True,
    "use_linear_in_transformer": False,
    "adm_in_channels": None,
    "use_checkpoint": False,
    "legacy": False,
    "use_temporal_attention": False,
}
SD3_MEDIUM = {
    "in_channels": 16,
    "patch_size": 2,
    "depth": 24,
    "input_size": None,
    "adm_in_channels": 2048,
    "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 1536}},
    "num_patches": 36864,
    "pos_embed_max_size": 192,
    "pos_embed_scaling_factor": None,
}
FLUX_DEV = {
    "image_model": "flux",
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": 2,
    "vec_in_dim": 768,
    "context_in_dim": 4096,
    "hidden_size": 3072,
    "mlp_ratio": 4.0,
    "num_heads": 24,
    "depth": 19,
    "depth_single_blocks": 38,
    "axes_dim": [16, 56, 56],
    "theta": 10000,
    "qkv_bias": True,
    "guidance_embed": True,
}
WAN_1_3B = {
    "image_model": "wan2.1",
    "model_type": "t2v",
    "dim": 1536,
    "in_dim": 16,
    "out_dim": 16,
    "num_heads": 12,
    "ffn_dim": 8960,
    "num_layers": 30,
    "patch_size": (1, 2, 2),
    "freq_dim": 256,
    "window_size": (-1, -1),
    "qk_norm": True,
    "cross_attn_norm": True,
    "eps": 1e-6,
}
FLUX_6 = FLUX_DEV | {"depth": 6, "depth_single_blocks": 12}
KLEIN_4B = {
    "image_model": "flux2",
    "in_channels": 128,
    "out_channels": 128,
    "patch_size": 1,
    "vec_in_dim": None,
    "context_in_dim": 7680,
    "hidden_size": 3072,
    "mlp_ratio": 3.0,
    "num_heads": 24,
    "depth": 5,
    "depth_single_blocks": 20,
    "axes_dim": [32, 32, 32, 32],
    "theta": 2000,
    "qkv_bias": False,
    "ops_bias": False,
    "guidance_embed": False,
    "global_modulation": True,
    "mlp_silu_act": True,
    "default_ref_method": "index",
    "ref_index_scale": 10.0,
    "txt_ids_dims": [3],
}
CHROMA_6 = {
    "image_model": "chroma",
    "in_channels": 64,
    "out_channels": 64,
    "in_dim": 64,
    "out_dim": 3072,
    "hidden_dim": 5120,
    "n_layers": 5,
    "patch_size": 2,
    "vec_in_dim": None,
    "context_in_dim": 4096,
    "hidden_size": 3072,
    "mlp_ratio": 4.0,
    "num_heads": 24,
    "depth": 6,
    "depth_single_blocks": 12,
    "axes_dim": [16, 56, 56],
    "theta": 10000,
    "qkv_bias": True,
    "txt_ids_dims": [],
}
Z_IMAGE = {
    "image_model": "lumina2",
    "patch_size": 2,
    "in_channels": 16,
    "dim": 3840,
    "cap_feat_dim": 2560,
    "n_layers": 30,
    "n_heads": 30,
    "n_kv_heads": 30,
    "qk_norm": True,
    "axes_dims": [32, 48, 48],
    "axes_lens": [1536, 512, 512],
    "rope_theta": 256.0,
    "ffn_dim_multiplier": 8.0 / 3.0,
    "z_image_modulation": True,
    "time_scale": 1000.0,
    "pad_tokens_multiple": 32,
}
QWEN_IMAGE_15 = {"image_model": "qwen_image", "in_channels": 64, "num_layers": 15}
WAN_14B_10 = WAN_1_3B | {"dim": 5120, "num_heads": 40, "ffn_dim": 13824, "num_layers": 10}
LTX2_NOTED = {
    "num_attention_heads": 32,
    "attention_head_dim": 128,
    "cross_attention_dim": 4096,
    "caption_channels": 3840,
    "in_channels": 128,
    "audio_num_attention_heads": 32,
    "audio_attention_head_dim": 64,
    "audio_cross_attention_dim": 2048,
    "audio_in_channels": 128,
    "positional_embedding_theta": 10000.0,
    "positional_embedding_max_pos": [20, 2048, 2048],
    "audio_positional_embedding_max_pos": [20],
    "timestep_scale_multiplier": 1000.0,
    "av_ca_timestep_scale_multiplier": 1000.0,
    "use_middle_indices_grid": True,
    "causal_temporal_positioning": True,
    "rope_type": "split",
    "frequencies_precision": "float64",
}
"""What a file of LTX-2 says of itself: shapes alone do not."""
LTX2_12 = LTX2_NOTED | {"image_model": "ltxav", "num_layers": 12}
CONFIGS = {
    "sd15": SD15,
    "sdxl": SDXL,
    "sd3": SD3_MEDIUM,
    "flux": FLUX_DEV,
    "flux6": FLUX_6,
    "wan": WAN_1_3B,
    "z_image": Z_IMAGE,
    "qwen_image": QWEN_IMAGE_15,
    "klein": KLEIN_4B,
    "chroma": CHROMA_6,
    "wan22": WAN_14B_10,
    "ltx2": LTX2_12,
}
"""What `comfy.model_detection` finds out from a checkpoint of each."""
CLASSES = {
    "sd15": "SD15",
    "sdxl": "SDXL",
    "sd3": "SD3",
    "flux": "Flux",
    "flux6": "Flux",
    "wan": "WAN21_T2V",
    "z_image": "ZImage",
    "qwen_image": "QwenImage",
    "klein": "Flux2",
    "chroma": "Chroma",
    "wan22": "WAN21_T2V",
    "ltx2": "LTXAV",
}
_FLUX_LAYERS = ("depth", "depth_single_blocks")
LAYERS = {
    "flux": _FLUX_LAYERS,
    "flux6": _FLUX_LAYERS,
    "klein": _FLUX_LAYERS,
    "chroma": _FLUX_LAYERS,
    "z_image": ("n_layers",),
    "qwen_image": ("num_layers",),
    "wan": ("num_layers",),
    "wan22": ("num_layers",),
    "ltx2": ("num_layers",),
}
"""The settings that say how often a block repeats, and nothing else."""
_WHOLE_FLUX = (19, 38)
WHOLE = {"flux6": _WHOLE_FLUX, "chroma": _WHOLE_FLUX, "qwen_image": (60,), "wan22": (40,), "ltx2": (48,)}
"""The blocks of those that are shortened in CONFIGS, as people have them."""


VAE_CONFIG = {
    "double_z": True,
    "z_channels": 4,
    "resolution": 256,
    "in_channels": 3,
    "out_ch": 3,
    "ch": 128,
    "ch_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "attn_resolutions": [],
    "dropout": 0.0,
}


def use_comfyui(path: Path) -> None:
    """Make ComfyUI's modules importable."""
    sys.argv = sys.argv[:1]  # ComfyUI parses the command line on import
    sys.path.insert(0, str(path))
    import comfy.cli_args

    comfy.cli_args.args.cpu = not torch.cuda.is_available()


def patcher(name: str, dtype: torch.dtype, depth: int | str | None = None):
    """Return a ModelPatcher of the named architecture on ComfyUI's device, every parameter filled.

    `depth` is how many blocks of each kind it gets, or "whole". Raises KeyError if that cannot be chosen.
    """
    import comfy.model_management
    import comfy.model_patcher
    import comfy.supported_models as supported

    layers = _layers(name, depth) if depth else {}
    config = getattr(supported, CLASSES[name])(dict(CONFIGS[name]) | _newer_options(name) | layers)
    config.set_inference_dtype(dtype, None)
    device = comfy.model_management.get_torch_device()
    # The tables of its schedule as well, as ComfyUI's loader does it: on the CPU each step would wait for them.
    model = config.get_model({}, "", device=device).eval().to(device)
    fill(model.diffusion_model)
    return comfy.model_patcher.ModelPatcher(model, load_device=device, offload_device=torch.device("cpu"))


def _layers(name: str, depth: int | str) -> dict[str, int]:
    if depth == "whole":
        return dict(zip(LAYERS[name], WHOLE[name], strict=True))
    return dict.fromkeys(LAYERS[name], depth)


def control_net(dtype: torch.dtype) -> torch.nn.Module:
    """Return a ControlNet for SDXL on ComfyUI's device, as the file of one holds it."""
    import comfy.cldm.cldm
    import comfy.model_management
    import comfy.ops

    config = {name: value for name, value in SDXL.items() if name != "out_channels"}
    device = comfy.model_management.get_torch_device()
    options = {"hint_channels": 3, "dtype": dtype, "device": device, "operations": comfy.ops.disable_weight_init}
    network = comfy.cldm.cldm.ControlNet(**config, **options)
    fill(network)
    return network


def metadata(name: str) -> dict[str, str] | None:
    """Return what a file of the named architecture says of itself besides names and shapes; None if nothing."""
    return {"config": json.dumps({"transformer": LTX2_NOTED})} if name == "ltx2" else None


def _newer_options(name: str) -> dict:
    """Return what newer cores want to be told besides."""
    if not name.startswith("flux"):
        return {}
    import comfy.ldm.flux.model

    fields = comfy.ldm.flux.model.FluxParams.__dataclass_fields__
    return {"txt_ids_dims": []} if "txt_ids_dims" in fields else {}


def in_float32(name: str, original):
    """Return a patcher of the same weights in float32, to measure errors by."""
    twin = patcher(name, torch.float32)
    with torch.no_grad():
        for ours, theirs in zip(twin.model.parameters(), original.model.parameters(), strict=True):
            ours.copy_(theirs)
    return twin


VAES = ("kl", "taesd", "wan", "ltx2", "hunyuan", "hunyuan15")
VIDEO_VAES = ("wan", "ltx2", "hunyuan", "hunyuan15")
HUNYUAN_VAE_CONFIG = VAE_CONFIG | {"z_channels": 16, "conv3d": True, "time_compress": 4}
HUNYUAN_15_VAE_CONFIG = {
    "block_out_channels": [128, 256, 512, 1024, 1024],
    "num_res_blocks": 2,
    "in_channels": 3,
    "out_channels": 3,
    "z_channels": 32,
    "ffactor_spatial": 16,
    "ffactor_temporal": 4,
}
WAN_VAE_CONFIG = {
    "dim": 96,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
    "dropout": 0.0,
}


def vae(name: str, dtype: torch.dtype):
    """Return a `comfy.sd.VAE`: "kl" as SD1.5 and SDXL have it, "wan" as Wan 2.1 and Qwen-Image, "ltx2", "taesd",
    "hunyuan" as HunyuanVideo, or "hunyuan15" as HunyuanVideo 1.5."""
    import comfy.sd

    network = _vae_network(name)
    fill(network)
    return comfy.sd.VAE(sd=network.state_dict(), dtype=dtype)


def _vae_network(name: str) -> torch.nn.Module:
    if name == "taesd":
        from comfy.taesd.taesd import TAESD

        return TAESD()
    if name == "wan":
        from comfy.ldm.wan.vae import WanVAE

        return WanVAE(**WAN_VAE_CONFIG)
    if name == "ltx2":
        from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE

        network = VideoVAE(version=2)
        statistics = network.per_channel_statistics
        # Uninitialised, they would make all latents the same.
        statistics.get_buffer("std-of-means").fill_(1.0)
        statistics.get_buffer("mean-of-means").zero_()
        return network
    if name == "hunyuan15":
        from comfy.ldm.models.autoencoder import AutoencodingEngine

        halves = {
            f"{half.lower()}_config": {
                "target": f"comfy.ldm.hunyuan_video.vae_refiner.{half}",
                "params": HUNYUAN_15_VAE_CONFIG,
            }
            for half in ("Encoder", "Decoder")
        }
        regularizer = {"target": "comfy.ldm.models.autoencoder.EmptyRegularizer"}
        return AutoencodingEngine(regularizer_config=regularizer, **halves)
    from comfy.ldm.models.autoencoder import AutoencoderKL

    if name == "hunyuan":
        return AutoencoderKL(ddconfig=HUNYUAN_VAE_CONFIG, embed_dim=16)
    return AutoencoderKL(ddconfig=VAE_CONFIG, embed_dim=4)


@torch.no_grad()
def fill(network: torch.nn.Module) -> None:
    """Fill every parameter: ComfyUI leaves uninitialised what no checkpoint fills."""
    generators: dict[torch.device, torch.Generator] = {}
    for name, parameter in network.named_parameters():
        device = parameter.device
        generator = generators.setdefault(device, torch.Generator(device=device).manual_seed(0))
        if parameter.ndim > 1:
            parameter.normal_(0, parameter[0].numel() ** -0.5, generator=generator)
        else:
            parameter.fill_(float(name.endswith(("weight", "scale"))))


def step_inputs(model, name: str, batch: int, height: int, width: int, tokens: int = 77, frames: int = 21) -> dict:
    """Return arguments of `BaseModel.apply_model` for one step; sizes in latent units, frames of a video model."""
    config, device = CONFIGS[name], model.device
    text = config.get("context_dim") or config.get("context_in_dim") or 4096
    size = (frames, height, width) if name == "wan" else (height, width)
    inputs = {
        "x": torch.randn(batch, model.latent_format.latent_channels, *size, device=device),
        "t": torch.full((batch,), 5.0 if name in ("sd15", "sdxl") else 0.5, device=device),
        "c_crossattn": torch.randn(batch, tokens, text, device=device),
        "transformer_options": {},
    }
    pooled = config.get("adm_in_channels") or config.get("vec_in_dim")
    if pooled:
        inputs["y"] = torch.randn(batch, pooled, device=device)
    if name == "flux":
        inputs["guidance"] = torch.full((batch,), 3.5, device=device)
    return inputs
