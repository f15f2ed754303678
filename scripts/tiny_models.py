"""Write small random models that ComfyUI detects and loads as the real architectures.

    python scripts/tiny_models.py --comfyui CHECKOUT_OR_EMPTY --out FOLDER [NAME ...]

Shapes come from ComfyUI's own modules on the meta device. A full-width text encoder or Flux block would
take gigabytes, so each matrix is saved as overlapping rows of one short random buffer: torch stores the
buffer once, and loading copies the values out.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
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
    import torch

    comfy.cli_args.args.cpu = True
    for name in options.names or MODELS:
        path = options.out / "checkpoints" / f"{name}.ckpt"
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
    partial = path.with_suffix(".partial")
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


def _network(cls: type, **config: Any) -> Shapes:
    import comfy.ops
    import torch

    operations = comfy.ops.disable_weight_init
    network = cls(**config, dtype=torch.float16, device="meta", operations=operations)
    return _shapes(network, "model.diffusion_model.")


def _unet(**config: Any) -> Shapes:
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    common = {"image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 320}
    common |= {"use_spatial_transformer": True, "legacy": False, "use_checkpoint": False}
    return _network(UNetModel, **common | config)


def _tiny_vae(latent_channels: int) -> Shapes:
    import torch
    from comfy.taesd.taesd import TAESD

    with torch.device("meta"):
        vae = TAESD() if latent_channels == 4 else TAESD(latent_channels=latent_channels)
    return _shapes(vae, "first_stage_model.")


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


def sd15(**changes: Any) -> Shapes:
    """Stable Diffusion 1.5 with two levels of one block, its whole text encoder, and TAESD."""
    unet = _unet(
        context_dim=768,
        num_heads=8,
        num_head_channels=-1,
        use_linear_in_transformer=False,
        channel_mult=[1, 1],
        num_res_blocks=[1, 1],
        transformer_depth=[1, 1],
        transformer_depth_output=[1, 1, 1, 1],
        transformer_depth_middle=1,
        **changes,
    )
    return unet | _tiny_vae(4) | _clip_l()


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


def flux() -> Shapes:
    """Flux with one block of each kind, at full width. Without text encoders and VAE."""
    from comfy.ldm.flux.model import Flux

    return _network(
        Flux,
        image_model="flux",
        in_channels=16,
        out_channels=16,
        patch_size=2,
        vec_in_dim=768,
        context_in_dim=4096,
        hidden_size=3072,
        mlp_ratio=4.0,
        num_heads=24,
        depth=1,
        depth_single_blocks=1,
        axes_dim=[16, 56, 56],
        theta=10000,
        qkv_bias=True,
        guidance_embed=True,
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
}

if __name__ == "__main__":
    main()
