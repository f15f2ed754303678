"""The models of `benchmarks/server.py`: the prompt that core's own workflow has for each, without its text encoder."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

Size = tuple[int, ...]
"""Width and height, and of a video the frames."""
IMAGE_SIZES: tuple[Size, Size] = ((1024, 1024), (832, 1216))


@dataclass(frozen=True)
class Text:
    """What a text encoder gives: random numbers of this shape stand for it."""

    tokens: int
    """Those of the prompt in core's workflow, or as many as the encoder pads to."""
    width: int
    pooled: int = 0
    negative: int | None = None
    """Tokens of the negative prompt; as many as of the positive one if None."""
    has_mask: bool = False
    """Whether an `attention_mask` comes with the text. Nothing is masked in it."""
    entries: dict[str, Any] = field(default_factory=dict)
    """What else a conditioning holds."""
    encoder: str = ""
    """What CLIPLoader calls the encoder, if `encoders.py` makes this one."""

    def inputs(self, is_negative: bool) -> dict[str, Any]:
        """Return the inputs of a BenchConditioning node but for its seed."""
        tokens = self.negative if is_negative and self.negative is not None else self.tokens
        named = {"tokens": tokens, "width": self.width, "pooled": self.pooled, "has_mask": self.has_mask}
        return {**named, "entries": json.dumps(self.entries)}


@dataclass(frozen=True)
class Model:
    """What a prompt of a diffusion model consists of, and which matrices of it others change."""

    text: Text
    latent: str
    """Core's node for an empty latent."""
    cfg: float
    quantised: str
    """A pattern in the names of the matrices that a format applies to."""
    adapted: str
    """A pattern in the names of the matrices that a LoRA changes."""
    sizes: tuple[Size, Size] = IMAGE_SIZES
    has_sound: bool = False
    """Whether the latent has a part for the sound."""
    has_depth: bool = True
    """Whether it is a list of blocks, which can be shorter. A UNet is not."""
    is_shortened: bool = True
    """Whether it has fewer blocks than people have, unless a depth is asked for."""
    dtype: str = "bfloat16"
    network: str | None = None
    """The name in `models.CONFIGS`, if that is another one."""


@dataclass(frozen=True)
class Vae:
    """What a decode consists of."""

    network: str
    """The name in `models.VAES`."""
    channels: int
    pixels: int
    """Pixels of a side for each number of the latent."""
    frames: int = 0
    """Frames for each of the latent but its first one; 0 for images."""

    @property
    def sizes(self) -> tuple[Size, Size]:
        return ((832, 480, 81), (832, 480, 49)) if self.frames else IMAGE_SIZES

    def latent_shape(self, size: Size) -> list[int]:
        """Return the shape of the latent of an image or a video."""
        width, height, *length = size
        frames = [(number - 1) // self.frames + 1 for number in length]
        return [1, self.channels, *frames, height // self.pixels, width // self.pixels]


_FLUX_BLOCKS = r"^(double|single)_blocks\.\d+\.((img|txt)_(attn|mlp)|linear[12])\."
_FLUX_ADAPTED = r"^(double|single)_blocks\.\d+\.(img_attn\.qkv|linear1)\."
_LTX2_TEXT = Text(tokens=120, width=3840, negative=20, entries={"unprocessed_ltxav_embeds": True})
_LTX2 = {
    "latent": "EmptyLTXVLatentVideo",
    "cfg": 4.0,
    "sizes": ((1280, 704, 121), (1280, 704, 73)),
    "quantised": r"^transformer_blocks\.\d+\.\w*(attn|ff)",
    "adapted": r"^transformer_blocks\.\d+\.\w*attn\w*\.to_[qv]\.",
    "network": "ltx2",
}

MODELS = {
    "sdxl": Model(
        Text(tokens=77, width=2048, pooled=1280, entries={"guidance": 3.5}),
        latent="EmptyLatentImage",
        cfg=6.0,
        quantised=r"block",
        adapted=r"to_[qv]\.",
        has_depth=False,
        is_shortened=False,
        dtype="float16",
    ),
    "flux6": Model(
        Text(tokens=256, width=4096, pooled=768, entries={"guidance": 3.5}),
        latent="EmptySD3LatentImage",
        cfg=1.0,
        quantised=r"block",
        adapted=r"img_attn\.qkv\.|linear1\.",
    ),
    "z_image": Model(
        Text(tokens=39, width=2560, has_mask=True, encoder="lumina2"),
        latent="EmptySD3LatentImage",
        cfg=1.0,
        quantised=r"^(layers|noise_refiner|context_refiner)\.\d+\.(attention|feed_forward)\.",
        adapted=r"^layers\.\d+\.attention\.qkv\.",
        is_shortened=False,
    ),
    "qwen_image": Model(
        Text(tokens=210, width=3584, negative=46, encoder="qwen_image"),
        latent="EmptySD3LatentImage",
        cfg=4.0,
        quantised=r"^transformer_blocks\.\d+\.(attn|img_mlp|txt_mlp)\.",
        adapted=r"^transformer_blocks\.\d+\.attn\.to_[qv]\.",
    ),
    "klein": Model(
        Text(tokens=512, width=7680, has_mask=True),
        is_shortened=False,
        latent="EmptyFlux2LatentImage",
        cfg=1.0,
        quantised=_FLUX_BLOCKS,
        adapted=_FLUX_ADAPTED,
    ),
    "chroma": Model(
        Text(tokens=101, width=4096, negative=64),
        latent="EmptySD3LatentImage",
        cfg=3.5,
        quantised=_FLUX_BLOCKS,
        adapted=_FLUX_ADAPTED,
    ),
    "wan22": Model(
        Text(tokens=512, width=4096),
        latent="EmptyHunyuanLatentVideo",
        cfg=3.5,
        sizes=((832, 480, 81), (832, 480, 49)),
        quantised=r"^blocks\.\d+\.(self_attn|cross_attn|ffn)\.",
        adapted=r"^blocks\.\d+\.(self_attn|cross_attn)\.[qv]\.",
    ),
    "ltx2": Model(_LTX2_TEXT, **_LTX2, has_sound=True),
    "ltx2_video": Model(_LTX2_TEXT, **_LTX2),
}

VAES = {
    "kl": Vae("kl", channels=4, pixels=8),
    "wan_vae": Vae("wan", channels=16, pixels=8, frames=4),
    "ltx2_vae": Vae("ltx2", channels=128, pixels=32, frames=8),
    "hunyuan_vae": Vae("hunyuan", channels=16, pixels=8, frames=4),
    "hunyuan15_vae": Vae("hunyuan15", channels=32, pixels=16, frames=4),
}


def base_of(model: str) -> str:
    """Return the model that another one is, quantised."""
    return model.partition("-")[0]


def format_of(model: str) -> str:
    return model.partition("-")[2]


def is_gguf(model: str) -> bool:
    return format_of(model).startswith("gguf_")


def name_of(model: str) -> str:
    """Return the name in MODELS."""
    return base_of(model).partition("@")[0]


def depth_of(model: str) -> int | str | None:
    """Return how many blocks of each kind a name asks for, or "whole"; None if as many as usual."""
    depth = base_of(model).partition("@")[2]
    return int(depth) if depth.isdecimal() else depth or None


def with_depth(model: str, depth: int | str | None) -> str:
    """Return the name of a model with so many blocks of each kind, such as wan22@2-int8_tensorwise or flux6@whole."""
    known = MODELS.get(name_of(model))
    if not depth or known is None or not known.has_depth or (depth == "whole" and not known.is_shortened):
        return model
    return model.replace(base_of(model), f"{base_of(model)}@{depth}", 1)


def file_of(model: str) -> str:
    """Return the name of a model's file of weights, without its ending."""
    name = name_of(model)
    return model.replace(name, MODELS[name].network or name, 1) if name in MODELS else model


def sizes_of(model: str) -> tuple[Size, Size]:
    return VAES[model].sizes if model in VAES else MODELS[name_of(model)].sizes
