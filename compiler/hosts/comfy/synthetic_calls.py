"""Calls of ComfyUI's networks that were never made: what sampling or decoding would pass, at any size.

A call goes to a weightless copy of the network under fake tensors, to learn which graphs it needs.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ...common.host import Host
from ...common.torch_compat import needs_values, pytree
from ...tracing.answered_values import call_with_answers, constant
from ...tracing.attention_op import opaque_attention
from ...tracing.shape_discovery import LARGE, ModelCall, Sizes
from ...tracing.weightless_copy import weightless_copy
from .comfy_compat import ATTENTION_OVERRIDE, OPTIONS, compute_dtype
from .rules.frame_caches import CELLS, hands_frames_on, keeps_frames, remembers_frames

FRAMES = "num_video_frames"
"""Stable Video Diffusion has its frames in the batch, and their number as an argument."""
PATCH = 16
"""The sides of a picture that is made of pixels divide by this. Some checkpoints of Chroma Radiance bear no others."""
MASK = "attention_mask"
LYRICS = "conditioning_lyrics"
CHUNKED = {"decode": (1, 2, 5, 6), "encode": (1, 21, 25)}
"""Numbers of frames, of latents and of pixels, by which VAEs that keep frames meet the chunks that videos have."""
CARRIED = {"decode": (1, 2, 5, 6), "encode": (1, 5, 17)}
"""The same for VAEs that hand frames on."""
REMEMBERED = {"decode": (1, 2, 4), "encode": (1, 5, 13)}
"""The same for VAEs that keep frames in a dictionary."""
VIDEOS = {
    "decode": ((16, 22, 38), (3, 22, 38), (2, 22, 38), (16, 34, 60), (3, 34, 60)),
    "encode": ((121, 704, 1216),),
}
"""Frames, height and width of videos, of latents and of pixels, that VAEs with cells cut into chunks. How they do that
depends on the GPU's memory. Short and large videos have chunks that others have not: a block's first may be its last.
On a large GPU these five serve 2 to 16 latents of 1280x704, and 3 to 16 of 1920x1088 but for 10 and 11."""
TOKENS = "num_tokens"
"""Lumina 2, OmniGen 2 and Mochi are told how many tokens of the text to use."""
GUIDES, GUIDE_PLACES = "guide_attention_entries", "keyframe_idxs"
"""LTX-Video is told how much the frames that guide it count, and where their places are."""


def repeat(weightless: nn.Module, method: str, args: tuple, kwargs: dict[str, Any], sizes: Sizes) -> None:
    """Repeat a call of a network's method at other sizes.

    Some networks bear no other batch than the call's own, or no other area.
    """
    own = _latents(args, kwargs)[0].shape
    batch, kwargs = sizes.batch, dict(kwargs)
    if kwargs.get(FRAMES):
        batch, kwargs[FRAMES] = batch * sizes.frames, sizes.frames
    area = (sizes.frames, sizes.height, sizes.width)[-(len(own) - 2) :]
    if len(own) == 5 and (own[2] == 1 or keeps_frames(weightless)):
        area = (own[2], *area[1:])
    ways = [(batch, area), (own[0], area), (batch, own[2:]), (own[0], own[2:])]
    for way in ways:
        try:
            return call_with_answers(partial(_call_resized, weightless, method, args, kwargs, sizes, *way))
        except Exception as error:
            if way is ways[-1] or needs_values(error):
                raise


def _options() -> dict[str, Any]:
    """Return options for a call that was never made. Some attention functions choose their code by free memory."""
    return {ATTENTION_OVERRIDE: opaque_attention}


def _latents(args: tuple, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """ControlNets are called by name. Models of video and sound are given both."""
    latent = args[0] if args else kwargs["x"]
    return list(latent) if isinstance(latent, list | tuple) else [latent]


def _call_resized(
    weightless: nn.Module,
    method: str,
    args: tuple,
    kwargs: dict[str, Any],
    sizes: Sizes,
    batch: int,
    area: tuple[int, ...],
    keeps_values: bool,
) -> None:
    """Call a network with empty tensors in place of a call's own, and without patches."""
    kwargs = {name: _options() if name == OPTIONS else v for name, v in kwargs.items() if name != "control"}
    resizing = _Resizing.of(args, kwargs, sizes, batch, area, keeps_values)
    if resizing.tokens is not None and kwargs.get(TOKENS):  # as many as there are, or without padding
        kwargs[TOKENS] = sizes.tokens if kwargs[TOKENS] == resizing.tokens else sizes.tokens // 2
    given, own = kwargs, resizing.latent.shape[2:]
    args, kwargs = pytree.tree_map_only(torch.Tensor, resizing, (args, kwargs))
    if given.get(GUIDES):
        places = _guide_places(given[GUIDE_PLACES], batch, own, area)
        kwargs |= {GUIDE_PLACES: places, GUIDES: [_guide(each, own, area) for each in kwargs[GUIDES]]}
    if method == "forward":
        weightless(*args, **kwargs)  # with hooks, unlike the method
    else:
        getattr(type(weightless), method)(weightless, *args, **kwargs)


@dataclass(frozen=True)
class _Resizing:
    """Gives each tensor of a call the form that it has at other sizes. It is told by its form what it is."""

    latent: torch.Tensor
    sounds: frozenset[torch.Size]
    """The shapes of other latents, without batch and channels."""
    tokens: int | None
    """How many the text has."""
    sizes: Sizes
    batch: int
    area: tuple[int, ...]
    """What the latent's frames, height and width become."""
    keeps_values: bool
    """Whether tensors of one value keep it, such as a step's."""

    @classmethod
    def of(
        cls, args: tuple, kwargs: Mapping[str, Any], sizes: Sizes, batch: int, area: tuple[int, ...], keeps_values: bool
    ) -> _Resizing:
        latent, *others = _latents(args, kwargs)
        context = kwargs.get("context")
        tokens = context.shape[1] if isinstance(context, torch.Tensor) and context.ndim == 3 else None
        sounds = frozenset(tensor.shape[2:] for tensor in others)
        return cls(latent, sounds, tokens, sizes, batch, area, keeps_values)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an empty tensor in place of one of the call."""
        shape = self._shape(tensor)
        if self.keeps_values and tensor.numel() == 1 and tensor.shape == tuple(shape):
            return constant(tensor)
        return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)

    def _shape(self, tensor: torch.Tensor) -> list[int]:
        shape, own = list(tensor.shape), self.latent.shape
        if shape and shape[0] == own[0]:
            shape[0] = self.batch
        if tensor.ndim in (2, 3) and shape[1] == self.tokens:
            shape[1] = self.sizes.tokens
        elif _is_picture(tensor, self.latent):
            shape[2:] = map(_side, self.area, shape[2:], own[2:])
        elif tensor.shape[2:] in self.sounds and self.area != own[2:]:
            shape[2 + _longest(shape[2:])] = self.sizes.sound
        elif tensor.ndim in (2, 3) and self.area != own[2:]:
            shape[1] = self._steps().get(shape[1], shape[1])
        elif tensor.ndim > 3:  # the text in several layers of an encoder, the sound of each frame
            counts = {self.tokens: self.sizes.tokens} | ({own[2]: self.area[0]} if len(own) == 5 else {})
            shape[1:] = [counts.get(side, side) for side in shape[1:]]
        return shape

    def _steps(self) -> dict[int, int]:
        """Return what becomes of the number of steps where each frame, or each place, has a step of its own."""
        own = self.latent.shape
        steps = {own[2]: self.area[0]} if len(own) == 5 and own[2] > 1 else {}
        lengths = {max(sides): self.sizes.sound for sides in self.sounds if sides}
        return steps | {math.prod(own[2:]): math.prod(self.area)} | lengths


def _guide(entry: Mapping[str, Any], own: Sequence[int], area: Sequence[int]) -> dict[str, Any]:
    """Return a guide of LTX-Video for another area. It has as many frames."""
    count = entry["pre_filter_count"] // math.prod(own[-2:]) * math.prod(area[-2:])
    return {**entry, "pre_filter_count": count, "latent_shape": [entry["latent_shape"][0], *area[-2:]]}


def _guide_places(places: torch.Tensor, batch: int, own: Sequence[int], area: Sequence[int]) -> torch.Tensor:
    """Return the places of guides in another area: [batch, coordinates, tokens, ends]."""
    tokens = places.shape[2] // math.prod(own[-2:]) * math.prod(area[-2:])
    return places.new_empty(batch if places.shape[0] > 1 else 1, places.shape[1], tokens, *places.shape[3:])


def _is_picture(tensor: torch.Tensor, latent: torch.Tensor) -> bool:
    """Whether a tensor has the latent's channels, or an area that is the latent's or several times as large."""
    if tensor.ndim != latent.ndim:
        return False
    areas = zip(tensor.shape[2:][-2:], latent.shape[2:][-2:], strict=True)
    return tensor.shape[1] == latent.shape[1] or all(own % other == 0 for own, other in areas)


def _longest(sides: Sequence[int]) -> int:
    """Return which side of a sound is its length. The others are channels and frequencies, of which there are few."""
    return max(range(len(sides)), key=sides.__getitem__)


def _side(wanted: int, own: int, latents: int) -> int:
    """Return the side of a picture where the latent's has changed.

    A ControlNet's hint is several times as large as the latent. A video of poses has a frame less.
    """
    return wanted * (own // latents) if own >= latents else max(wanted + own - latents, 1)


class SamplingCall:
    """A call of the network as sampling would make it, from what the model says of itself.

    Conditioning goes through the model's own `extra_conds` (`comfy.model_base.BaseModel`), so each
    architecture gets its own inputs. The widths of text and pooled embeddings are read off its config.
    """

    def __init__(self, patcher: Any, host: Host) -> None:
        self._model, self._device, self._host = patcher.model, patcher.load_device, host
        self._replaced = _replaced(patcher)
        self.classes = (type(patcher.model),)
        self.variant = f" in {dtype}" if (dtype := compute_dtype(patcher)) else ""
        """Tells the calls of clones apart that compute in other dtypes."""

    def __call__(self, network: nn.Module, sizes: Sizes) -> None:
        ways = [sizes, *self._other_ways(sizes)]
        for way in ways:
            try:
                return call_with_answers(lambda _, way=way: self._apply(network, way))
            except Exception:
                if way is ways[-1]:
                    raise

    def _other_ways(self, sizes: Sizes) -> Iterator[Sizes]:
        """Yield sizes for models that do not bear the usual ones."""
        if _latent_dimensions(self._model) == 3:  # an image model on video latents takes one frame
            yield replace(sizes, frames=1)
        if getattr(self._model.latent_format, "spacial_downscale_ratio", 0) == 1:  # a model of pixels, in patches
            yield replace(sizes, height=sizes.height * PATCH, width=sizes.width * PATCH)

    def _apply(self, network: nn.Module, sizes: Sizes) -> None:
        widths = _text_width(self._model), _pooled_width(self._model)
        config = self._model.model_config.unet_config
        if "audio_model" in config and "max_height" in config:  # ACE-Step's latent has a row for each band of tones
            sizes = replace(sizes, height=config["max_height"])
        base = _base_around(self._model, self._replaced, network, self._host)
        _apply(base, self._device, sizes, *widths)


def coding_call(vae: Any, method: str) -> ModelCall:
    """Return a call of a VAE's network ("decode" or "encode") as `comfy.sd.VAE` would make it."""
    dimensions = getattr(vae, "latent_dim", 2)

    def call(network: nn.Module, sizes: Sizes) -> None:
        # A video VAE says by functions of a length how much it compresses.
        scale = vae.downscale_ratio if isinstance(vae.downscale_ratio, int | float) else vae.downscale_ratio[-1]
        channels, sides = vae.latent_channels, (sizes.height, sizes.width)
        if method == "encode":
            channels, sides = getattr(vae, "output_channels", 3), [side * scale for side in sides]
        batch, areas = sizes.batch, [(_frames(vae, method, sizes), *sides)]
        if keeps_frames(network):
            areas = [(frames, *sides) for frames in CHUNKED[method]]
        elif dimensions == 3 and hands_frames_on(network):
            batch, areas = 1, [(frames, *sides) for frames in CARRIED[method]]
        elif dimensions == 3 and remembers_frames(network):
            batch, areas = 1, [(frames, *sides) for frames in REMEMBERED[method]]
        elif any(CELLS in vars(module) for module in network.modules()):
            batch, areas = 1, [*areas, *(VIDEOS[method] if sizes == LARGE else ())]
        for area in areas:
            data = torch.empty((batch, channels, *area[-dimensions:]), dtype=vae.vae_dtype, device=vae.device)
            getattr(type(network), method)(network, data)

    return call


def _frames(vae: Any, method: str, sizes: Sizes) -> int:
    """Return a video's frames: of latents, or as many of pixels. Encoders drop frames that make no whole latent."""
    ratio = getattr(vae, "upscale_ratio", None)
    return ratio[0](sizes.frames) if method == "encode" and isinstance(ratio, tuple) else sizes.frames


def control_call(control_net: Any) -> ModelCall:
    """Return a call of a ControlNet's network as `comfy.controlnet.ControlNet.get_control` would make it."""

    def call(network: nn.Module, sizes: Sizes) -> None:
        make = {"dtype": control_net.manual_cast_dtype or network.dtype, "device": control_net.load_device}
        widths = _control_widths(network)
        area = sizes.height, sizes.width
        scale = control_net.compression_ratio if widths.hint_is_a_picture else 1
        inputs = {
            "x": torch.empty((sizes.batch, widths.latent, *area), **make),
            "hint": torch.empty((sizes.batch, widths.hint, *(side * scale for side in area)), **make),
            "timesteps": torch.empty((sizes.batch,), **make),
            "context": torch.empty((sizes.batch, sizes.tokens, widths.text), **make),
        }
        if widths.pooled:
            inputs["y"] = torch.empty((sizes.batch, widths.pooled), **make)
        if widths.guidance:
            inputs["guidance"] = torch.empty((sizes.batch,), **make)
        network(**inputs)

    return call


@dataclass(frozen=True)
class _ControlWidths:
    """How many channels a ControlNet's inputs have; 0 for an input that it does without."""

    latent: int
    hint: int
    text: int
    pooled: int
    guidance: bool = False
    hint_is_a_picture: bool = True


def _control_widths(network: nn.Module) -> _ControlWidths:
    """Raises AttributeError for a network of another kind than UNet, SD3 or Flux."""
    if hasattr(network, "controlnet_single_blocks"):  # comfy.ldm.flux.controlnet.ControlNetFlux
        latent, params = network.img_in.in_features // 4, network.params
        hint = network.pos_embed_input.in_features // 4 if network.latent_input else 3
        return _ControlWidths(
            latent, hint, params.context_in_dim, params.vec_in_dim, params.guidance_embed, not network.latent_input
        )
    if hasattr(network, "pos_embed_input"):  # comfy.cldm.mmdit.ControlNet
        return _ControlWidths(
            network.x_embedder.proj.in_channels,
            network.pos_embed_input.proj.in_channels,
            network.context_embedder.in_features,
            network.y_embedder.mlp[0].in_features,
            hint_is_a_picture=False,
        )
    context = next(m.to_k.in_features for name, m in network.named_modules() if name.endswith("attn2"))
    pooled = network.label_emb[0][0].in_features if network.num_classes == "sequential" else 0
    return _ControlWidths(network.in_channels, network.input_hint_block[0].in_channels, context, pooled)


def _replaced(patcher: Any) -> dict[str, Any]:
    """Return what a patcher replaces in its model while it is loaded, such as the dtype that it computes in."""
    patches = getattr(patcher, "object_patches", {})
    return {name: value for name, value in patches.items() if "." not in name and name != "diffusion_model"}


def _base_around(model: nn.Module, replaced: Mapping[str, Any], network: nn.Module, host: Host) -> nn.Module:
    """Return a copy of a BaseModel around another network, with its own small buffers."""
    modules = model._modules | {name: value for name, value in replaced.items() if isinstance(value, nn.Module)}
    rest = {name: child for name, child in modules.items() if name != "diffusion_model"}
    base = model.__class__.__new__(model.__class__)
    base.__dict__.update(model.__dict__ | {name: value for name, value in replaced.items() if name not in modules})
    base.__dict__["_modules"] = {
        **{n: weightless_copy(c, host, lambda t: t) for n, c in rest.items()},
        "diffusion_model": network,
    }
    return base


def _apply(base: Any, device: torch.device, sizes: Sizes, text_width: int, pooled_width: int) -> None:
    area = (sizes.frames, sizes.height, sizes.width)[-_latent_dimensions(base) :]
    latent = torch.empty((sizes.batch, base.latent_format.latent_channels, *area), device=device)
    sound, more = _sound(base, latent, sizes), {}
    if sound is not None:
        more["latent_shapes"] = [latent.shape, sound.shape]
        latent = torch.cat([stream.flatten(1).unsqueeze(1) for stream in (latent, sound)], dim=-1)
    inputs = _conditions(base, latent, sizes, text_width, pooled_width, more)
    if FRAMES in inputs:  # Stable Video Diffusion: its text is one token, what a vision encoder saw
        latent, one = torch.cat([latent] * sizes.frames), replace(sizes, tokens=1)
        inputs = _conditions(base, latent, one, text_width, pooled_width, {}) | {FRAMES: sizes.frames}
    if TOKENS in inputs:
        inputs[TOKENS] = sizes.tokens // 2 if MASK in inputs else sizes.tokens
    base.apply_model(latent, torch.full(latent.shape[:1], 1.0, device=device), **{OPTIONS: _options()}, **inputs)


def _conditions(
    base: Any, latent: torch.Tensor, sizes: Sizes, text_width: int, pooled_width: int, more: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Return what sampling would pass to the model besides the latent."""
    conditions = base.extra_conds(
        noise=latent,
        latent_image=latent,
        device=latent.device,
        cross_attn=torch.empty((sizes.batch, sizes.tokens, text_width), device=latent.device),
        pooled_output=torch.empty((sizes.batch, pooled_width), device=latent.device),
        width=sizes.width * 8,
        height=sizes.height * 8,
        prompt_type="positive",
        seed=0,
        **_required(base.diffusion_model, latent, sizes, text_width),
        **more,
    )
    area = latent.shape[2:]
    whole = (*area, *[0] * len(area))
    return {
        name: condition.process_cond(batch_size=latent.shape[0], device=latent.device, area=whole).cond
        for name, condition in conditions.items()
    }


def _required(network: nn.Module, latent: torch.Tensor, sizes: Sizes, text_width: int) -> dict[str, Any]:
    """Return conditions that a network cannot do without: the mask of the text, lyrics, what a vision encoder saw."""
    found: dict[str, Any] = {}
    parameters = inspect.signature(type(network).forward).parameters
    if any(name in parameters and parameters[name].default is inspect.Parameter.empty for name in (MASK, TOKENS)):
        found[MASK] = torch.empty((sizes.batch, sizes.tokens), dtype=torch.long, device=latent.device)
    if "lyric_embed" in parameters:  # ACE-Step 1.5
        found[LYRICS] = torch.empty((sizes.batch, sizes.sound, text_width), device=latent.device)
    if "lyric_token_idx" in parameters:  # ACE-Step
        found[LYRICS] = torch.empty((sizes.batch, sizes.sound), dtype=torch.long, device=latent.device)
    if width := _vision_width(network):
        found["clip_vision_output"] = _Seen(torch.empty((1, 257, width), device=latent.device))
    return found


def _vision_width(network: nn.Module) -> int | None:
    """Return the width of what Wan wants of a vision encoder; None for a network without."""
    projection = getattr(network, "img_emb", None)
    layers = projection.modules() if isinstance(projection, nn.Module) else ()
    return next((layer.normalized_shape[0] for layer in layers if hasattr(layer, "normalized_shape")), None)


@dataclass(frozen=True)
class _Seen:
    """What a vision encoder makes of a picture."""

    penultimate_hidden_states: torch.Tensor


def _sound(base: Any, latent: torch.Tensor, sizes: Sizes) -> torch.Tensor | None:
    """Return the sound of a model of video and sound."""
    network = base.diffusion_model
    if hasattr(network, "audio_frequency_bins"):  # LTX-2
        shape = network.num_audio_channels, sizes.sound, network.audio_frequency_bins
        return latent.new_empty((sizes.batch, *shape))
    return None


def _latent_dimensions(model: nn.Module) -> int:
    return getattr(model.latent_format, "latent_dimensions", 2)


_TEXT_WIDTHS = (
    "context_dim", "context_in_dim", "text_dim", "joint_attention_dim", "cap_feat_dim", "cond_seq_dim",
    "caption_channels", "text_states_dim", "c_clip_text", "cond_token_dim", "txt_embed_dim", "t5_feat_dim",
    "txt_in_dim", "cond_channels", "crossattn_emb_channels", "in_text_dim", "text_in_dim", "enc_hidden_dim",
    "text_embed_dim", "text_feat_dim", "instruction_feat_dim", "text_hidden_dim", "text_embedding_dim",
    "cross_attention_dim",
)  # fmt: skip
_POOLED_WIDTHS = "c_clip_text_pooled", "c_clip", "in_text_dim2"


def _text_width(model: Any) -> int:
    config, network = model.model_config.unet_config, model.diffusion_model
    if hasattr(network, "audio_cross_attention_dim"):  # LTX-2 has a text for the video and one for the sound
        is_projected = network.caption_proj_before_connector
        widths = network.cross_attention_dim, network.audio_cross_attention_dim
        return sum(widths) if is_projected else 2 * network.caption_channels
    if "txtlayers" in config:  # Krea 2 has the text in several layers of its encoder
        return config["txtlayers"] * config["txtdim"]
    if width := _width(config, _TEXT_WIDTHS):
        return width
    if embedder := config.get("context_embedder_config"):
        return embedder.get("params", {}).get("in_features", 4096)
    return _width(_defaults(type(network)), _TEXT_WIDTHS) or 4096


def _pooled_width(model: Any) -> int:
    """A UNet's `adm_in_channels` is SDXL's pooled embedding and its sizes; a DiT's is the pooled width."""
    config = model.model_config.unet_config
    if "vec_in_dim" in config:
        return config["vec_in_dim"] or 768
    if "context_embedder_config" in config:
        return config.get("adm_in_channels") or 2048
    return _width(_defaults(type(model.diffusion_model)) | config, _POOLED_WIDTHS) or 1280


def _width(config: Mapping[str, Any], names: Iterable[str]) -> int | None:
    """Return the first width that a config names; the first of several that it lists there."""
    found = (config.get(name) for name in names)
    widths = (width[0] if isinstance(width, list) and width else width for width in found)
    return next((width for width in widths if isinstance(width, int)), None)


def _defaults(network: type) -> dict[str, Any]:
    """Return the settings that a network has where its config leaves them out."""
    return {name: parameter.default for name, parameter in inspect.signature(network.__init__).parameters.items()}
