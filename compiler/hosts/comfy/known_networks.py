"""Networks whose sizes are known by name, so that their graphs can be made without a file of weights.

What is written is the header of a safetensors file: names, shapes and a dtype. ComfyUI's own loader finds out from it
which model it is. A block that repeats is one graph, so two of a kind stand for all of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DTYPES = {"fp16": "F16", "bf16": "BF16", "fp32": "F32", "fp8": "F8_E4M3"}
"""By the names that people use: those of safetensors."""
FEW = 2
"""Blocks of a kind that are enough: one alone would not repeat."""


@dataclass(frozen=True)
class Known:
    """A network, by what its class in `comfy.supported_models` is built with."""

    cls: str
    config: Mapping[str, Any]
    layers: Mapping[str, int]
    """Settings that say how often a block repeats, and nothing else."""
    dtype: str
    """The one that people have it in, a key of DTYPES."""

    def settings(self, is_whole: bool = False) -> dict[str, Any]:
        """Return what the network is built with: as often as needed, or as often as in the checkpoint."""
        return {**self.config, **(self.layers if is_whole else dict.fromkeys(self.layers, FEW))}


_UNET = {
    "image_size": 32, "in_channels": 4, "out_channels": 4, "use_spatial_transformer": True, "legacy": False,
    "use_checkpoint": False, "use_temporal_attention": False,
}  # fmt: skip
_SD15 = _UNET | {
    "model_channels": 320, "context_dim": 768, "num_heads": 8, "num_head_channels": -1,
    "use_linear_in_transformer": False, "adm_in_channels": None, "channel_mult": [1, 2, 4, 4],
    "num_res_blocks": [2, 2, 2, 2], "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0], "transformer_depth_middle": 1,
    "transformer_depth_output": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
}  # fmt: skip
_SDXL = _UNET | {
    "model_channels": 320, "context_dim": 2048, "num_heads": -1, "num_head_channels": 64,
    "use_linear_in_transformer": True, "num_classes": "sequential", "adm_in_channels": 2816,
    "channel_mult": [1, 2, 4], "num_res_blocks": [2, 2, 2], "transformer_depth": [0, 0, 2, 2, 10, 10],
    "transformer_depth_middle": 10, "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
}  # fmt: skip
_REFINER = _SDXL | {
    "model_channels": 384, "context_dim": 1280, "adm_in_channels": 2560, "channel_mult": [1, 2, 4, 4],
    "num_res_blocks": [2, 2, 2, 2], "transformer_depth": [0, 0, 4, 4, 4, 4, 0, 0], "transformer_depth_middle": 4,
    "transformer_depth_output": [0, 0, 0, 4, 4, 4, 4, 4, 4, 0, 0, 0],
}  # fmt: skip
_SD3 = {
    "in_channels": 16, "patch_size": 2, "depth": 24, "input_size": None, "adm_in_channels": 2048,
    "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 1536}},
    "num_patches": 192 * 192, "pos_embed_max_size": 192, "pos_embed_scaling_factor": None,
}  # fmt: skip
_FLUX = {
    "image_model": "flux", "in_channels": 16, "out_channels": 16, "patch_size": 2, "vec_in_dim": 768,
    "context_in_dim": 4096, "hidden_size": 3072, "mlp_ratio": 4.0, "num_heads": 24, "axes_dim": [16, 56, 56],
    "theta": 10000, "qkv_bias": True, "guidance_embed": True, "txt_ids_dims": [],
}  # fmt: skip
_WAN = {
    "image_model": "wan2.1", "model_type": "t2v", "in_dim": 16, "out_dim": 16, "freq_dim": 256, "text_dim": 4096,
    "patch_size": (1, 2, 2), "window_size": (-1, -1), "qk_norm": True, "cross_attn_norm": True, "eps": 1e-6,
}  # fmt: skip
_QWEN = {"image_model": "qwen_image", "in_channels": 64}

NETWORKS = {
    "SD15": Known("SD15", _SD15, {}, "fp16"),
    "SDXL": Known("SDXL", _SDXL, {}, "fp16"),
    "SDXLRefiner": Known("SDXLRefiner", _REFINER, {}, "fp16"),
    "SD3": Known("SD3", _SD3, {}, "fp16"),  # its width follows its depth
    "Flux": Known("Flux", _FLUX, {"depth": 19, "depth_single_blocks": 38}, "bf16"),
    "FluxSchnell": Known(
        "FluxSchnell", _FLUX | {"guidance_embed": False}, {"depth": 19, "depth_single_blocks": 38}, "bf16"
    ),
    "WAN21_T2V_1.3B": Known(
        "WAN21_T2V", _WAN | {"dim": 1536, "ffn_dim": 8960, "num_heads": 12}, {"num_layers": 30}, "fp16"
    ),
    "WAN21_T2V_14B": Known(
        "WAN21_T2V", _WAN | {"dim": 5120, "ffn_dim": 13824, "num_heads": 40}, {"num_layers": 40}, "fp16"
    ),
    "QwenImage": Known("QwenImage", _QWEN, {"num_layers": 60}, "bf16"),
}


def network_of(known: Known, is_whole: bool = False) -> torch.nn.Module:
    """Return the network on the meta device. Raises AttributeError if this ComfyUI lacks its class."""
    import comfy.supported_models

    settings = known.settings(is_whole)
    config = getattr(comfy.supported_models, known.cls)
    while True:
        made = config(dict(settings))
        made.set_inference_dtype(torch.float16, None)
        try:
            return made.get_model({}, "", device="meta").diffusion_model
        except TypeError as error:
            settings = _without_unknown(settings, str(error)) or _raise(error)


def header(known: Known, dtype: str) -> bytes:
    """Return the header of a file with this network: the length, and the names, shapes and dtypes as JSON."""
    name, size = DTYPES[dtype], torch.empty(0, dtype=_TORCH[dtype]).element_size()
    fields, end = {}, 0
    for key, tensor in network_of(known).state_dict().items():
        begin, end = end, end + tensor.numel() * size
        fields[key] = {"dtype": name, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(fields).encode()
    return len(text).to_bytes(8, "little") + text


_TORCH = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}


def main(code: str, *wanted: str) -> None:
    """Write headers: `wanted` are network, dtype and path, one after the other. `code` is ComfyUI's folder, if any.

    Prints a line for each network that this ComfyUI cannot build.
    """
    if code:
        sys.path.insert(0, code)
    import comfy.cli_args

    comfy.cli_args.args.cpu = True  # nothing runs here
    for name, dtype, path in zip(wanted[::3], wanted[1::3], wanted[2::3], strict=True):
        try:
            Path(path).write_bytes(header(NETWORKS[name], dtype))
        except AttributeError as error:
            print(f"{name}: this ComfyUI cannot build it ({error})")


def _without_unknown(settings: dict[str, Any], error: str) -> dict[str, Any] | None:
    """Return the settings without the one that a network of another version does not know."""
    return next(
        ({key: value for key, value in settings.items() if key != name} for name in settings if f"'{name}'" in error),
        None,
    )


def _raise(error: Exception) -> Any:
    raise error
