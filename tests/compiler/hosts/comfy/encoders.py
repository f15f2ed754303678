"""Each text encoder of ComfyUI's, narrow, with random weights: how to build it. Tokenizers are ComfyUI's own.

An encoder that this ComfyUI lacks is skipped. Tokenizers whose files come with a checkpoint are trained on a few words.
"""

from __future__ import annotations

import base64
import importlib
import inspect
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from types import SimpleNamespace
from typing import Any

import comfy.sd
import pytest
import torch

WORDS = "a photo of the black cat and some other dogs in front of an old house by night"

CLIP = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
T5 = {"d_model": 64, "d_ff": 96, "d_kv": 16, "num_heads": 4, "num_layers": 3}
LLM = CLIP | {"num_key_value_heads": 2}
DEEP = LLM | {"num_hidden_layers": 7}
"""Gemma 3 has a kind of block for tokens nearby, and one for all: every sixth."""
PIECES = {"vocab_size": 512}
"""Tokens of a trained tokenizer."""


@dataclass(frozen=True)
class Encoder:
    """One row of the table."""

    name: str
    """As people call it, and what it encodes for."""
    module: str
    """In `comfy`."""
    network: Callable[[Any], type]
    """Returns the class of the networks, given the module."""
    tokenizer: str
    """Its class, in the same module."""
    configs: Mapping[str, Mapping[str, Any]]
    """What is narrower than in the real one, by the name of each network."""
    files: Callable[[], dict[str, torch.Tensor]] = dict
    """What the tokenizer reads from a checkpoint."""
    kinds: int = 1
    """Kinds of block that a text runs."""
    senses: tuple[str, ...] = ()
    """Networks for images, which are as wide as in the real one, and are left out."""

    def load(self, dtype: torch.dtype = torch.float32) -> Any:
        """Return a fresh `comfy.sd.CLIP`."""
        try:
            module = importlib.import_module(f"comfy.{self.module}")
            network, tokenizer = self.network(module), getattr(module, self.tokenizer)
        except (ImportError, AttributeError):
            pytest.skip(f"this ComfyUI has no {self.name}")
        changes = {f"{name}_model_config": dict(config) for name, config in self.configs.items()}
        target = SimpleNamespace(params={}, clip=network, tokenizer=tokenizer)
        if not {"tokenizer_data", "model_options"} <= inspect.signature(comfy.sd.CLIP).parameters.keys():
            pytest.skip("this ComfyUI builds no narrow text encoders")
        clip = comfy.sd.CLIP(target, tokenizer_data=self.files(), model_options={"dtype": dtype, **changes})
        for path in self.senses:
            owner, _, name = path.rpartition(".")
            setattr(clip.cond_stage_model.get_submodule(owner), name, None)
        fill(clip.cond_stage_model)
        return clip


@torch.no_grad()
def fill(network: torch.nn.Module) -> None:
    """Fill every parameter."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in chain(network.named_parameters(), network.named_buffers()):
        if tensor.ndim > 1:
            tensor.normal_(0, tensor.shape[-1] ** -0.5, generator=generator)
        elif tensor.is_floating_point():
            tensor.normal_(float(name.endswith(("weight", "scale"))), 0.1 if tensor.ndim else 0, generator=generator)


@cache
def spiece() -> dict[str, torch.Tensor]:
    """Return the file of a SentencePiece tokenizer with fewer than 512 pieces."""
    sentencepiece = pytest.importorskip("sentencepiece")
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([WORDS] * 4), model_writer=file, vocab_size=60, hard_vocab_limit=False, pad_id=0,
        eos_id=1, bos_id=2, unk_id=3, minloglevel=2,
    )  # fmt: skip
    return {"spiece_model": torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)}


def tekken() -> dict[str, torch.Tensor]:
    """Return the file of a tokenizer of Mistral's kind, whose tokens are bytes."""
    vocabulary = [{"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode()} for i in range(256)]
    special = [{"rank": i, "token_str": f"<SPECIAL_{i}>"} for i in range(12)]
    content = {"config": {"default_num_special_tokens": 12, "default_vocab_size": 268, "pattern": r"\S+|\s+"},
               "vocab": vocabulary, "special_tokens": special}  # fmt: skip
    return {"tekken_model": torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)}


TABLE = (
    Encoder("CLIP-L: SD1.5", "sd1_clip", lambda m: m.SD1ClipModel, "SD1Tokenizer", {"clip_l": CLIP}),
    Encoder("OpenCLIP-H: SD2", "text_encoders.sd2_clip", lambda m: m.SD2ClipModel, "SD2Tokenizer", {"clip_h": CLIP}),
    Encoder("CLIP-L and CLIP-G: SDXL", "sdxl_clip", lambda m: m.SDXLClipModel, "SDXLTokenizer",
            {"clip_l": CLIP, "clip_g": CLIP}, kinds=2),
    Encoder("CLIP-L and T5-XXL: Flux", "text_encoders.flux", lambda m: m.flux_clip(dtype_t5=torch.float32),
            "FluxTokenizer", {"clip_l": CLIP, "t5xxl": T5}, kinds=3),
    Encoder("T5-XXL: Chroma, PixArt", "text_encoders.pixart_t5", lambda m: m.pixart_te(dtype_t5=torch.float32),
            "PixArtTokenizer", {"t5xxl": T5}, kinds=2),
    Encoder("T5-XXL: LTX-Video", "text_encoders.lt", lambda m: m.ltxv_te(), "LTXVT5Tokenizer", {"t5xxl": T5}, kinds=2),
    Encoder("T5-XXL, old: Cosmos", "text_encoders.cosmos", lambda m: m.te(dtype_t5=torch.float32), "CosmosT5Tokenizer",
            {"t5xxl": T5}, kinds=2),
    Encoder("T5 base: Stable Audio", "text_encoders.sa_t5", lambda m: m.SAT5Model, "SAT5Tokenizer", {"t5base": T5},
            kinds=2),
    Encoder("Pile T5: AuraFlow", "text_encoders.aura_t5", lambda m: m.AuraT5Model, "AuraT5Tokenizer",
            {"pile_t5xl": T5}),
    Encoder("UMT5-XXL: Wan", "text_encoders.wan", lambda m: m.te(), "WanT5Tokenizer", {"umt5xxl": T5 | PIECES},
            spiece),
    Encoder("Qwen2.5-VL: Qwen-Image", "text_encoders.qwen_image", lambda m: m.te(), "QwenImageTokenizer",
            {"qwen25_7b": LLM}, senses=("qwen25_7b.transformer.visual",)),
    Encoder("Qwen2.5-VL and byT5: HunyuanImage 2.1", "text_encoders.hunyuan_image", lambda m: m.te(),
            "HunyuanImageTokenizer", {"qwen25_7b": LLM | {"num_hidden_layers": 4}, "": T5}, kinds=3,
            senses=("qwen25_7b.transformer.visual",)),
    Encoder("Qwen2.5 3B: OmniGen2", "text_encoders.omnigen2", lambda m: m.te(), "Omnigen2Tokenizer",
            {"qwen25_3b": LLM}),
    Encoder("Qwen3: Z-Image", "text_encoders.z_image", lambda m: m.te(), "ZImageTokenizer", {"qwen3_4b": LLM}),
    Encoder("Qwen3: FLUX.2 Klein", "text_encoders.flux", lambda m: m.klein_te(), "KleinTokenizer",
            {"qwen3_4b": LLM | {"num_hidden_layers": 28}}),
    Encoder("Qwen3 2B: Ovis-Image", "text_encoders.ovis", lambda m: m.te(), "OvisTokenizer", {"qwen3_2b": LLM}),
    Encoder("Qwen3-VL: Krea 2", "text_encoders.krea2", lambda m: m.te(), "Krea2Tokenizer",
            {"qwen3vl_4b": LLM | {"num_hidden_layers": 36}}, senses=("qwen3vl_4b.transformer.visual",)),
    Encoder("Gemma 2: Lumina 2", "text_encoders.lumina2", lambda m: m.te(), "LuminaTokenizer",
            {"gemma2_2b": LLM | PIECES}, spiece),
    Encoder("Gemma 3 4B: NetaYume", "text_encoders.lumina2", lambda m: m.te(model_type="gemma3_4b"), "NTokenizer",
            {"gemma3_4b": DEEP | PIECES}, spiece, kinds=2),
    Encoder("Gemma 3 12B: LTX-2", "text_encoders.lt", lambda m: m.ltxav_te(dtype_llama=torch.float32),
            "LTXAVGemmaTokenizer", {"": DEEP | PIECES}, spiece, kinds=2,
            senses=("gemma3_12b.transformer.vision_model", "gemma3_12b.transformer.multi_modal_projector")),
    Encoder("Mistral: FLUX.2", "text_encoders.flux", lambda m: m.flux2_te(), "Flux2Tokenizer",
            {"mistral3_24b": LLM | PIECES | {"num_hidden_layers": 31}}, tekken),
)  # fmt: skip
