"""What people put between a loader and a sampler: the rows of the matrix in test_matrix.py.

Each row uses ComfyUI's own nodes where there are any, with a value that a second prompt changes.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import comfy.cldm.cldm
import comfy.controlnet
import comfy.gligen
import comfy.lora
import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.t2i_adapter.adapter
import torch
from compiled_graphs.compiler.identity.regions import find_regions

UNETS = ("tiny_sd15", "tiny_sdxl")
SD15 = ("tiny_sd15",)
SD3 = ("tiny_sd3",)
FLUX = ("tiny_flux",)
FLOWS = ("tiny_sd3", "tiny_flux")
ALL = (*UNETS, *FLOWS)
COLUMNS = (*ALL, "tiny_sd15_inpaint", "tiny_svd")


class Missing(Exception):
    """This ComfyUI does not have it."""


def unchanged(model: Any, value: float) -> Any:
    return model


def no_arguments(model: Any, value: float) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Row:
    """One way to change a model or what it is asked for."""

    name: str
    change: Callable[[Any, float], Any] = unchanged
    arguments: Callable[[Any, float], dict[str, Any]] = no_arguments
    columns: tuple[str, ...] = ALL
    values: tuple[float, float] = (1.0, 0.5)
    eager: frozenset[str] = field(default=frozenset())
    """Why some of its region calls run eagerly."""
    acts: bool = True
    """Whether the image changes."""


def node(name: str, module: str) -> Callable[..., Any]:
    """Return what one of ComfyUI's nodes does, by the class's name."""
    for package in ("comfy_extras", "comfy_extras.nodes"):
        try:
            cls = getattr(importlib.import_module(f"{package}.nodes_{module}"), name, None)
        except ImportError:
            continue
        if cls is not None:
            return _run(cls)
    raise Missing(name)


def _run(cls: type) -> Callable[..., Any]:
    if hasattr(cls, "define_schema"):
        return lambda **inputs: cls.execute(**inputs)[0]
    return lambda **inputs: getattr(cls(), cls.FUNCTION)(**inputs)[0]


def patched(name: str, module: str, **inputs: Any) -> Callable[[Any, float], Any]:
    """Return a change by a node; inputs that are functions are given the value."""

    def change(model: Any, value: float) -> Any:
        return node(name, module)(model=model, **{n: v(value) if callable(v) else v for n, v in inputs.items()})

    return change


def random(*shape: int, seed: int = 3, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


# Weights.


def linear_weights(model: Any) -> dict[str, torch.Tensor]:
    """Some matrices inside of regions, by their key without the ending."""
    paths = [f"diffusion_model.{region.path}." for region in find_regions(model.model.diffusion_model)]
    weights = dict(model.model.named_parameters())  # a file's form of a quantised weight may be packed
    found = [k for k, w in weights.items() if k.endswith("weight") and len(w.shape) == 2 and k.startswith(tuple(paths))]
    return {key.removesuffix(".weight"): weights[key] for key in found[:12]}


def low_rank(shape: torch.Size, seed: int) -> dict[str, torch.Tensor]:
    up, down = random(shape[0], 4, seed=seed, scale=0.1), random(4, math.prod(shape[1:]), seed=seed + 1, scale=0.1)
    return {"lora_up.weight": up, "lora_down.weight": down, "alpha": torch.tensor(4.0)}


def dora(shape: torch.Size, seed: int) -> dict[str, torch.Tensor]:
    return low_rank(shape, seed) | {"dora_scale": 1 + random(shape[0], 1, seed=seed, scale=0.1).abs()}


def loha(shape: torch.Size, seed: int) -> dict[str, torch.Tensor]:
    names = {
        "hada_w1_a": (shape[0], 4),
        "hada_w1_b": (4, shape[1]),
        "hada_w2_a": (shape[0], 4),
        "hada_w2_b": (4, shape[1]),
    }
    return {name: random(*size, seed=seed + n, scale=0.3) for n, (name, size) in enumerate(names.items())}


def lokr(shape: torch.Size, seed: int) -> dict[str, torch.Tensor]:
    factor = math.gcd(4, *shape)
    return {
        "lokr_w1": random(factor, factor, seed=seed, scale=0.1),
        "lokr_w2": random(shape[0] // factor, shape[1] // factor, seed=seed + 1, scale=0.1),
    }


def adapted(make: Callable[[torch.Size, int], dict[str, torch.Tensor]], seed: int = 3) -> Callable[[Any, float], Any]:
    """Return a change by an adapter's file, read as the LoRA loader reads it."""

    def change(model: Any, value: float) -> Any:
        weights = linear_weights(model)
        file = {f"{key}.{n}": t for key, w in weights.items() for n, t in make(w.shape, seed).items()}
        loaded = comfy.lora.load_lora(file, {key: f"{key}.weight" for key in weights})
        clone = model.clone()
        assert len(clone.add_patches(loaded, value)) == len(weights)
        return clone

    return change


def stacked(model: Any, value: float) -> Any:
    return adapted(loha, seed=9)(adapted(low_rank)(model, value), 1.0 - value / 2)


def merged(model: Any, value: float) -> Any:
    return node("ModelMergeSimple", "model_merging")(
        model1=model, model2=adapted(low_rank, 5)(model, 2.0), ratio=value / 2
    )


def merged_by_block(model: Any, value: float) -> Any:
    other = adapted(low_rank, 5)(model, 2.0)
    merge = node("ModelMergeBlocks", "model_merging")
    return merge(model1=model, model2=other, input=value / 2, middle=0.3, out=0.0)


# Patches inside of attention.


def scaled_context(model: Any, value: float) -> Any:
    """A patch of the kind that regional prompting makes."""
    clone = model.clone()
    clone.set_model_attn2_patch(lambda n, context, v, options: (n, context * value, v * (1 + value)))
    return clone


def scaled_query(model: Any, value: float) -> Any:
    clone = model.clone()
    clone.set_model_attn1_patch(lambda n, context, v, options: (n * (1 + value), context, v))
    return clone


def scaled_output(kind: str) -> Callable[[Any, float], Any]:
    def change(model: Any, value: float) -> Any:
        clone = model.clone()
        patch = getattr(clone, f"set_model_{kind}_output_patch")
        patch(lambda n, options: n * (1 + value) + len(options["original_shape"]) * 0.01)
        return clone

    return change


def other_attention(model: Any, value: float) -> Any:
    """An override of the model's attention, as nodes for SageAttention set it."""
    from comfy.ldm.modules import attention

    if not hasattr(attention, "wrap_attn"):
        raise Missing("overrides of attention")
    clone = model.clone()
    options = clone.model_options["transformer_options"]
    options["optimized_attention_override"] = lambda function, *given, **named: function(*given, **named) * (1 + value)
    return clone


def image_prompt(model: Any, value: float) -> Any:
    """Cross-attention to image tokens beside the text, for every block, as IP-Adapter has it."""
    clone = model.clone()
    from comfy.ldm.modules.attention import optimized_attention

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        heads = options["n_heads"]
        tokens = random(1, 4, q.shape[-1], seed=7).to(q).repeat(q.shape[0], 1, 1)
        return optimized_attention(q, k, v, heads) + value * optimized_attention(q, tokens, tokens, heads)

    blocks = [("input", n) for n in range(12)] + [("middle", 0)] + [("output", n) for n in range(12)]
    for place, number in blocks:
        for index in range(10):
            clone.set_model_attn2_replace(attend, place, number, index)
    return clone


def identity_attention(model: Any, value: float) -> Any:
    """Self-attention that returns its values, in the middle block, as perturbed guidance has it."""
    clone = model.clone()
    clone.set_model_attn1_replace(lambda q, k, v, options: v * value, "middle", 0)
    return clone


def hypernetwork(model: Any, value: float) -> Any:
    clone = model.clone()

    class Patch:
        def __call__(self, n: Any, context: Any, v: Any, options: dict[str, Any]) -> tuple[Any, Any, Any]:
            return n, context + torch.tanh(context) * value, v + torch.tanh(v) * value

        def to(self, device: torch.device) -> Patch:
            return self

    patch = Patch()
    clone.set_model_attn1_patch(patch)
    clone.set_model_attn2_patch(patch)
    return clone


def block_patches(model: Any, value: float) -> Any:
    clone = model.clone()
    clone.set_model_input_block_patch(lambda h, options: h * (1 + value * (options["block"][1] == 1)))
    clone.set_model_output_block_patch(lambda h, skip, options: (h, skip * value))
    clone.set_model_patch(lambda emb, channels, options: emb * value, "emb_patch")
    return clone


def skipped_layer(model: Any, value: float) -> Any:
    layer = node("SkipLayerGuidanceSD3", "sd3")
    return layer(model=model, layers="1", scale=value, start_percent=0.0, end_percent=1.0)


def skipped_layer_of_flux(model: Any, value: float) -> Any:
    layer = node("SkipLayerGuidanceDiT", "slg")
    return layer(model=model, double_layers="0", single_layers="", scale=value, start_percent=0.0, end_percent=1.0)


def replaced_block(model: Any, value: float) -> Any:
    clone = model.clone()
    if "double_block" not in inspect.getsource(inspect.getmodule(type(model.model.diffusion_model))):
        raise Missing("replacement of blocks")

    def around(arguments: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        out = extra["original_block"](arguments)
        return out | {"img": out["img"] * (1 + value)}

    clone.set_model_patch_replace(around, "dit", "double_block", 0)
    return clone


# Around the model.


def wrapped(model: Any, value: float) -> Any:
    clone = model.clone()

    def wrapper(apply_model: Callable, arguments: dict[str, Any]) -> torch.Tensor:
        return apply_model(arguments["input"], arguments["timestep"], **arguments["c"]) * value

    clone.set_model_unet_function_wrapper(wrapper)
    return clone


def wrapped_by_key(model: Any, value: float) -> Any:
    clone = model.clone()
    if not hasattr(clone, "add_wrapper_with_key"):
        raise Missing("wrappers")
    from comfy.patcher_extension import WrappersMP

    def around(executor: Any, *args: Any, **kwargs: Any) -> Any:
        return executor(*args, **kwargs) * value

    clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "test", around)
    clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "test", around)
    return clone


def cfg_functions(model: Any, value: float) -> Any:
    clone = model.clone()
    clone.set_model_sampler_cfg_function(lambda args: args["cond"] * value + args["uncond"])
    clone.set_model_sampler_post_cfg_function(lambda args: args["denoised"] * 0.9)
    return clone


def negative_prompt_made_perpendicular(model: Any, value: float) -> Any:
    try:
        empty = [[random(1, 77, 768, seed=8), {"pooled_output": random(1, 768)}]]
        return node("PerpNeg", "perpneg")(model=model, empty_conditioning=empty, neg_scale=value)
    except AttributeError as error:  # an early version of the node wants other things of the core
        raise Missing("PerpNeg") from error


def lora_hook(model: Any, value: float) -> dict[str, Any]:
    try:
        import comfy.hooks
    except ImportError as error:
        raise Missing("hooks") from error
    weights = linear_weights(model)
    file = {f"{k}.{n}": t for k, w in weights.items() for n, t in low_rank(w.shape, 3).items()}
    hooks = comfy.hooks.HookGroup()
    hook = comfy.hooks.WeightHook(strength_model=value, strength_clip=0.0)
    hook.weights = comfy.lora.load_lora(file, {key: f"{key}.weight" for key in weights})
    hook.need_weight_init = False
    hooks.add(hook)
    return {"conditioning": {"hooks": hooks}}


# Conditioning.


def control_net(model: Any, value: float = 0.0) -> Any:
    """A ControlNet of the model's own architecture, with random weights."""
    config = dict(model.model.model_config.unet_config)
    config.pop("out_channels", None)
    for name in ("transformer_depth_output", "disable_unet_model_creation", "use_temporal_attention"):
        config.pop(name, None)
    torch.manual_seed(0)
    operations = comfy.ops.disable_weight_init
    network = comfy.cldm.cldm.ControlNet(**config | {"hint_channels": 3, "dtype": torch.float32}, operations=operations)
    fill(network)
    device = model.load_device
    return comfy.controlnet.ControlNet(network.to(device), load_device=device)


@torch.no_grad()
def fill(network: torch.nn.Module, seed: int = 0) -> None:
    """Random weights that keep activations near one."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in network.named_parameters():
        if weight.ndim > 1:
            weight.copy_(torch.randn(weight.shape, generator=generator) * weight[0].numel() ** -0.5)
        else:
            weight.fill_(float(name.endswith("weight")))


def hinted(control: Any, value: float) -> dict[str, Any]:
    hint = torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    return {"conditioning": {"control": control.copy().set_cond_hint(hint, value), "control_apply_to_uncond": True}}


def controlled(model: Any, value: float) -> dict[str, Any]:
    return hinted(control_net(model), value)


def controlled_by_lora(model: Any, value: float) -> dict[str, Any]:
    network = control_net(model).control_model
    kept = ("input_hint_block", "zero_convs", "middle_block_out")
    weights = {key: t for key, t in network.state_dict().items() if key.startswith(kept)}
    for key, weight in network.state_dict().items():
        if key.endswith("attn1.to_q.weight"):
            weights[key.removesuffix("weight") + "up"] = random(weight.shape[0], 4, scale=0.1)
            weights[key.removesuffix("weight") + "down"] = random(4, weight.shape[1], scale=0.1)
    return hinted(comfy.controlnet.ControlLora(weights | {"lora_controlnet": torch.tensor([])}), value)


def adapter(model: Any, value: float) -> dict[str, Any]:
    config = model.model.model_config.unet_config
    channels = [config["model_channels"] * m for m in config["channel_mult"]] + [320] * (
        4 - len(config["channel_mult"])
    )
    xl = len(config["channel_mult"]) == 3
    torch.manual_seed(0)
    network = comfy.t2i_adapter.adapter.Adapter(
        cin=768 if xl else 192, channels=channels, nums_rb=2, ksize=1, sk=True, use_conv=False, xl=xl
    )
    made = comfy.controlnet.T2IAdapter(network, network.input_channels, 8, "nearest-exact")
    return hinted(made, value)


def positioned(model: Any, value: float) -> dict[str, Any]:
    """GLIGEN: a text for a box."""
    torch.manual_seed(0)
    blocks = sum(type(module).__name__ == "SpatialTransformer" for module in model.model.modules())
    fusers = [comfy.gligen.GatedSelfAttentionDense(320, 768, 8, 40) for _ in range(blocks)]
    network = comfy.gligen.Gligen(fusers, comfy.gligen.PositionNet(768, 768), 768)
    fill(network)
    for fuser in fusers:
        fuser.alpha_attn.data.fill_(value)
        fuser.alpha_dense.data.fill_(value)
    if comfy.model_management.should_use_fp16(model.load_device):
        network.half()
    patcher = comfy.model_patcher.ModelPatcher(
        network, load_device=model.load_device, offload_device=model.offload_device
    )
    return {"conditioning": {"gligen": ("position", patcher, [(random(1, 768), 4, 6, 1, 2)])}}


def area(model: Any, value: float) -> dict[str, Any]:
    return {"conditioning": {"area": (6, int(8 * value) + 2, 0, 0), "strength": value}}


def masked(model: Any, value: float) -> dict[str, Any]:
    mask = torch.zeros(1, 8, 12)
    mask[:, :, : int(6 + 4 * value)] = 1.0
    return {"conditioning": {"mask": mask, "mask_strength": value, "set_area_to_bounds": value < 1}}


def timestep_range(model: Any, value: float) -> dict[str, Any]:
    early = {"start_percent": 0.0, "end_percent": value / 2}
    return {"conditioning": [early, {"start_percent": value / 2, "end_percent": 1.0}], "steps": 3}


def regions_of_the_picture(model: Any, value: float) -> dict[str, Any]:
    left, mask = {"area": (8, 6, 0, 0)}, torch.zeros(1, 8, 12)
    mask[:, :, int(8 - 4 * value) :] = 1.0
    return {"conditioning": [{}, left, {"mask": mask, "mask_strength": value}]}


def inpainted(model: Any, value: float) -> dict[str, Any]:
    mask = torch.zeros(1, 1, 8, 12)
    mask[..., : int(6 * value) + 2] = 1.0
    return {"noise_mask": mask}


def filled_in(model: Any, value: float) -> dict[str, Any]:
    """What an inpainting model is given besides the latent."""
    mask = torch.zeros(1, 1, 64, 96)
    mask[..., : int(48 * value)] = 1.0
    conditioning = {"concat_latent_image": random(1, 4, 8, 12, scale=0.5), "concat_mask": mask}
    return {"conditioning": conditioning, "noise_mask": mask}


def moved(model: Any, value: float) -> dict[str, Any]:
    """What image to video is given: the picture, how much moves, and for the text what an image encoder saw."""
    conditioning = {
        "concat_latent_image": random(1, 4, 8, 12, scale=0.5),
        "motion_bucket_id": int(127 * value),
        "fps": 6,
        "augmentation_level": 0.0,
    }
    return {"conditioning": conditioning, "tokens": 1, "batch": 3}


def steered(model: Any, value: float) -> dict[str, Any]:
    mask = torch.linspace(0, value, 12).expand(1, 1, 8, 12)
    return {"noise_mask": mask, "steps": 2}


def previewed(model: Any, value: float) -> dict[str, Any]:
    seen: list[int] = []

    def callback(step: int, x0: torch.Tensor, x: torch.Tensor, total: int) -> None:
        assert x0.shape == x.shape
        seen.append(step)

    return {"callback": callback, "seed": int(value * 10), "steps": 2}


def with_sampler(name: str) -> Callable[[Any, float], dict[str, Any]]:
    return lambda model, value: {"sampler": name, "steps": 3, "seed": int(value * 10)}


def batched(model: Any, value: float) -> dict[str, Any]:
    return {"batch": int(4 * value), "seed": 4}


ROWS = [
    Row("LoRA", adapted(low_rank)),
    Row("LoHa", adapted(loha)),
    Row("LoKr", adapted(lokr)),
    Row("DoRA", adapted(dora)),
    Row("LoRAs stacked", stacked),
    Row("LoRA of a conditioning", arguments=lora_hook, columns=UNETS),
    Row("models merged", merged, columns=SD15 + SD3),
    Row("models merged by block", merged_by_block, columns=SD15),
    Row(
        "attention weights scaled",
        patched("UNetSelfAttentionMultiply", "attention_multiply", q=float, k=1.1, v=1.0, out=0.9),
        columns=UNETS,
    ),
    Row("ControlNet", arguments=controlled, columns=UNETS),
    Row("Control-LoRA", arguments=controlled_by_lora, columns=UNETS),
    Row("T2I adapter", arguments=adapter, columns=SD15),
    Row("GLIGEN", arguments=positioned, columns=SD15),
    Row("attention patch attn1", scaled_query, columns=UNETS, eager=frozenset({"patch attn1_patch"})),
    Row("attention patch attn2", scaled_context, columns=UNETS, eager=frozenset({"patch attn2_patch"})),
    Row("attention output attn1", scaled_output("attn1"), columns=UNETS),
    Row("attention output attn2", scaled_output("attn2"), columns=UNETS),
    Row("another attention function", other_attention),
    Row("IP-Adapter", image_prompt, columns=UNETS),
    Row(
        "self-attention replaced in one block",
        identity_attention,
        columns=UNETS,
    ),
    Row("hypernetwork", hypernetwork, columns=SD15, eager=frozenset({"patch attn1_patch"})),
    Row("patches between blocks", block_patches, columns=UNETS),
    Row("FreeU", patched("FreeU", "freelunch", b1=lambda v: 1 + v, b2=1.2, s1=0.9, s2=0.2), columns=UNETS, acts=False),
    Row(
        "FreeU V2",
        patched("FreeU_V2", "freelunch", b1=lambda v: 1 + v, b2=1.2, s1=0.9, s2=0.2),
        columns=UNETS,
        acts=False,
    ),
    Row(
        "HyperTile",
        patched(
            "HyperTile", "hypertile", tile_size=lambda v: int(128 * v), swap_size=2, max_depth=1, scale_depth=False
        ),
        lambda model, value: {"height": 32, "width": 32},
        columns=SD15,
        values=(1.0, 0.5),
        eager=frozenset({"patch attn1_patch"}),
    ),
    Row(
        "PAG",
        patched("PerturbedAttentionGuidance", "pag", scale=float),
        columns=UNETS,
    ),
    Row(
        "SAG",
        patched("SelfAttentionGuidance", "sag", scale=float, blur_sigma=2.0),
        columns=UNETS,
    ),
    Row(
        "token merging",
        patched("TomePatchModel", "tomesd", ratio=lambda v: v / 2),
        columns=SD15,
        eager=frozenset({"patch attn1_patch"}),
    ),
    Row(
        "deep shrink",
        patched(
            "PatchModelAddDownscale",
            "model_downscale",
            block_number=2,
            downscale_factor=lambda v: 1 + v,
            start_percent=0.0,
            end_percent=1.0,
            downscale_after_skip=True,
            downscale_method="bilinear",
            upscale_method="bilinear",
        ),
        columns=UNETS,
    ),
    Row("skip-layer guidance", skipped_layer, columns=SD3),
    Row("skip-layer guidance of DiTs", skipped_layer_of_flux, columns=FLOWS),
    Row("a block's replacement around it", replaced_block, columns=FLOWS),
    Row("model function wrapper", wrapped, values=(0.7, 0.5)),
    Row("wrappers by key", wrapped_by_key, values=(0.7, 0.5)),
    Row("guidance functions", cfg_functions, columns=UNETS + SD3),
    Row("RescaleCFG", patched("RescaleCFG", "model_advanced", multiplier=float), columns=UNETS),
    Row("perpendicular negative", negative_prompt_made_perpendicular, columns=SD15),
    Row("CFG-Zero*", patched("CFGZeroStar", "cfg"), columns=UNETS + SD3),
    Row("CFGNorm", patched("CFGNorm", "cfg", strength=float), columns=UNETS + SD3),
    Row("APG", patched("APG", "apg", eta=float, norm_threshold=5.0, momentum=0.1), columns=UNETS + SD3),
    Row("TCFG", patched("TCFG", "tcfg"), columns=UNETS + SD3),
    Row("Mahiro", patched("Mahiro", "mahiro"), columns=UNETS),
    Row("FreSca", patched("FreSca", "fresca", scale_low=float, scale_high=1.25, freq_cutoff=2), columns=UNETS),
    Row("epsilon scaling", patched("EpsilonScaling", "eps", scaling_factor=lambda v: 1 + v / 100), columns=UNETS),
    Row(
        "EasyCache",
        patched("EasyCacheNode", "easycache", reuse_threshold=float, start_percent=0.0, end_percent=1.0, verbose=False),
        lambda model, value: {"steps": 4},
        acts=False,
    ),
    Row("differential diffusion", patched("DifferentialDiffusion", "differential_diffusion"), steered),
    Row(
        "ModelSamplingDiscrete",
        patched(
            "ModelSamplingDiscrete", "model_advanced", sampling=lambda v: "lcm" if v == 1 else "v_prediction", zsnr=True
        ),
        columns=UNETS,
    ),
    Row(
        "ModelSamplingContinuousEDM",
        patched(
            "ModelSamplingContinuousEDM",
            "model_advanced",
            sampling="v_prediction",
            sigma_max=lambda v: 100 * v,
            sigma_min=0.002,
        ),
        columns=UNETS,
    ),
    Row(
        "ModelSamplingSD3",
        patched("ModelSamplingSD3", "model_advanced", shift=lambda v: 4 + v),
        lambda m, v: {"steps": 2},
        columns=SD3,
    ),
    Row(
        "ModelSamplingFlux",
        patched(
            "ModelSamplingFlux", "model_advanced", max_shift=8.0, base_shift=lambda v: 4 * v, width=512, height=512
        ),
        lambda m, v: {"steps": 2},
        columns=FLUX,
    ),
    Row(
        "compute dtype",
        patched("ModelComputeDtype", "model_advanced", dtype="bf16"),
        acts=False,
    ),
    Row("area", arguments=area, columns=UNETS + SD3),
    Row("mask of a conditioning", arguments=masked, columns=UNETS + SD3),
    Row("regional prompts", arguments=regions_of_the_picture, columns=UNETS + SD3),
    Row("timestep range", arguments=timestep_range),
    Row("inpainting mask", arguments=inpainted),
    Row("inpainting model", arguments=filled_in, columns=("tiny_sd15_inpaint",)),
    Row("image to video", arguments=moved, columns=("tiny_svd",)),
    Row("live preview", arguments=previewed),
    Row("batch of latents", arguments=batched),
    Row("DPM++ 3M SDE", arguments=with_sampler("dpmpp_3m_sde"), columns=UNETS + SD3),
    Row("UniPC", arguments=with_sampler("uni_pc"), columns=UNETS),
    Row("LCM sampler", arguments=with_sampler("lcm"), columns=UNETS),
]
