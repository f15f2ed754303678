"""Write small random models that ComfyUI detects and loads as the real architectures.

    python scripts/tiny_models.py --comfyui CHECKOUT_OR_EMPTY --out FOLDER [NAME ...]

Shapes come from ComfyUI's own modules on the meta device. A full-width text encoder or Flux block would
take gigabytes, so each matrix is saved as overlapping rows of one short random buffer: torch stores the
buffer once, and loading copies the values out.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROW_STEP = 7
"""Distance of neighbouring rows in their buffer."""

Shapes = dict[str, tuple[int, ...]]


def main() -> None:
    """Write the models named on the command line, unless they are there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", default="", help="a checkout; empty if ComfyUI is an installed package")
    parser.add_argument("--out", type=Path, required=True, help="ComfyUI's models folder")
    parser.add_argument("names", nargs="*", help=f"any of {', '.join(MODELS)}; all by default")
    options = parser.parse_args()
    sys.argv = sys.argv[:1]  # ComfyUI parses the command line on import
    if options.comfyui:
        sys.path.insert(0, options.comfyui)
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    write_missing(options.out, options.names or MODELS)


def write_missing(folder: Path, names: Iterable[str]) -> None:
    """Write these models to ComfyUI's models folder, unless they are there. ComfyUI can be imported."""
    import torch

    for name in names:
        path = folder / FOLDERS.get(name, "checkpoints") / f"{name}.ckpt"
        if not path.exists():
            with torch.no_grad():
                shapes = MODELS[name]()
            write(path, shapes, seed=sum(map(ord, name)))


def write(path: Path, shapes: Shapes, seed: int) -> None:
    """Save random half-precision tensors of these shapes, scaled so that activations stay near one."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    state = {name: _random(name, shape, generator) for name, shape in shapes.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")  # two processes of tests may want it at once
    torch.save({"state_dict": state}, partial)
    partial.replace(path)


def _random(name: str, shape: tuple[int, ...], generator: Any) -> Any:
    import torch

    if name.endswith("shift"):
        return torch.zeros(shape)
    if name.startswith("first_stage_model.taesd_decoder.") and shape == (3,):
        return torch.full(shape, 0.5)  # mid grey, so that no image is black
    if len(shape) < 2:
        is_norm = name.endswith(("weight", "scale"))
        return torch.ones(shape) if is_norm else torch.randn(shape, generator=generator) * 0.02
    row = math.prod(shape[1:])
    scale = 0.02 if "embed" in name else row**-0.5
    if ".taesd_" in name:
        scale *= 0.3 if shape[0] == 3 else 1.3  # its activations would fade without training
    buffer = torch.randn(row + (shape[0] - 1) * ROW_STEP, generator=generator).mul(scale).half()
    inner = torch.empty(shape[1:], device="meta").stride()
    return torch.as_strided(buffer, shape, (ROW_STEP, *inner))


def _shapes(module: Any, prefix: str) -> Shapes:
    return {prefix + name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def _network(cls: type, prefix: str = "model.diffusion_model.", **config: Any) -> Shapes:
    import comfy.ops
    import torch

    operations = comfy.ops.disable_weight_init
    return _shapes(cls(**config, dtype=torch.float16, device="meta", operations=operations), prefix)


UNET = {
    "image_size": 32,
    "in_channels": 4,
    "model_channels": 320,
    "use_spatial_transformer": True,
    "legacy": False,
    "use_checkpoint": False,
}


def _unet(**config: Any) -> Shapes:
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    return _network(UNetModel, **UNET | {"out_channels": 4} | config)


def _tiny_vae(latent_channels: int) -> Shapes:
    import torch
    from comfy.taesd.taesd import TAESD

    with torch.device("meta"):
        vae = TAESD() if latent_channels == 4 else TAESD(latent_channels=latent_channels)
    return _shapes(vae, "first_stage_model.")


def _kl_vae(prefix: str) -> Shapes:
    """The autoencoder of SD3 and Flux, at full width: ComfyUI takes the width for granted."""
    import torch
    from comfy.ldm.models.autoencoder import AutoencodingEngine

    config = {"double_z": True, "z_channels": 16, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128}
    config |= {"ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0}
    with torch.device("meta"):
        vae = AutoencodingEngine(
            encoder_config={"target": "comfy.ldm.modules.diffusionmodules.model.Encoder", "params": config},
            decoder_config={"target": "comfy.ldm.modules.diffusionmodules.model.Decoder", "params": config},
            regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        )
    return _shapes(vae, prefix)


def _clip_l() -> Shapes:
    import comfy.sd1_clip
    import torch

    shapes = _shapes(comfy.sd1_clip.SD1ClipModel(device="meta", dtype=torch.float16), "cond_stage_model.")
    mark = "clip_l.transformer.text_model."
    return {
        name.replace("clip_l.", "", 1): shape
        for name, shape in shapes.items()
        if mark in name and not name.endswith("position_ids")
    }


SD15 = {
    "context_dim": 768,
    "num_heads": 8,
    "num_head_channels": -1,
    "use_linear_in_transformer": False,
    "channel_mult": [1, 1],
    "num_res_blocks": [1, 1],
    "transformer_depth": [1, 1],
    "transformer_depth_middle": 1,
}


def sd15(**changes: Any) -> Shapes:
    """Stable Diffusion 1.5 with two levels of one block, its whole text encoder, and TAESD."""
    unet = _unet(**SD15, transformer_depth_output=[1, 1, 1, 1], **changes)
    return unet | _tiny_vae(4) | _clip_l()


def sd15_control_net() -> Shapes:
    """A ControlNet of that UNet."""
    from comfy.cldm.cldm import ControlNet

    return _network(ControlNet, prefix="", **UNET | SD15, hint_channels=3)


def sd15_lora() -> Shapes:
    """A LoRA of rank 4 on each attention's queries in that UNet."""
    prefix, shapes = "model.diffusion_model.", {}
    for name, shape in sd15().items():
        if name.startswith(prefix) and name.endswith(".to_q.weight"):
            layer = name.removeprefix(prefix).removesuffix(".weight").replace(".", "_")
            shapes[f"lora_unet_{layer}.lora_up.weight"] = (shape[0], 4)
            shapes[f"lora_unet_{layer}.lora_down.weight"] = (4, shape[1])
    return shapes


def sd15_inpaint() -> Shapes:
    """The same for inpainting: the latent, a masked latent and the mask go in."""
    return sd15(in_channels=9)


def svd() -> Shapes:
    """Stable Video Diffusion's block layout at a fraction of its width. Without image encoder and VAE."""
    return _unet(
        in_channels=8,
        context_dim=1024,
        num_heads=-1,
        num_head_channels=64,
        use_linear_in_transformer=True,
        num_classes="sequential",
        adm_in_channels=768,
        channel_mult=[1, 1, 1, 1],
        num_res_blocks=[2, 2, 2, 2],
        transformer_depth=[1, 1, 1, 1, 1, 1, 0, 0],
        transformer_depth_output=[1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
        transformer_depth_middle=1,
        use_temporal_attention=True,
        use_temporal_resblock=True,
        extra_ff_mix_layer=True,
        use_spatial_context=True,
        merge_strategy="learned_with_images",
        merge_factor=0.0,
        video_kernel_size=[3, 1, 1],
    )


def sdxl() -> Shapes:
    """SDXL's block layout at a third of its width, and TAESD. Without text encoders."""
    unet = _unet(
        context_dim=2048,
        num_heads=-1,
        num_head_channels=64,
        use_linear_in_transformer=True,
        num_classes="sequential",
        adm_in_channels=2816,
        channel_mult=[1, 1, 1],
        num_res_blocks=[2, 2, 2],
        transformer_depth=[0, 0, 2, 2, 10, 10],
        transformer_depth_output=[0, 0, 0, 1, 1, 1, 1, 1, 1],
        transformer_depth_middle=1,
    )
    return unet | _tiny_vae(4)


def sdxl_refiner() -> Shapes:
    """SDXL's refiner at a fraction of its width. Without text encoder and VAE."""
    return _unet(
        model_channels=384,
        context_dim=1280,
        num_heads=-1,
        num_head_channels=64,
        use_linear_in_transformer=True,
        num_classes="sequential",
        adm_in_channels=2560,
        channel_mult=[1, 1, 1, 1],
        num_res_blocks=[2, 2, 2, 2],
        transformer_depth=[0, 0, 4, 4, 4, 4, 0, 0],
        transformer_depth_output=[0, 0, 0, 4, 4, 4, 4, 4, 4, 0, 0, 0],
        transformer_depth_middle=4,
    )


def sd3() -> Shapes:
    """Stable Diffusion 3 of depth 2, whose width follows its depth. Without text encoders and VAE."""
    from comfy.ldm.modules.diffusionmodules.mmdit import MMDiT

    embedder = {"target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 128}}
    return _network(
        MMDiT,
        input_size=None,
        patch_size=2,
        in_channels=16,
        depth=2,
        adm_in_channels=2048,
        num_patches=64 * 64,
        pos_embed_max_size=64,
        context_embedder_config=embedder,
        pos_embed_scaling_factor=None,
    )


NARROW_FLUX, WIDE_FLUX = 256, 3072


def flux() -> Shapes:
    """Flux with one block of each kind. Without text encoders and VAE.

    It is narrow if this ComfyUI reads the width off a checkpoint. Others take the full width for granted.
    """
    import torch
    from comfy.model_detection import detect_unet_config

    narrow = _flux(NARROW_FLUX)
    weights = {name: torch.empty(shape, device="meta") for name, shape in narrow.items()}
    found = detect_unet_config(weights, "model.diffusion_model.") or {}
    return narrow if found.get("hidden_size") == NARROW_FLUX else _flux(WIDE_FLUX)


def _flux(width: int) -> Shapes:
    from comfy.ldm.flux.model import Flux, FluxParams

    newer = {"txt_ids_dims": []} if "txt_ids_dims" in FluxParams.__dataclass_fields__ else {}
    return _network(
        Flux,
        image_model="flux",
        in_channels=16,
        out_channels=16,
        patch_size=2,
        vec_in_dim=768,
        context_in_dim=4096,
        hidden_size=width,
        mlp_ratio=4.0,
        num_heads=width // 128,
        depth=1,
        depth_single_blocks=1,
        axes_dim=[16, 56, 56],
        theta=10000,
        qkv_bias=True,
        guidance_embed=True,
        **newer,
    )


MODELS: dict[str, Callable[[], Shapes]] = {
    "tiny_sd15": sd15,
    "tiny_sd15_other": sd15,  # the name is the seed: other weights
    "tiny_sd15_inpaint": sd15_inpaint,
    "tiny_svd": svd,
    "tiny_sdxl": sdxl,
    "tiny_sdxl_refiner": sdxl_refiner,
    "tiny_sd3": sd3,
    "tiny_flux": flux,
    "tiny_canny": sd15_control_net,
    "tiny_lora": sd15_lora,
    "tiny_lora_other": sd15_lora,
    "tiny_sd3_with_vae": lambda: sd3() | _kl_vae("first_stage_model."),
    "tiny_svd_with_vae": lambda: svd() | _tiny_vae(4),
    "tiny_flux_unet": flux,
    "tiny_ae": lambda: _kl_vae(""),
}

FOLDERS = {
    "tiny_canny": "controlnet",
    "tiny_lora": "loras",
    "tiny_lora_other": "loras",
    "tiny_flux_unet": "unet",
    "tiny_ae": "vae",
}
"""Where ComfyUI looks for what is no checkpoint."""

if __name__ == "__main__":
    main()
