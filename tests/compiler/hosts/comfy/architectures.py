"""Each architecture that ComfyUI samples, narrow, with random weights: how to build it, and what it is given.

Widths and depths are small, and all else is as ComfyUI detects it from a checkpoint. A class that this ComfyUI lacks
is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import comfy.model_patcher
import comfy.sample
import comfy.supported_models
import torch
from compiled_graphs.compiler.common.reason import ReasonCode

CPU = torch.device("cpu")
WIDTH = 64
"""Of text, and of much else."""
LENGTH = "length"
SEQUENCE = 128


class At(NamedTuple):
    """The sizes of one sampling, in latent units."""

    batch: int
    frames: int
    height: int
    width: int
    tokens: int


Tensors = Callable[[At], Any]


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def image(channels: int, scale: int = 1) -> Tensors:
    return lambda at: torch.zeros(at.batch, channels, at.height * scale, at.width * scale)


def video(channels: int) -> Tensors:
    return lambda at: torch.zeros(at.batch, channels, at.frames, at.height, at.width)


def still(channels: int) -> Tensors:
    """An image of a model that also makes videos."""
    return lambda at: torch.zeros(at.batch, channels, 1, at.height, at.width)


def sound(channels: int, scale: int) -> Tensors:
    return lambda at: torch.zeros(at.batch, channels, at.height * scale)


def with_sound(picture: Tensors, channels: int, *rest: int | str) -> Tensors:
    """A video and its sound in one latent. `rest` are the sizes of the sound besides its length, which is `LENGTH`."""

    def make(at: At) -> Any:
        from comfy.nested_tensor import NestedTensor  # not in every ComfyUI

        sizes = [at.frames * 8 if size == LENGTH else size for size in rest]
        return NestedTensor((picture(at), torch.zeros(at.batch, channels, *sizes)))

    return make


def sequence(channels: int, camera: int) -> Tensors:
    """A sequence of fixed length, and a camera beside it."""

    def make(at: At) -> Any:
        from comfy.nested_tensor import NestedTensor  # not in every ComfyUI

        return NestedTensor((torch.zeros(at.batch, SEQUENCE, channels), torch.zeros(at.batch, 1, camera)))

    return make


class Vision:
    """The result of a CLIP vision encoder."""

    def __init__(self, tokens: int, width: int) -> None:
        self.penultimate_hidden_states = random(1, tokens, width, seed=4)
        self.last_hidden_state = random(1, tokens, width, seed=6)
        self.image_sizes = [(3, 224, 224)]

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


@dataclass(frozen=True)
class Architecture:
    """One row of the table."""

    name: str
    """As people call the model."""
    cls: str
    """In `comfy.supported_models`."""
    config: Mapping[str, Any]
    latent: Tensors
    text: int = WIDTH
    """The width of the text."""
    pooled: int = 0
    tokens: int = 0
    """Tokens of the text, if the model takes only this number."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What else conditioning holds: values, or functions of the sizes."""
    mask: Tensors | None = None
    """Which part of the latent is sampled."""
    cfg: float = 4.0
    batches: bool = True
    """Whether it makes several at once."""
    state: Callable[[], dict[str, torch.Tensor]] = dict
    """What the model reads from the checkpoint when it is built."""
    since: str = ""
    """A class that came into ComfyUI no later than what this row samples."""
    ahead: bool = True
    """Whether all its graphs are made before the first step. Otherwise that step makes some."""
    sizes: bool = True
    """Whether new sizes compile nothing."""
    idle: int = 0
    """Kinds of block that this sampling does not call."""
    share: int = 100
    """Of the calls of blocks that run compiled, in percent."""
    reasons: tuple[ReasonCode, ...] = ()
    """Why others do not."""
    why: str = ""
    """The same, for people."""

    @property
    def cell(self) -> str:
        """Return what docs/compatibility.md says of it."""
        if not self.share:
            return f"uncompiled: {self.why}"
        when = "ahead" if self.ahead else "at the first step" if self.sizes else "at the first step, and at new sizes"
        return f"{self.share}, {when}" + (f": {self.why}" if self.why else "")

    def patcher(self) -> Any:
        """Return a fresh patcher with random weights, the same ones each time."""
        model = self._model(dict(self.config)).eval()
        _fill(model.diffusion_model)
        cls = getattr(comfy.model_patcher, "CoreModelPatcher", comfy.model_patcher.ModelPatcher)
        return cls(model, load_device=CPU, offload_device=CPU)

    def _model(self, settings: dict[str, Any]) -> Any:
        """Make the model. An older ComfyUI knows fewer settings."""
        config = getattr(comfy.supported_models, self.cls)(dict(settings))
        config.set_inference_dtype(torch.float32, None)
        try:
            return config.get_model(self.state(), "", device=CPU)
        except TypeError as error:
            unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if unknown is None or unknown[1] not in settings:
                raise
            del settings[unknown[1]]
            return self._model(settings)

    def sample(self, patcher: Any, at: At) -> torch.Tensor:
        """Sample one step with ComfyUI's sampler."""
        latent = self.latent(at)
        with torch.inference_mode():
            noise = comfy.sample.prepare_noise(latent, 1)
            texts = self._conditioning(at, 1), self._conditioning(at, 2)
            arguments = (patcher, noise, 1, self.cfg, "euler", "simple", *texts, latent)
            part = self.mask(at) if self.mask else None
            sampled = comfy.sample.sample(*arguments, noise_mask=part, disable_pbar=True, seed=1)
        streams = sampled.unbind() if getattr(sampled, "is_nested", False) else [sampled]
        return torch.cat([stream.flatten() for stream in streams])

    def _conditioning(self, at: At, seed: int) -> list:
        made = {name: value(at) if callable(value) else value for name, value in self.extra.items()}
        if self.pooled:
            made["pooled_output"] = random(1, self.pooled, seed=seed + 5)
        return [[random(1, self.tokens or at.tokens, self.text, seed=seed), made]]


@torch.no_grad()
def _fill(network: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, weight in network.named_parameters():
        if not weight.dtype.is_floating_point:
            continue
        drawn = torch.randn(weight.shape, generator=generator)
        if weight.ndim > 1:
            weight.copy_(drawn * weight[0].numel() ** -0.5)
        else:
            weight.copy_(1 + 0.1 * drawn if name.endswith(("weight", "scale", "gamma")) else 0.02 * drawn)
    for name, buffer in network.named_buffers():
        if name.endswith(("pos_embed", "inv_freq")):  # of memory that nobody has written to
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
        elif buffer.dtype.is_floating_point and not torch.isfinite(buffer).all():
            buffer.zero_()


def seconds(*names: str, **settings: Any) -> Callable[[], dict[str, torch.Tensor]]:
    """The weights with which a model of sound reads numbers of seconds."""

    def make() -> dict[str, torch.Tensor]:
        from comfy.ldm.audio.embedders import NumberConditioner

        weights = NumberConditioner(768, **settings).state_dict()
        return {f"conditioner.conditioners.{name}.{key}": random(*weight.shape, seed=len(key)) * 0.1
                for name in names for key, weight in weights.items()}  # fmt: skip

    return make


def padded_mask(tokens: int) -> Tensors:
    """Of text that is padded to a number of tokens."""
    return lambda at: (torch.arange(tokens) < at.tokens).long().unsqueeze(0)


def after_first_frame(at: At) -> torch.Tensor:
    """The part of a video that begins with a picture."""
    return (torch.arange(at.frames) > 0).float().view(1, 1, -1, 1, 1).expand(1, 1, -1, at.height, at.width)


def before_guide(at: At) -> torch.Tensor:
    """The part of a video that ends with a frame as guide."""
    return (torch.arange(at.frames) < at.frames - 1).float().view(1, 1, -1, 1, 1).expand(1, 1, -1, at.height, at.width)


GUIDE = {
    "keyframe_idxs": lambda at: torch.zeros(1, 3, at.height * at.width, 2),
    "guide_attention_entries": lambda at: [{
        "pre_filter_count": at.height * at.width, "strength": 0.5, "pixel_mask": None,
        "latent_shape": [1, at.height, at.width]}],
}  # fmt: skip
"""What LTXVAddGuide adds to conditioning, for one frame at half its strength."""


def mask(tokens: int = 0) -> Tensors:
    return lambda at: torch.ones(1, tokens or at.tokens, dtype=torch.long)


FLUX = {
    "image_model": "flux", "in_channels": 16, "out_channels": 16, "patch_size": 2, "vec_in_dim": WIDTH,
    "context_in_dim": WIDTH, "hidden_size": 128, "mlp_ratio": 4.0, "num_heads": 4, "depth": 2,
    "depth_single_blocks": 2, "axes_dim": [8, 12, 12], "theta": 10000, "qkv_bias": True, "guidance_embed": True,
    "txt_ids_dims": [], "yak_mlp": False, "txt_norm": False,
}  # fmt: skip
FLUX2 = FLUX | {
    "image_model": "flux2", "in_channels": 128, "out_channels": 128, "patch_size": 1, "vec_in_dim": None,
    "axes_dim": [8, 8, 8, 8], "mlp_ratio": 3.0, "theta": 2000, "global_modulation": True, "mlp_silu_act": True,
    "qkv_bias": False, "ops_bias": False, "default_ref_method": "index", "ref_index_scale": 10.0, "txt_ids_dims": [3],
}  # fmt: skip
CHROMA = {name: value for name, value in FLUX.items() if name not in ("guidance_embed", "yak_mlp", "txt_norm")} | {
    "image_model": "chroma", "in_channels": 64, "out_channels": 64, "in_dim": 64, "out_dim": 128, "hidden_dim": 64,
    "n_layers": 2, "vec_in_dim": None,
}  # fmt: skip
RADIANCE = CHROMA | {
    "image_model": "chroma_radiance", "in_channels": 3, "out_channels": 3, "patch_size": 16, "nerf_hidden_size": 16,
    "nerf_mlp_ratio": 2, "nerf_depth": 2, "nerf_max_freqs": 8, "nerf_tile_size": 512, "nerf_final_head_type": "conv",
    "nerf_embedder_dtype": torch.float32, "use_x0": False, "use_sequential_txt_ids": False,
}  # fmt: skip
HUNYUAN = {
    "image_model": "hunyuan_video", "in_channels": 16, "out_channels": 16, "patch_size": [1, 2, 2], "vec_in_dim": WIDTH,
    "context_in_dim": WIDTH, "hidden_size": 128, "mlp_ratio": 4.0, "num_heads": 4, "depth": 2,
    "depth_single_blocks": 2, "axes_dim": [8, 12, 12], "theta": 256, "qkv_bias": True, "guidance_embed": True,
    "byt5": False, "meanflow": False, "use_cond_type_embedding": False, "vision_in_dim": None, "meanflow_sum": False,
}  # fmt: skip
WAN = {
    "image_model": "wan2.1", "model_type": "t2v", "dim": 128, "in_dim": 16, "out_dim": 16, "num_heads": 4,
    "ffn_dim": 256, "freq_dim": 64, "text_dim": WIDTH, "num_layers": 2, "patch_size": (1, 2, 2),
    "window_size": (-1, -1), "qk_norm": True, "cross_attn_norm": True, "eps": 1e-6,
}  # fmt: skip
COSMOS = {
    "image_model": "cosmos_predict2", "max_img_h": 240, "max_img_w": 240, "max_frames": 128, "in_channels": 16,
    "out_channels": 16, "patch_spatial": 2, "patch_temporal": 1, "model_channels": 128, "concat_padding_mask": True,
    "crossattn_emb_channels": WIDTH, "pos_emb_cls": "rope3d", "pos_emb_learnable": True,
    "pos_emb_interpolation": "crop", "min_fps": 1, "max_fps": 30, "use_adaln_lora": True, "adaln_lora_dim": 32,
    "num_blocks": 2, "num_heads": 4, "extra_per_block_abs_pos_emb": False, "rope_h_extrapolation_ratio": 4.0,
    "rope_w_extrapolation_ratio": 4.0, "rope_t_extrapolation_ratio": 1.0, "extra_h_extrapolation_ratio": 1.0,
    "extra_w_extrapolation_ratio": 1.0, "extra_t_extrapolation_ratio": 1.0, "rope_enable_fps_modulation": False,
}  # fmt: skip
COSMOS_1 = {name: v for name, v in COSMOS.items() if "fps" not in name and not name.startswith("extra_")} | {
    "image_model": "cosmos", "block_config": "FA-CA-MLP", "pos_emb_learnable": False, "block_x_format": "THWBD",
    "affline_emb_norm": True, "extra_per_block_abs_pos_emb": True, "rope_h_extrapolation_ratio": 1.0,
    "rope_w_extrapolation_ratio": 1.0, "rope_t_extrapolation_ratio": 2.0,
    "extra_per_block_abs_pos_emb_type": "learnable",
}  # fmt: skip
HIDREAM_O1 = {
    "image_model": "hidream_o1",
    "text_config_overrides": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                              "num_key_value_heads": 2, "intermediate_size": 256, "head_dim": 32},
    "vision_config_overrides": {"hidden_size": 64, "num_heads": 4, "depth": 2, "intermediate_size": 128},
}  # fmt: skip
LUMINA = {
    "image_model": "lumina2", "patch_size": 2, "in_channels": 16, "dim": 96, "cap_feat_dim": WIDTH, "n_layers": 2,
    "qk_norm": True, "n_heads": 4, "n_kv_heads": 2, "axes_dims": [8, 8, 8], "axes_lens": [300, 512, 512],
    "rope_theta": 10000.0, "ffn_dim_multiplier": 4.0, "multiple_of": 32,
}  # fmt: skip
Z_IMAGE = LUMINA | {
    "dim": 256, "n_heads": 8, "n_kv_heads": 8, "axes_dims": [8, 12, 12], "axes_lens": [1536, 512, 512],
    "rope_theta": 256.0, "ffn_dim_multiplier": 8 / 3, "z_image_modulation": True, "time_scale": 1000.0,
    "pad_tokens_multiple": 32,
}  # fmt: skip
QWEN = {
    "image_model": "qwen_image", "patch_size": 2, "in_channels": 64, "out_channels": 16, "num_layers": 2,
    "attention_head_dim": 32, "num_attention_heads": 4, "joint_attention_dim": WIDTH, "axes_dims_rope": (8, 12, 12),
}  # fmt: skip
LTX = {
    "image_model": "ltxv", "in_channels": 128, "cross_attention_dim": 128, "attention_head_dim": 32,
    "num_attention_heads": 4, "caption_channels": WIDTH, "num_layers": 2,
}  # fmt: skip
LTX_2 = LTX | {
    "image_model": "ltxav", "audio_in_channels": 128, "audio_cross_attention_dim": 64, "audio_attention_head_dim": 16,
    "audio_num_attention_heads": 4, "connector_attention_head_dim": 32, "connector_num_attention_heads": 2,
}  # fmt: skip
LTX_23 = LTX_2 | {
    "caption_proj_before_connector": True, "caption_projection_first_linear": False, "cross_attention_adaln": True,
    "apply_gated_attention": True, "connector_apply_gated_attention": True,
}  # fmt: skip
SD3 = {
    "in_channels": 16, "out_channels": 16, "patch_size": 2, "depth": 2, "input_size": None, "adm_in_channels": WIDTH,
    "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": WIDTH, "out_features": 128}},
    "num_patches": 4096, "pos_embed_max_size": 64, "pos_embed_scaling_factor": None,
}  # fmt: skip
KANDINSKY = {
    "image_model": "kandinsky5", "in_text_dim": WIDTH, "in_text_dim2": WIDTH, "time_dim": 32, "model_dim": 128,
    "ff_dim": 256, "visual_embed_dim": 132, "num_text_blocks": 2, "num_visual_blocks": 2, "axes_dims": (8, 12, 12),
    "rope_scale_factor": (1.0, 2.0, 2.0),
}  # fmt: skip
OMNIGEN = {
    "image_model": "omnigen2", "axes_dim_rope": [8, 12, 12], "axes_lens": [1024, 1664, 1664],
    "ffn_dim_multiplier": None, "hidden_size": 128, "in_channels": 16, "multiple_of": 32, "norm_eps": 1e-5,
    "num_attention_heads": 4, "num_kv_heads": 2, "num_layers": 2, "num_refiner_layers": 2, "out_channels": None,
    "patch_size": 2, "text_feat_dim": WIDTH, "timestep_scale": 1000.0,
}  # fmt: skip
PIXART = {
    "image_model": "pixart_sigma", "num_heads": 4, "patch_size": 2, "hidden_size": 64, "in_channels": 4, "depth": 2,
    "model_max_length": 300, "input_size": 64, "pe_interpolation": 1, "micro_condition": False,
    "caption_channels": WIDTH,
}  # fmt: skip
HUNYUAN_DIT = {
    "image_model": "hydit", "hidden_size": 64, "depth": 4, "num_heads": 4, "text_states_dim": WIDTH,
    "text_states_dim_t5": WIDTH,
}  # fmt: skip
ERNIE = {
    "image_model": "ernie", "hidden_size": 128, "num_attention_heads": 4, "num_layers": 2, "ffn_hidden_size": 256,
    "text_in_dim": WIDTH, "rope_axes_dim": (8, 12, 12),
}  # fmt: skip
KREA = {
    "image_model": "krea2", "features": 128, "tdim": 32, "txtdim": 64, "heads": 4, "kvheads": 2, "layers": 2,
    "txtlayers": 2, "txtheads": 4, "txtkvheads": 4,
}  # fmt: skip
MAGE = {
    "image_model": "mage_flow", "in_channels": 128, "num_layers": 2, "attention_head_dim": 32,
    "num_attention_heads": 4, "joint_attention_dim": WIDTH, "axes_dims_rope": (8, 12, 12),
}  # fmt: skip
JOY = {
    "image_model": "joyimage", "in_channels": 16, "hidden_size": 256, "num_attention_heads": 2, "text_dim": WIDTH,
    "num_layers": 2, "rope_dim_list": [16, 56, 56],
}  # fmt: skip
BOOGU = {
    "image_model": "boogu", "hidden_size": 128, "num_layers": 2, "num_double_stream_layers": 2,
    "num_refiner_layers": 2, "num_attention_heads": 4, "num_kv_heads": 2, "multiple_of": 32,
    "axes_dim_rope": (8, 12, 12), "instruction_feat_dim": WIDTH,
}  # fmt: skip
LENS = {
    "image_model": "lens", "in_channels": 128, "out_channels": 32, "num_layers": 2, "attention_head_dim": 32,
    "num_attention_heads": 4, "enc_hidden_dim": WIDTH, "axes_dims_rope": (8, 12, 12),
    "multi_layer_encoder_feature": False, "selected_layer_index": (0,),
}  # fmt: skip
COG = {
    "image_model": "cogvideox", "num_attention_heads": 4, "attention_head_dim": 32, "in_channels": 16,
    "out_channels": 16, "time_embed_dim": 32, "text_embed_dim": WIDTH, "num_layers": 2,
    "use_rotary_positional_embeddings": True,
}  # fmt: skip
HIDREAM = {
    "image_model": "hidream", "attention_head_dim": 32, "axes_dims_rope": [16, 8, 8], "caption_channels": [64, 64],
    "max_resolution": [128, 128], "in_channels": 16, "llama_layers": [0, 1, 2, 3], "num_attention_heads": 4,
    "num_routed_experts": 4, "num_activated_experts": 2, "num_layers": 2, "num_single_layers": 2,
    "out_channels": 16, "patch_size": 2, "text_emb_dim": WIDTH,
}  # fmt: skip
HUNYUAN_3D = {
    "image_model": "hunyuan3d2", "in_channels": 64, "context_in_dim": WIDTH, "hidden_size": 128, "mlp_ratio": 4.0,
    "num_heads": 4, "depth": 2, "depth_single_blocks": 2, "qkv_bias": True, "guidance_embed": False,
}  # fmt: skip
HUNYUAN_3D_EXPERTS = {
    "image_model": "hunyuan3d2_1", "in_channels": 64, "context_dim": WIDTH, "hidden_size": 128, "mlp_ratio": 4.0,
    "num_heads": 4, "depth": 8, "qkv_bias": False, "guidance_cond_proj_dim": None, "num_moe_layers": 2,
    "num_experts": 4,
}  # fmt: skip
AURA = {"dim": 128, "n_layers": 4, "n_double_layers": 2, "n_heads": 4, "global_conddim": 128, "cond_seq_dim": WIDTH,
        "max_seq": 1024}  # fmt: skip
ACE = {
    "audio_model": "ace", "attention_head_dim": 32, "in_channels": 8, "inner_dim": 128, "max_height": 16,
    "max_position": 32768, "max_width": 32768, "mlp_ratio": 2.5, "num_attention_heads": 4, "num_layers": 2,
    "out_channels": 8, "patch_size": [16, 1], "rope_theta": 1e6, "speaker_embedding_dim": 512,
    "text_embedding_dim": WIDTH, "ssl_encoder_depths": [1, 1], "ssl_latent_dims": [64, 64],
    "ssl_names": ["mert", "m-hubert"], "lyric_encoder_vocab_size": 100, "lyric_hidden_size": 1024,
}  # fmt: skip
ACE15 = {
    "audio_model": "ace1.5", "hidden_size": 128, "text_hidden_dim": WIDTH, "num_dit_layers": 4, "num_lyric_layers": 2,
    "num_timbre_layers": 2, "num_tokenizer_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32,
    "intermediate_size": 256, "fsq_dim": 128, "encoder_hidden_size": 128, "encoder_intermediate_size": 256,
    "encoder_num_heads": 4,
}  # fmt: skip
STABLE_AUDIO = {
    "audio_model": "dit1.0", "global_cond_dim": 1536, "project_cond_tokens": True, "embed_dim": 128, "num_heads": 4,
    "depth": 2, "cond_token_dim": 768, "io_channels": 64, "timestep_features_type": "learned", "input_concat_dim": 0,
}  # fmt: skip
STABLE_AUDIO_3 = STABLE_AUDIO | {
    "global_cond_dim": 768, "io_channels": 256, "timestep_features_type": "expo", "local_add_cond_dim": 257,
    "global_cond_shared_embed": True, "global_cond_type": "adaLN", "norm_type": "rms_norm", "num_memory_tokens": 4,
    "attn_kwargs": {"qk_norm": "rms", "differential": True},
}  # fmt: skip
CASCADE_C = {
    "stable_cascade_stage": "c", "c_cond": 64, "c_hidden": [64, 64], "nhead": [4, 4], "blocks": [[1, 2], [2, 1]],
    "c_clip_text": WIDTH, "c_clip_text_pooled": WIDTH,
}  # fmt: skip
CASCADE_B = {
    "stable_cascade_stage": "b", "c_cond": 64, "c_hidden": [32, 64, 64, 64], "nhead": [-1, -1, 4, 4],
    "blocks": [[1, 1, 1, 1], [1, 1, 1, 1]], "block_repeat": [[1, 1, 1, 1], [2, 2, 2, 2]], "c_clip": WIDTH,
}  # fmt: skip
MOCHI = {
    "image_model": "mochi_preview", "depth": 2, "patch_size": 2, "num_heads": 4, "hidden_size_x": 128,
    "hidden_size_y": 64, "mlp_ratio_x": 96.0, "mlp_ratio_y": 4.0, "learn_sigma": False, "in_channels": 12,
    "qk_norm": True, "qkv_bias": False, "out_bias": True, "attn_drop": 0.0, "patch_embed_bias": True,
    "posenc_preserve_area": True, "timestep_mlp_bias": True, "attend_to_padding": False, "timestep_scale": 1000.0,
    "use_t5": True, "t5_feat_dim": WIDTH, "t5_token_length": 256, "rope_theta": 10000.0,
}  # fmt: skip
MINIMAX = {
    "image_model": "minimax_h3", "hidden_size": 128, "num_layers": 2, "token_refiner_num_layers": 2,
    "num_attention_heads": 4, "attention_head_dim": 32, "ffn_hidden_size": 256, "latents_dim": 24,
    "audio_latents_dim": 32, "text_dim": WIDTH, "timestep_input_dim": 32, "time_embed_hidden_size": 64,
    "time_embed_dim": 64, "rope_inv_freq_len": 4,
}  # fmt: skip
SEED = {
    "image_model": "seedvr2", "vid_dim": 128, "heads": 4, "num_layers": 4, "norm_eps": 1e-5, "mlp_type": "swiglu",
    "vid_out_norm": True, "txt_in_dim": WIDTH, "head_dim": 32, "mm_layers": 2, "rope_dim": 32,
}  # fmt: skip
PIXEL = {
    "image_model": "pixeldit_t2i", "hidden_size": 64, "num_groups": 4, "pixel_attn_hidden_size": 64,
    "pixel_num_groups": 4, "patch_depth": 2, "txt_embed_dim": WIDTH,
}  # fmt: skip
PID = PIXEL | {"image_model": "pid", "lq_hidden_dim": 32, "lq_latent_channels": 16, "latent_spatial_down_factor": 8}
TRIPO = {
    "image_model": "triposplat", "q_token_length": SEQUENCE, "model_channels": 96, "cond_channels": WIDTH,
    "num_blocks": 2, "num_head_channels": 24,
}  # fmt: skip
SEEN = Vision(257, 1280)
REFERENCE = {"reference_latents": lambda at: [random(1, 16, at.width, at.height)]}
STILL_REFERENCE = {"reference_latents": lambda at: [random(1, 16, 1, at.width, at.height)]}
DEPENDS = "what it computes depends on values"
FUNCTIONS = "its blocks are given functions"

WITHOUT_POOLED = {"guidance_embed": False, "vec_in_dim": None, "txt_ids_dims": [1, 2]}

TABLE = (
    Architecture("HiDream O1", "HiDreamO1", HIDREAM_O1, image(3, 8),
                 extra={"text_input_ids": lambda at: torch.arange(at.tokens).unsqueeze(0)},
                 share=0, reasons=(ReasonCode.EARLIER_TOKENS,), why=f"{FUNCTIONS}, and caches of earlier tokens",
                 ahead=False),
    Architecture("Ovis-Image", "FluxSchnell", FLUX | WITHOUT_POOLED | {"yak_mlp": True, "txt_norm": True}, image(16),
                 since="ZImage"),
    Architecture("LongCat-Image", "LongCatImage", FLUX | WITHOUT_POOLED, image(16)),
    Architecture("Flux Fill", "FluxInpaint", FLUX | {"in_channels": 96}, image(16), pooled=WIDTH),
    Architecture("HunyuanImage 2.1", "HunyuanImage21", HUNYUAN | {
        "in_channels": 64, "out_channels": 64, "patch_size": [1, 1], "axes_dim": [16, 16], "vec_in_dim": None,
        "byt5": True, "guidance_embed": False}, image(64),
        extra={"conditioning_byt5small": lambda at: random(1, at.tokens // 2, 1472)}),
    Architecture("Wan Fun Control", "WAN21_FunControl2V", WAN | {"model_type": "i2v", "in_dim": 48}, video(16),
                 extra={"clip_vision_output": SEEN}),
    Architecture("Wan Fun Camera", "WAN21_Camera", WAN | {"model_type": "camera", "in_dim": 32}, video(16), extra={
        "clip_vision_output": SEEN,
        "camera_conditions": lambda at: random(1, 24, at.frames, at.height * 8, at.width * 8)}),
    Architecture("Wan SCAIL", "WAN21_SCAIL", WAN | {"model_type": "scail", "in_dim": 20}, video(16),
                 extra={"clip_vision_output": SEEN}),
    Architecture("Cosmos 1", "CosmosT2V", COSMOS_1, video(16)),
    Architecture("Cosmos Predict 2, image to video", "CosmosI2VPredict2", COSMOS | {"in_channels": 17}, video(16),
                 mask=after_first_frame, ahead=False),
    Architecture("Kandinsky 5, image", "Kandinsky5Image", KANDINSKY | {"visual_embed_dim": 64}, image(16),
                 pooled=WIDTH),
    Architecture("FLUX.2 dev, Klein", "Flux2", FLUX2, image(128)),
    Architecture("FLUX.2 with a reference", "Flux2", FLUX2, image(128),
                 extra={"reference_latents": lambda at: [random(1, 128, at.width, at.height)]}),
    Architecture("Krea 2", "Krea2", KREA, still(16), text=128),
    Architecture("Krea 2 with a reference", "Krea2", KREA, still(16), text=128, extra=STILL_REFERENCE),
    Architecture("Z-Image", "ZImage", Z_IMAGE, image(16)),
    Architecture("Qwen-Image", "QwenImage", QWEN, still(16)),
    Architecture("Qwen-Image-Edit 2511", "QwenImage", QWEN | {"default_ref_method": "index_timestep_zero"}, still(16),
                 extra=STILL_REFERENCE, ahead=False),
    Architecture("Qwen-Image-Edit 2511 with a Lightning LoRA (cfg 1)", "QwenImage",
                 QWEN | {"default_ref_method": "index_timestep_zero"}, still(16), extra=STILL_REFERENCE, cfg=1.0,
                 ahead=False),
    Architecture("Wan 2.1 and 2.2 14B, text to video", "WAN21_T2V", WAN, video(16)),
    Architecture("Wan 2.1, image to video", "WAN21_I2V", WAN | {"model_type": "i2v", "in_dim": 36}, video(16), extra={
        "clip_vision_output": SEEN,
        "concat_latent_image": lambda at: random(1, 16, at.frames, at.height, at.width),
        "concat_mask": lambda at: torch.ones(1, 1, at.frames, at.height, at.width)}),
    Architecture("Wan 2.2 5B", "WAN22_T2V", WAN | {"in_dim": 48, "out_dim": 48}, video(48)),
    Architecture("Wan 2.2 5B, image to video", "WAN22_T2V", WAN | {"in_dim": 48, "out_dim": 48}, video(48),
                 mask=after_first_frame, ahead=False),
    Architecture("Wan VACE", "WAN21_Vace", WAN | {"model_type": "vace", "vace_layers": 2, "vace_in_dim": 96},
                 video(16)),
    Architecture("Wan 2.2 Animate", "WAN22_Animate", WAN | {"model_type": "animate", "in_dim": 36, "num_layers": 6},
                 video(16), extra={
                     "clip_vision_output": SEEN,
                     "pose_video_latent": lambda at: random(1, 16, at.frames - 1, at.height, at.width)}, idle=5),
    Architecture("Wan 2.2 S2V", "WAN22_S2V",
                 WAN | {"model_type": "s2v", "audio_dim": WIDTH, "audio_inject_layers": [0]}, video(16),
                 extra={"audio_embed": lambda at: random(1, 25, WIDTH, at.frames * 4)}),
    Architecture("HuMo", "WAN21_HuMo", WAN | {"model_type": "humo", "in_dim": 36}, video(16),
                 extra={"audio_embed": lambda at: random(1, at.frames, 8, 5, 1280)}, ahead=False),
    Architecture("LTX-Video", "LTXV", LTX, video(128), extra={"attention_mask": mask()}),
    Architecture("LTX-Video, image to video", "LTXV", LTX, video(128), extra={"attention_mask": mask()},
                 mask=after_first_frame, ahead=False),
    Architecture("LTX-Video with a guide", "LTXV", LTX, video(128), extra={"attention_mask": mask()} | GUIDE,
                 mask=before_guide, since="MiniMaxH3", ahead=False),
    Architecture("LTX-2", "LTXAV", LTX_2, with_sound(video(128), 8, LENGTH, 16), text=2 * WIDTH),
    Architecture("LTX-2, video alone", "LTXAV", LTX_2, video(128), text=2 * WIDTH, ahead=False),
    Architecture("LTX-2.3", "LTXAV", LTX_23, with_sound(video(128), 8, LENGTH, 16), text=192),
    Architecture("LTX-2, image to video", "LTXAV", LTX_2, with_sound(video(128), 8, LENGTH, 16), text=2 * WIDTH,
                 mask=after_first_frame, batches=False, ahead=False),
    Architecture("HunyuanVideo", "HunyuanVideo", HUNYUAN, video(16), pooled=WIDTH),
    Architecture("HunyuanVideo, image to video", "HunyuanVideoI2V", HUNYUAN | {"in_channels": 33}, video(16),
                 pooled=WIDTH, extra={"guiding_frame_index": 0}, cfg=1.0, since="ZImage", ahead=False),
    Architecture("HunyuanVideo 1.5", "HunyuanVideo15", HUNYUAN | {
        "in_channels": 65, "out_channels": 32, "patch_size": [1, 1, 1], "vec_in_dim": None, "byt5": True,
        "use_cond_type_embedding": True, "vision_in_dim": WIDTH, "guidance_embed": False, "meanflow_sum": True},
        video(32), pooled=WIDTH, extra={
            "conditioning_byt5small": lambda at: random(1, at.tokens // 2, 1472),
            "clip_vision_output": Vision(9, WIDTH)}),
    Architecture("Flux dev", "Flux", FLUX, image(16), pooled=WIDTH),
    Architecture("Flux Kontext", "Flux", FLUX, image(16), pooled=WIDTH, extra=REFERENCE),
    Architecture("Flux schnell", "FluxSchnell", FLUX | {"guidance_embed": False}, image(16), pooled=WIDTH),
    Architecture("Chroma", "Chroma", CHROMA, image(16), since="ZImage"),
    Architecture("Chroma Radiance", "ChromaRadiance", RADIANCE, image(3, 8), since="ZImage"),
    Architecture("Chroma Radiance x0", "ChromaRadiance", RADIANCE | {"use_x0": True}, image(3, 16), since="ZImage"),
    Architecture("SD3", "SD3", SD3, image(16), pooled=WIDTH),
    Architecture("SD3.5 medium", "SD3", SD3 | {"qk_norm": "rms", "x_block_self_attn_layers": [0]}, image(16),
                 pooled=WIDTH),
    Architecture("Lumina 2", "Lumina2", LUMINA, image(16), since="ZImage"),
    Architecture("Anima", "Anima", COSMOS | {"image_model": "anima", "crossattn_emb_channels": 1024}, still(16),
                 text=1024, extra={"t5xxl_ids": lambda at: torch.arange(at.tokens),
                                   "t5xxl_weights": lambda at: torch.ones(at.tokens)}),
    Architecture("Cosmos Predict 2", "CosmosT2IPredict2", COSMOS, video(16)),
    Architecture("Kandinsky 5", "Kandinsky5", KANDINSKY, video(16), pooled=WIDTH),
    Architecture("OmniGen 2", "Omnigen2", OMNIGEN, image(16), extra={"attention_mask": mask()}),
    Architecture("OmniGen 2 with a reference", "Omnigen2", OMNIGEN, image(16),
                 extra={"attention_mask": mask(), **REFERENCE}),
    Architecture("Boogu", "Boogu", BOOGU, image(16), extra={"attention_mask": mask()}),
    Architecture("ERNIE-Image", "ErnieImage", ERNIE, image(128)),
    Architecture("Mage Flow", "MageFlow", MAGE, image(128)),
    Architecture("JoyImage", "JoyImage", JOY, still(16)),
    Architecture("Lens", "Lens", LENS, image(128)),
    Architecture("CogVideoX", "CogVideoX_T2V", COG, video(16), tokens=226),
    Architecture("PixArt Sigma", "PixArtSigma", PIXART, image(4, 4)),
    Architecture("Hunyuan-DiT", "HunyuanDiT", HUNYUAN_DIT, image(4), tokens=77, extra={
        "attention_mask": mask(77), "conditioning_mt5xl": random(1, 256, WIDTH),
        "attention_mask_mt5xl": torch.ones(1, 256)}, ahead=False),
    Architecture("AuraFlow", "AuraFlow", AURA, image(4)),
    Architecture("Hunyuan3D 2", "Hunyuan3Dv2", HUNYUAN_3D, sound(64, 8)),
    Architecture("Hunyuan3D 2.1", "Hunyuan3Dv2_1", HUNYUAN_3D_EXPERTS, sound(64, 8), share=75,
                 reasons=(ReasonCode.DEPENDS_ON_VALUES,), why="blocks with experts choose them by values"),
    Architecture("Stable Audio", "StableAudio", STABLE_AUDIO, sound(64, 8), text=768,
                 state=seconds("seconds_start", "seconds_total")),
    Architecture("Stable Audio 3", "StableAudio3", STABLE_AUDIO_3, sound(256, 8), text=768,
                 state=seconds("seconds_total", fourier_features_type="expo")),
    Architecture("Stable Cascade, stage C", "Stable_Cascade_C", CASCADE_C, image(16), pooled=WIDTH),
    Architecture("Stable Cascade, stage B", "Stable_Cascade_B", CASCADE_B, image(4, 4), pooled=WIDTH),
    Architecture("Mochi", "GenmoMochi", MOCHI, video(12), tokens=256, extra={"attention_mask": padded_mask(256)}),
    Architecture("MiniMax H3", "MiniMaxH3", MINIMAX, with_sound(video(24), 32, 2, LENGTH), cfg=1.0,
                 batches=False, ahead=False),
    Architecture("SeedVR2", "SeedVR2", SEED, video(16),
                 extra={"condition": lambda at: random(at.batch, 17, at.frames, at.height, at.width)}, share=0,
                 reasons=(ReasonCode.ARGUMENT_TYPE, ReasonCode.DEPENDS_ON_VALUES),
                 why=f"{FUNCTIONS}, and {DEPENDS} (how long each video is)", ahead=False),
    Architecture("PixelDiT", "PixelDiTT2I", PIXEL, image(3, 8), sizes=False, batches=False,
                 why="its pixel blocks divide by sizes, and have a graph for each, up to four", ahead=False),
    Architecture("PiD", "PiD", PID, image(3, 16), extra={
        "lq_latent": lambda at: random(1, 16, at.height // 2, at.width // 2), "degrade_sigma": torch.tensor([0.3])},
        share=50, reasons=(ReasonCode.STRAY_LAYER,), ahead=False,
        why="its pixel blocks read the network that they are in"),
    Architecture("TripoSplat", "TripoSplat", TRIPO, sequence(16, 5), ahead=False),
    Architecture("ACE-Step", "ACEStep", ACE, lambda at: torch.zeros(at.batch, 8, 16, at.width * 4),
                 extra={"conditioning_lyrics": lambda at: torch.arange(at.tokens).unsqueeze(0)}, idle=1),
    Architecture("ACE-Step 1.5", "ACEStep15", ACE15, sound(64, 10),
                 extra={"conditioning_lyrics": lambda at: random(1, at.tokens, WIDTH)}),
    Architecture("HiDream", "HiDream", HIDREAM, image(16), pooled=WIDTH,
                 extra={"conditioning_llama3": lambda at: random(1, 4, at.tokens, WIDTH)}, share=0,
                 reasons=(ReasonCode.DEPENDS_ON_VALUES,), why=f"{DEPENDS} (which expert takes a token)", ahead=False),
)  # fmt: skip

ELSEWHERE = {
    "a UNet as other tests sample it": (
        "LotusD", "Stable_Zero123", "SD15_instructpix2pix", "SD15", "SD20", "SD21UnclipL", "SD21UnclipH", "SDXL",
        "SDXL_instructpix2pix", "SDXLRefiner", "SSD1B", "KOALA_700M", "KOALA_1B", "Segmind_Vega", "SD_X4Upscaler",
        "SV3D_u", "SV3D_p", "SVD_img2vid"),
    "the network of a row above, in another configuration": (
        "PixArtAlpha", "HunyuanDiT1", "HunyuanVideo15_SR_Distilled", "HunyuanImage21Refiner",
        "HunyuanVideoSkyreelsI2V", "CosmosI2V", "CogVideoX_Inpaint", "CogVideoX_I2V", "ZImagePixelSpace",
        "WAN21_CausalAR_T2V", "WAN22_Camera", "WAN21_FlowRVS", "WAN21_SCAIL2", "WAN22_WanDancer",
        "Hunyuan3Dv2mini"),
    "never calls a whole block: nothing is compiled, and the node says so": ("WAN_Animate2",),
    "compiled when it was tried, and too slow for a test: its text is 53248 wide": ("Ideogram4",),
    "its sizes are written into its code: 36 blocks, 2048 wide": ("MiniMaxMusic3",),
    "its first stage compiled when it was tried, in two minutes; others give blocks sparse tensors of its own class": (
        "Trellis2",),
    "no model that is sampled": ("RT_DETR_v4", "SAM3", "SAM31", "DepthAnything3"),
}  # fmt: skip
"""Classes without a row, by the reason."""
