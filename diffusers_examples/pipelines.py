"""diffusers pipelines with a few narrow blocks and random weights: every class is the released models' own.

The examples use these so that they run anywhere in seconds. With a real one, only this line changes:

    pipe = StableDiffusionXLPipeline.from_pretrained("...", torch_dtype=torch.float16).to("cuda")
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLTemporalDecoder,
    AutoencoderTiny,
    ControlNetModel,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLPipeline,
    StableVideoDiffusionPipeline,
    UNet2DConditionModel,
    UNetSpatioTemporalConditionModel,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
)

try:  # the one that needs no torchvision
    from transformers import CLIPImageProcessorPil as CLIPImageProcessor
except ImportError:
    from transformers import CLIPImageProcessor

TEXT = 32
"""Width of text embeddings."""
LENGTH = 16
"""Tokens of a prompt."""


def sd15(seed: int = 0) -> StableDiffusionPipeline:
    torch.manual_seed(seed)
    return StableDiffusionPipeline(
        vae=autoencoder(),
        text_encoder=_text_encoder(CLIPTextModel),
        tokenizer=_tokenizer(),
        unet=_unet(cross_attention_dim=TEXT),
        scheduler=EulerDiscreteScheduler(steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def sdxl(seed: int = 0, vae: Any = None) -> StableDiffusionXLPipeline:
    """`vae` is a VAE to share."""
    torch.manual_seed(seed)
    return StableDiffusionXLPipeline(
        vae=vae or autoencoder(force_upcast=True),
        text_encoder=_text_encoder(CLIPTextModel),
        text_encoder_2=_text_encoder(CLIPTextModelWithProjection),
        tokenizer=_tokenizer(),
        tokenizer_2=_tokenizer(),
        unet=_unet(
            cross_attention_dim=2 * TEXT,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=TEXT + 6 * 8,
            transformer_layers_per_block=(1, 2),
        ),
        scheduler=EulerDiscreteScheduler(steps_offset=1),
        add_watermarker=False,
    )


def sdxl_refiner(base: StableDiffusionXLPipeline, seed: int = 1) -> StableDiffusionXLImg2ImgPipeline:
    """Return a refiner that shares the base's VAE and second text encoder, as in diffusers' documentation."""
    torch.manual_seed(seed)
    return StableDiffusionXLImg2ImgPipeline(
        vae=base.vae,
        text_encoder=None,
        text_encoder_2=base.text_encoder_2,
        tokenizer=None,
        tokenizer_2=base.tokenizer_2,
        unet=_unet(
            block_out_channels=(48, 96),
            cross_attention_dim=TEXT,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=TEXT + 5 * 8,
        ),
        scheduler=EulerDiscreteScheduler(steps_offset=1),
        requires_aesthetics_score=True,
        add_watermarker=False,
    )


def sd3(seed: int = 0) -> StableDiffusion3Pipeline:
    torch.manual_seed(seed)
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=32,
            in_channels=4,
            out_channels=4,
            num_layers=3,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=2 * TEXT,
            caption_projection_dim=32,
            pooled_projection_dim=2 * TEXT,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=autoencoder(shift_factor=0.1),
        text_encoder=_text_encoder(CLIPTextModelWithProjection),
        tokenizer=_tokenizer(),
        text_encoder_2=_text_encoder(CLIPTextModelWithProjection),
        tokenizer_2=_tokenizer(),
        text_encoder_3=None,
        tokenizer_3=None,
    )


def flux(seed: int = 0) -> FluxPipeline:
    """Takes embeddings: its second text encoder, a T5, is left out."""
    torch.manual_seed(seed)
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=autoencoder(shift_factor=0.1),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=FluxTransformer2DModel(
            in_channels=16,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=TEXT,
            pooled_projection_dim=TEXT,
            guidance_embeds=True,
            axes_dims_rope=(4, 4, 8),
        ),
    )


def svd(seed: int = 0) -> StableVideoDiffusionPipeline:
    torch.manual_seed(seed)
    unet = UNetSpatioTemporalConditionModel(
        sample_size=32,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        layers_per_block=2,
        cross_attention_dim=TEXT,
        num_attention_heads=(2, 4),
        addition_time_embed_dim=32,
        projection_class_embeddings_input_dim=96,
    )
    vae = AutoencoderKLTemporalDecoder(
        block_out_channels=(32, 32, 64, 64), down_block_types=("DownEncoderBlock2D",) * 4, force_upcast=True
    )
    vision = CLIPVisionConfig(
        hidden_size=32,
        projection_dim=TEXT,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=224,  # to which the pipeline resizes
        patch_size=32,
    )
    return StableVideoDiffusionPipeline(
        vae=vae,
        image_encoder=CLIPVisionModelWithProjection(vision).eval(),
        unet=unet,
        scheduler=EulerDiscreteScheduler(steps_offset=1, prediction_type="v_prediction", interpolation_type="linear"),
        feature_extractor=CLIPImageProcessor(),
    )


def autoencoder(**options: Any) -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(32, 32, 64, 64),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        **options,
    ).eval()


def tiny_autoencoder() -> AutoencoderTiny:
    return AutoencoderTiny(encoder_block_out_channels=(32,) * 4, decoder_block_out_channels=(32,) * 4).eval()


def controlnet(unet: UNet2DConditionModel, seed: int = 2) -> ControlNetModel:
    torch.manual_seed(seed)
    net = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(16, 32, 32, 32))
    with torch.no_grad():
        for block in (net.controlnet_mid_block, *net.controlnet_down_blocks):
            block.weight.normal_(0, 0.1)  # what training starts from is zero
    return net


def embeddings(pipe: Any, tokens: int = LENGTH, batch: int = 1, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a prompt as embeddings, for a pipeline without text encoders."""
    generator = torch.Generator().manual_seed(seed)
    transformer = pipe.transformer
    make = {"device": pipe.device, "dtype": transformer.dtype}
    return {
        "prompt_embeds": torch.randn(batch, tokens, transformer.config.joint_attention_dim, generator=generator).to(
            **make
        ),
        "pooled_prompt_embeds": torch.randn(batch, transformer.config.pooled_projection_dim, generator=generator).to(
            **make
        ),
    }


def _unet(block_out_channels: tuple[int, ...] = (32, 64), **options: Any) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=16,
        block_out_channels=block_out_channels,
        layers_per_block=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4),
        norm_num_groups=8,
        use_linear_projection=True,
        **options,
    ).eval()


def _text_encoder(cls: type) -> Any:
    config = CLIPTextConfig(
        vocab_size=1000,
        hidden_size=TEXT,
        intermediate_size=64,
        projection_dim=TEXT,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        bos_token_id=52,
        eos_token_id=53,
        pad_token_id=53,
    )
    return cls(config).eval()


def _tokenizer() -> CLIPTokenizer:
    """Return CLIP's tokenizer over the letters."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
        Path(folder, "merges.txt").write_text("#version: 0.2\n")
        return CLIPTokenizer.from_pretrained(folder, model_max_length=LENGTH)
