"""ComfyUI as a host: what it passes through blocks, sets on layers, and how it cancels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ....common.host import FrameKeeping, Host
from ....common.inner_tensors import TENSOR_TYPES, InnerTensors
from ....common.reason import Reason, ReasonCode
from ....common.weight_source import NetworkWeights
from ....identity.context_options import TracedOptions, fresh
from ....identity.libraries import is_outside
from ....identity.source import functions_in
from ....tracing.attention_op import given_attention, opaque_map_attention
from ....tracing.patch_ops import PatchCall
from .. import comfy_compat, deep_cache, local_classes
from ..comfy_compat import (
    ATTENTION_MODULE,
    ATTENTION_OVERRIDE,
    BLOCK,
    CACHE,
    NETWORK_WRAPPERS,
    OPTIONS,
    PATCHES,
    REPLACEMENTS,
    STEPS,
    WRAPPERS,
)
from ..streaming import casts, streamed_weights
from ..streaming.vbar_places import LORA_FUNCTIONS, PLACE
from . import attention_patches, frame_caches, gguf_weights, quantized_weights
from .scaled_fp8 import multiply_weights

FORCE_CAST = "comfy_force_cast_weights"
"""Attribute of a layer whose weight is cast to the dtype of its input. A quantised one is dequantised then."""

FULL_PRECISION = "_full_precision_mm"
"""Attribute of a quantised layer that multiplies in the dtype of its input."""

# What a block may look up to hand it on. Tracing sees to it that the block does no more with it.
_BOOKKEEPING = attention_patches.PLACES | {PATCHES, REPLACEMENTS, ATTENTION_OVERRIDE}

_LAYER_SETTINGS = frozenset(
    {
        "training",
        "eps",
        "momentum",
        "transposed",
        "_reversed_padding_repeated_twice",
        # Quantised layers
        "in_features",
        "out_features",
        "quant_format",
        "layout_type",
        FULL_PRECISION,
    }
)

_UNET_MODULES = ("comfy.ldm.modules.diffusionmodules.openaimodel", "comfy.ldm.modules.attention")


class ComfyHost(Host):
    """ComfyUI from mid-2024 on."""

    folder = Path(__file__).resolve().parents[1]
    context_arguments = frozenset({OPTIONS, CACHE})
    weight_hooks = frozenset({"weight_function", "bias_function", "weight_lowvram_function", "bias_lowvram_function"})
    volatile_attributes = weight_hooks | {
        FORCE_CAST,
        "last_z_shape",  # a VAE's decoder of 2024 notes what it was last called with
        "largest_layer",  # ComfyUI-GGUF marks one layer, to estimate memory by it
        # `ModelPatcher.load` marks the layers of extensions, too.
        "comfy_cast_weights",
        "prev_comfy_cast_weights",
        "comfy_patched_weights",
        "comfy_need_lazy_init_bias",
        "seed_key",
        # Weights that are streamed (`ModelPatcherDynamic.load`, `comfy.model_prefetch`).
        "_v",
        "_v_block",
        "_v_block_faulted",
        "_v_signature",
        "_v_weight",
        "_v_bias",
        "_prefetch",
        "_pins",
        "_pin",
        "_pin_state",
        "_comfy_graph",
        "_comfy_cross_step_state",
    }
    layer_modules = ("comfy.ops",)
    traced_attributes = frozenset({"comfy_cast_weights"})  # set on single layers by a node that chooses the dtype
    frame_cells = frame_caches.CELLS
    weights_say_device = False
    infrastructure = (
        "comfy.model_management",
        "comfy.cli_args",
        "comfy.cli_args_types",
        "comfy.utils",
        "comfy.patcher_extension",
        "comfy.execution_context",
        "comfy.memory_management",
        "comfy.pinned_memory",
        "comfy.model_prefetch",
        "comfy.windows",
        "comfy_aimdo",
    )

    def is_volatile(self, name: str) -> bool:
        """A newer core notes on every module what dtype each of its tensors had in the file."""
        return super().is_volatile(name) or name.endswith("_comfy_model_dtype")

    def weight_dtype(self, layer: nn.Module, name: str, tensor: torch.Tensor) -> torch.dtype:
        """A file's dtype can differ from the model's: `ModelPatcherDynamic.load` casts layer by layer."""
        if type(tensor) not in TENSOR_TYPES or not comfy_compat.streams_weights():
            return tensor.dtype
        return casts.dtype_of(layer, name, tensor)

    def inner_tensors(self, tensor: torch.Tensor) -> InnerTensors | None:
        """Quantised weights have inner tensors."""
        rules = _rules_of(type(tensor))
        return super().inner_tensors(tensor) if rules is None else rules.inner_tensors(tensor)

    def with_inner_tensors(self, weight: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return _rules_of(type(weight)).with_inner_tensors(weight, tensors)

    def traced_functions(self, is_lenient: bool = False) -> AbstractContextManager[Any]:
        """Layouts answer for torch's functions of quantised weights."""
        quantized = quantized_weights.quantized_type()
        return nullcontext() if quantized is None else quantized_weights.QuantizedFunctions(quantized, is_lenient)

    def without_allocation_scopes(self) -> AbstractContextManager[None]:
        return comfy_compat.without_allocation_scopes()

    def memory_left_free(self) -> int:
        return comfy_compat.memory_left_free()

    def network_weights(self, network: nn.Module, device: torch.device) -> NetworkWeights:
        """Weights may come layer by layer; ask again at each call, because a load decides it."""
        return streamed_weights.weights_of(network, device, self)

    def applies_weight_function(self, attributes: Mapping[str, Any], name: str, in_place: bool = False) -> bool:
        """Dynamic VRAM applies LoRAs when it fills a layer's pages. Other functions are called for each call."""
        if name in LORA_FUNCTIONS:
            return PLACE in attributes
        if quantized_weights.is_quantized(attributes):  # the layer then dequantises its weight, and multiplies that
            return False
        return not in_place

    def weight_hooks_of(self, attributes: Mapping[str, Any]) -> frozenset[str]:
        """A quantised layer that is told to cast its weight dequantises it. A text encoder's does so in any case."""
        hooks = super().weight_hooks_of(attributes)
        obeys = FORCE_CAST in attributes and "layout_type" in attributes and not attributes.get(FULL_PRECISION)
        return hooks | {FORCE_CAST} if obeys else hooks

    def layer_settings(self, module: nn.Module) -> frozenset[str] | None:
        """What layers of `comfy.ops` were built with, by torch's own lists and those of layers that torch lacks."""
        cls = type(module)
        if cls.__module__ != "comfy.ops" or _has_code_of_others(module):
            return None
        return _LAYER_SETTINGS.union(*(vars(base).get("__constants__", ()) for base in cls.__mro__))

    def is_own_code(self, module: str) -> bool:
        """Extensions are imported from `custom_nodes`, and never as a part of ComfyUI's package."""
        return module.partition(".")[0] == "comfy"

    def uses_channels_last(self, region: nn.Module) -> bool:
        """Blocks of UNets, on a core that says when a sampling begins and ends (2025)."""
        is_of_unet = type(region).__module__ in _UNET_MODULES
        return is_of_unet and comfy_compat.announces_samplings()

    def placeholder_for(self, name: str, string_constants: frozenset[str], patch_points: str) -> TracedOptions | None:
        """Options with operators for patches; where the core offers the hook, attention becomes one, too."""
        if name == CACHE:
            return None
        return attention_patches.traced_options(ATTENTION_OVERRIDE in string_constants, patch_points)

    def patch_points(self, context: Mapping[str, Any], string_constants: frozenset[str]) -> str:
        return attention_patches.patch_points_of(context.get(OPTIONS) or {}, string_constants)

    def patch_call(self, context: Mapping[str, Any]) -> PatchCall:
        return attention_patches.PatchCalls(context[OPTIONS])

    def record_patches(self, context: Mapping[str, Any], patch_points: str) -> attention_patches.RecordedPatches:
        return attention_patches.RecordedPatches(context[OPTIONS], patch_points)

    def apply_writes(self, context: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        options = context.get(OPTIONS)
        if options is not None:
            options.update({name: fresh(value) for name, value in values.items()})

    def frame_cache(self, cls: type) -> FrameKeeping | None:
        return frame_caches.frame_cache(cls)

    def operator_for(self, function: str) -> Callable:
        """Text encoders hand their blocks one of ComfyUI's attention functions."""
        is_attention = function.startswith(f"{ATTENTION_MODULE}:")
        return given_attention(function) if is_attention else super().operator_for(function)

    def patch_names(
        self, context: Mapping[str, Any], patch_points: str, string_constants: frozenset[str]
    ) -> frozenset[str]:
        options = context.get(OPTIONS) or {}
        acts = patch_points or (ATTENTION_OVERRIDE in options and ATTENTION_OVERRIDE in string_constants)
        return attention_patches.patch_names(options, patch_points) if acts else frozenset()

    def prepare_for_tracing(self, weightless: nn.Module) -> None:
        """A VAE's attention chooses its function when it is built, and some of those look at free memory."""
        for module in weightless.modules():
            if function := module.__dict__.get("optimized_attention"):
                module.__dict__["optimized_attention"] = opaque_map_attention(function)
        multiply_weights(weightless)
        quantized_weights.hide_from_fused_inputs(weightless)

    def unsupported_patch(self, context: Mapping[str, Any], string_constants: frozenset[str]) -> Reason | None:
        """A patch reaches into a region if the region's code can look it up, for the block it is in."""
        if context.get(CACHE) is not None:
            return Reason(ReasonCode.EARLIER_TOKENS)
        options = context.get(OPTIONS) or {}
        operators = attention_patches.operators_in(string_constants)
        for name, patches in options.get(PATCHES, {}).items():
            if patches and name in string_constants and name not in operators:
                return Reason(ReasonCode.PATCH, name)
        for name, blocks in options.get(REPLACEMENTS, {}).items():
            if name in string_constants and name not in operators and _covers(blocks, options.get(BLOCK)):
                return Reason(ReasonCode.REPLACEMENT_PATCH, name)
        override = options.get(ATTENTION_OVERRIDE)
        if ATTENTION_OVERRIDE in string_constants and getattr(override, "container_function", None):
            return Reason(ReasonCode.OPTION, ATTENTION_OVERRIDE)  # it takes tensors in another way
        for name, value in options.items():
            if name in string_constants and name not in _BOOKKEEPING and type(value) is not bool:
                return Reason(ReasonCode.OPTION, name)
        return None

    def unsupported_read(self, context: Mapping[str, Any], names: frozenset[str]) -> Reason | None:
        found = sorted(names & (context.get(OPTIONS) or {}).keys())
        return Reason(ReasonCode.OPTION, found[0]) if found else None

    def can_be_captured(self, operator: str) -> bool:
        """The library of quantised weights has kernels of its own, and not all of them bear a capture."""
        known = (*comfy_compat.CAPTURED_OPERATORS, *comfy_compat.OPERATORS_WITH_WORKSPACES)
        name = operator.removeprefix("comfy_kitchen.")
        return name == operator or name.startswith(known)

    def precision(self, module: nn.Module) -> torch.dtype | None:
        return quantized_weights.precision(module)

    def keeps_memory_for_streams(self, operator: str) -> bool:
        return operator.removeprefix("comfy_kitchen.").startswith(comfy_compat.OPERATORS_WITH_WORKSPACES)

    def capture_blocker(self, context: Mapping[str, Any], string_constants: frozenset[str]) -> Reason | None:
        """A step that no patch, wrapper or option that the network looks up can change."""
        options = context.get(OPTIONS) or {}
        if self.steps(context) < 1:
            return Reason(ReasonCode.OUTSIDE_SAMPLING)
        if deep_cache.MARK in options:
            return Reason(ReasonCode.DEEP_CACHE)
        if any(options.get(PATCHES, {}).values()) or any(options.get(REPLACEMENTS, {}).values()):
            return Reason(ReasonCode.ANY_PATCH)
        if ATTENTION_OVERRIDE in options or attention_patches.switches_in(options, string_constants):
            return Reason(ReasonCode.ANY_PATCH)
        if self.runs_inside(context):
            return Reason(ReasonCode.NETWORK_WRAPPER)
        return self.unsupported_patch(context, string_constants)

    def runs_inside(self, context: Mapping[str, Any]) -> bool:
        options = context.get(OPTIONS) or {}
        return any(options.get(WRAPPERS, {}).get(NETWORK_WRAPPERS, {}).values())

    def is_comparable(self, context: Mapping[str, Any]) -> bool:
        return deep_cache.MARK not in (context.get(OPTIONS) or {}) and super().is_comparable(context)

    def steps(self, context: Mapping[str, Any]) -> int:
        sigmas = (context.get(OPTIONS) or {}).get(STEPS)
        return 0 if sigmas is None else len(sigmas) - 1

    def class_recipe(self, cls: type) -> tuple[Callable, tuple] | None:
        return local_classes.recipe(cls)

    def check_cancelled(self) -> None:
        comfy_compat.check_cancelled()

    def is_cancellation(self, error: BaseException) -> bool:
        return comfy_compat.is_cancellation(error)

    def return_cancellation(self) -> None:
        comfy_compat.cancel_prompt()

    def is_cancelled(self) -> bool:
        return comfy_compat.is_cancelled()


@lru_cache(maxsize=64)
def _rules_of(cls: type) -> Any:
    """Return the module that knows weights of a class, or None."""
    if cls in TENSOR_TYPES:
        return None
    if gguf_weights.is_known(cls):
        return gguf_weights
    return quantized_weights if quantized_weights.is_known(cls) else None


def _covers(blocks: Mapping[tuple, Any], block: tuple | None) -> bool:
    """Replacement patches name (place, number) or (place, number, transformer)."""
    return any(block is None or tuple(key[:2]) == tuple(block[:2]) for key in blocks)


def _has_code_of_others(layer: nn.Module) -> bool:
    """Whether an extension has put a method in the place of a layer's own: it can read any attribute.

    A node that tiles in one direction keeps its paddings on the layer.
    """
    cls = type(layer)
    methods = [v for name, v in vars(layer).items() if name != "forward" and callable(getattr(cls, name, None))]
    bases = cls.__mro__[: cls.__mro__.index(nn.Module)]
    methods += [function for base in bases for value in vars(base).values() for function in functions_in(value)]
    return not all(_is_hosts(getattr(method, "__func__", method)) for method in methods)


def _is_hosts(method: Any) -> bool:
    """Whether a function is of ComfyUI or a library. What is called and is no function is somebody else's."""
    home = getattr(method, "__globals__", {}).get("__name__", "")
    return HOST.is_own_code(home) or is_outside(home, HOST)


HOST = ComfyHost()
