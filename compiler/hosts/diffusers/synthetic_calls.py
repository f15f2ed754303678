"""Synthetic calls of diffusers' networks, and running calls repeated at other sizes.

A synthetic call runs a weightless copy of the network under fake tensors, to learn which graphs the network needs. A
table has the arguments that pipelines pass to each class of network. A repeated call keeps the running call's
arguments that are not tensors, and its tensors that the table lacks (masks, residuals of a ControlNet, image
embeddings).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ...common.torch_compat import pytree
from ...identity.call_signature import forward_signature
from ...tracing.shape_discovery import ModelCall, Sizes

Inputs = dict[str, Any]
Make = Callable[..., torch.Tensor]
"""Makes an empty tensor of these sizes on the network's device, by default in the network's dtype."""

FACTOR = 8
"""Pixels per latent."""


def _unet(network: nn.Module, make: Make, sizes: Sizes) -> Inputs:
    """`UNet2DConditionModel`: Stable Diffusion, SDXL and their derivatives."""
    config = network.config
    inputs = {
        "sample": make(sizes.batch, config.in_channels, sizes.height, sizes.width),
        "timestep": make(dtype=torch.int64),
        "encoder_hidden_states": make(sizes.batch, sizes.tokens, _text_width(config)),
        "return_dict": False,
    }
    if config.addition_embed_type == "text_time":
        # SDXL's base takes six numbers about the image and its refiner five. Only the sum of the widths must be right.
        widths, numbers = config.addition_time_embed_dim, 6
        pooled = config.projection_class_embeddings_input_dim - numbers * widths
        inputs["added_cond_kwargs"] = {"text_embeds": make(sizes.batch, pooled), "time_ids": make(sizes.batch, numbers)}
    return inputs


def _controlnet(network: nn.Module, make: Make, sizes: Sizes) -> Inputs:
    channels = network.config.conditioning_channels
    picture = make(sizes.batch, channels, FACTOR * sizes.height, FACTOR * sizes.width)
    return _unet(network, make, sizes) | {"controlnet_cond": picture}


def _video_unet(network: nn.Module, make: Make, sizes: Sizes) -> Inputs:
    """`UNetSpatioTemporalConditionModel`: Stable Video Diffusion."""
    config = network.config
    return {
        "sample": make(sizes.batch, sizes.frames, config.in_channels, sizes.height, sizes.width),
        "timestep": make(dtype=torch.float32),
        "encoder_hidden_states": make(sizes.batch, 1, _first(config.cross_attention_dim)),
        "added_time_ids": make(sizes.batch, 3),
        "return_dict": False,
    }


def _sd3(network: nn.Module, make: Make, sizes: Sizes) -> Inputs:
    config = network.config
    return {
        "hidden_states": make(sizes.batch, config.in_channels, sizes.height, sizes.width),
        "timestep": make(sizes.batch, dtype=torch.float32),
        "encoder_hidden_states": make(sizes.batch, sizes.tokens, config.joint_attention_dim),
        "pooled_projections": make(sizes.batch, config.pooled_projection_dim),
        "joint_attention_kwargs": None,
        "return_dict": False,
    }


def _flux(network: nn.Module, make: Make, sizes: Sizes) -> Inputs:
    """`FluxTransformer2DModel`: 2 x 2 latents are one token."""
    config, tokens = network.config, sizes.height * sizes.width // 4
    return {
        "hidden_states": make(sizes.batch, tokens, config.in_channels),
        "timestep": make(sizes.batch),
        "guidance": make(sizes.batch, dtype=torch.float32) if config.guidance_embeds else None,
        "pooled_projections": make(sizes.batch, config.pooled_projection_dim),
        "encoder_hidden_states": make(sizes.batch, sizes.tokens, config.joint_attention_dim),
        "txt_ids": make(sizes.tokens, 3),
        "img_ids": make(tokens, 3),
        "joint_attention_kwargs": {},
        "return_dict": False,
    }


def _decoder(network: nn.Module, make: Make, sizes: Sizes) -> Inputs:
    return {"sample": make(sizes.batch, network.conv_in.in_channels, sizes.height, sizes.width)}


def _encoder(network: nn.Module, make: Make, sizes: Sizes) -> Inputs:
    height, width = FACTOR * sizes.height, FACTOR * sizes.width
    return {"sample": make(sizes.batch, network.conv_in.in_channels, height, width)}


def _tiny_decoder(network: nn.Module, make: Make, sizes: Sizes) -> Inputs:
    return {"x": make(sizes.batch, network.layers[0].in_channels, sizes.height, sizes.width)}


def _tiny_encoder(network: nn.Module, make: Make, sizes: Sizes) -> Inputs:
    return {"x": make(sizes.batch, network.layers[0].in_channels, FACTOR * sizes.height, FACTOR * sizes.width)}


def _video_decoder(network: nn.Module, make: Make, sizes: Sizes, given: Mapping[str, Any] = {}) -> Inputs:
    """Stable Video Diffusion passes frames as the batch, and their number as an argument.

    The pipeline decodes frames in chunks, of 14 by default. A graph serves chunks of one length, because the pipeline
    never passes a batch of several chunks, whose number could be a symbol.
    """
    frames = given.get("num_frames", 14)
    batch = given["sample"].shape[0] // frames if given else 1
    return {
        "sample": make(batch * frames, network.conv_in.in_channels, sizes.height, sizes.width),
        "image_only_indicator": make(batch, frames),
        "num_frames": frames,
    }


def _text_encoder(network: nn.Module, make: Make, sizes: Sizes) -> Inputs:
    length = getattr(network.config, "max_position_embeddings", None) or sizes.tokens
    return {"input_ids": make(sizes.batch, length, dtype=torch.int64), "output_hidden_states": True}


_INPUTS: dict[str, Callable[..., Inputs]] = {
    "UNet2DConditionModel": _unet,
    "ControlNetModel": _controlnet,
    "UNetSpatioTemporalConditionModel": _video_unet,
    "SD3Transformer2DModel": _sd3,
    "FluxTransformer2DModel": _flux,
    "Decoder": _decoder,
    "Encoder": _encoder,
    "DecoderTiny": _tiny_decoder,
    "EncoderTiny": _tiny_encoder,
    "TemporalDecoder": _video_decoder,
    "CLIPTextModel": _text_encoder,
    "CLIPTextModelWithProjection": _text_encoder,
    "T5EncoderModel": _text_encoder,
}
"""The arguments that pipelines pass, by class of network."""


def first_call(network: nn.Module) -> ModelCall | None:
    """Return the call that the network's pipelines make, or None if the table lacks its class."""
    inputs = _inputs_of(network)
    return inputs and (lambda weightless, sizes: weightless(**inputs(weightless, _maker(weightless), sizes)))


def repeated_call(network: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> ModelCall:
    """Return a call that repeats a running call of the network at other sizes."""
    inputs = _inputs_of(network)
    given = dict(zip(forward_signature(type(network)).parameters, args)) | dict(kwargs)

    def call(weightless: nn.Module, sizes: Sizes) -> None:
        if inputs is None:
            _call_resized_by_value(weightless, given, sizes)
            return
        options = {"given": given} if inputs is _video_decoder else {}
        made = inputs(weightless, _maker(weightless), sizes, **options)
        old = _main(given)
        weightless(**{name: _like(value, made.get(name), old, _main(made)) for name, value in given.items()})

    return call


def _inputs_of(network: nn.Module) -> Callable[..., Inputs] | None:
    return next((_INPUTS[cls.__name__] for cls in type(network).__mro__ if cls.__name__ in _INPUTS), None)


def _like(given: Any, made: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    """Return an argument for other sizes, with the dtype and device of the given one, and the table's shape if any."""
    if isinstance(given, torch.Tensor):
        if isinstance(made, torch.Tensor) and made.ndim == given.ndim:
            return torch.empty(made.shape, dtype=given.dtype, device=given.device)
        return torch.empty(_resized(given.shape, old.shape, new.shape), dtype=given.dtype, device=given.device)
    if isinstance(given, dict):
        made = made if isinstance(made, dict) else {}
        return {name: _like(value, made.get(name), old, new) for name, value in given.items()}
    if isinstance(given, list | tuple):
        return type(given)(_like(value, None, old, new) for value in given)
    return given


def _resized(shape: torch.Size, old: torch.Size, new: torch.Size) -> list[int]:
    """Return the shape of an unknown tensor at other sizes: its batch is scaled, and the sides of a feature map."""
    sizes = list(shape)
    if sizes and old[0] and sizes[0] % old[0] == 0:
        sizes[0] = sizes[0] // old[0] * new[0]
    if len(sizes) == len(old) == 4:
        for side in (2, 3):
            if sizes[side] <= old[side]:
                sizes[side] = max(1, new[side] // max(1, round(old[side] / sizes[side])))
    return sizes


def _call_resized_by_value(weightless: nn.Module, given: Mapping[str, Any], sizes: Sizes) -> None:
    """Call a network with text of another length, or of the given length if the network takes no other."""
    text = given.get("encoder_hidden_states")
    length = text.shape[1] if isinstance(text, torch.Tensor) and text.ndim == 3 else 0
    try:
        weightless(**_resized_by_value(given, sizes, {length: sizes.tokens}))
    except Exception:
        weightless(**_resized_by_value(given, sizes, {}))


def _resized_by_value(given: Mapping[str, Any], sizes: Sizes, lengths: Mapping[int, int]) -> Inputs:
    """Return a call's arguments for other sizes, if nothing but the call says which size is which.

    The first tensor is the latent, as a map or as tokens. In other tensors, this function recognises the latent's
    sizes and the text's length by their values. If it guesses wrong, the network itself refuses the call.
    """
    latent = _main(given)
    tokens = sizes.height * sizes.width // 4
    area = {2: (), 3: (tokens, latent.shape[-1])}.get(latent.ndim, (sizes.height, sizes.width))
    if latent.ndim == 5:
        area = (sizes.frames if latent.shape[2] > 1 else 1, *area)
    shape = (sizes.batch, *latent.shape[1 : latent.ndim - len(area)], *area)
    changes = {old: new for old, new in zip(latent.shape[1:], shape[1:]) if old != new} | lengths

    def resize(tensor: torch.Tensor) -> torch.Tensor:
        new = list(tensor.shape)
        for place in range(min(tensor.ndim, 1), tensor.ndim):
            is_features = place == tensor.ndim - 1 if tensor.ndim == 3 else place == 1 and tensor.ndim > 3
            new[place] = new[place] if is_features else changes.get(new[place], new[place])
        if new:
            is_batch = new[0] % latent.shape[0] == 0 and new[0] not in changes
            new[0] = new[0] // latent.shape[0] * sizes.batch if is_batch else changes.get(new[0], new[0])
        return torch.empty(shape if tensor is latent else new, dtype=tensor.dtype, device=tensor.device)

    return pytree.tree_map_only(torch.Tensor, resize, dict(given))


def _main(inputs: Mapping[str, Any]) -> torch.Tensor:
    return next(value for value in inputs.values() if isinstance(value, torch.Tensor))


def _maker(network: nn.Module) -> Make:
    weight = next(p for p in network.parameters() if p.is_floating_point())

    def make(*sizes: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype or weight.dtype, device=weight.device)

    return make


def _text_width(config: Any) -> int:
    projected = getattr(config, "encoder_hid_dim_type", None) == "text_proj"
    return config.encoder_hid_dim if projected else _first(config.cross_attention_dim)


def _first(width: Any) -> int:
    return width[0] if isinstance(width, list | tuple) else width
