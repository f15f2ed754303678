"""What ComfyUI calls its own, or has only in some versions (mid-2024 to 0.33.0): each name once, with a guard.

A name that is gone costs what it was for and nothing else. Without a name in PATCHER_NEEDS, VAE_NEEDS or
CONTROL_NET_NEEDS nothing can be compiled: the node then names it and leaves the model as it is. What ComfyUI sets on
layers stands in `host.ComfyHost`. Nothing here imports ComfyUI before it is asked.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from ...common.words import say

MANAGEMENT = "comfy.model_management"
MEMORY = "comfy.memory_management"
VBAR = "comfy_aimdo.model_vbar"
"""Pages of GPU memory that hold a model's weights while there is room (comfy-aimdo)."""

DTYPE_CODES = "comfy_kitchen.backends.eager.quantization.DTYPE_CODE_TO_DTYPE"
"""The numbers by which operators of comfy_kitchen name dtypes."""

CAPTURED_OPERATORS = ("apply_rope", "rms_", "adaln", "quantize_fp8", "dequantize_fp8")
"""Operators of comfy_kitchen that a capture may hold, by the beginning of their names."""
OPERATORS_WITH_WORKSPACES = ("int8_linear",)
"""Operators that a capture may hold once they have run on its stream: they allocate a workspace for each stream."""

PREFETCH_QUEUES = "comfy.model_prefetch.PREFETCH_QUEUES"
"""Networks of which ComfyUI brings each block's weights before it runs."""

MODULE_NAMES = {
    f"{MANAGEMENT}.get_torch_device": "the first CUDA device, or the CPU, is warmed up and named by the doctor",
    f"{MANAGEMENT}.throw_exception_if_processing_interrupted": "a compile cannot be cancelled",
    f"{MANAGEMENT}.InterruptProcessingException": "a cancellation that a layer raises counts as a failed compile",
    f"{MANAGEMENT}.interrupt_current_processing": "a cancellation met in the background does not reach its prompt",
    f"{MANAGEMENT}.processing_interrupted": "compiling in the background does not wait for a cancelled prompt",
    "comfy.model_patcher.ModelPatcher": "weights keep their memory format",
    "comfy.patcher_extension.CallbacksMP": "no CUDA graphs, no DeepCache; each call is looked at",
    "comfy.patcher_extension.WrappersMP": "a LoRA on quantised weights is merged, also with the switch",
    f"{MANAGEMENT}.free_memory": "a LoRA beside quantised weights takes memory that ComfyUI does not make room for",
    "comfy.utils.ProgressBar": "no progress bar",
    f"{MEMORY}.aimdo_enabled": "weights that are streamed keep their regions eager",
    f"{MEMORY}.interpret_gathered_like": "weights that find no room in their pages pass through ComfyUI's buffers",
    f"{MEMORY}.vram_aligned_size": "where RAM is short, the CPU waits more often for copies to the GPU",
    f"{MANAGEMENT}.MAX_PINNED_MEMORY": "the CPU waits more often for copies to the GPU",
    f"{MANAGEMENT}.TOTAL_PINNED_MEMORY": "the CPU waits more often for copies to the GPU",
    f"{MEMORY}.RAM_CACHE_HEADROOM": "where little RAM is to stay free, the CPU waits more often for copies to the GPU",
    "comfy.pinned_memory.get_pin": "weights that find no room in their pages pass through ComfyUI's buffers",
    "comfy.quant_ops.QuantizedTensor": "quantised weights keep their regions eager",
    "comfy_kitchen.registry.registry": "float8 rounding is not fused with what is around it",
    DTYPE_CODES: "float8 rounding is not fused with what is around it",
    "comfy.ops.cast_bias_weight": "weights that are moved or changed at each call keep their regions eager",
    "comfy.ops.mixed_precision_ops": "quantised models are compiled in ComfyUI's own process",
    "comfy.ops.cast_modules_with_vbar": "weights that are streamed keep their regions eager",
    "comfy.ops.resolve_cast_module_with_vbar": "weights that are streamed keep their regions eager",
    "comfy.model_prefetch.cleanup_prefetched_modules": "weights that are streamed keep their regions eager",
    f"{VBAR}.vbar_fault": "weights that are streamed keep their regions eager",
    f"{VBAR}.vbar_unpin": "weights that are streamed keep their regions eager",
    f"{VBAR}.vbar_signature_compare": "weights that are streamed keep their regions eager",
    f"{VBAR}.ModelVBAR": "no CUDA graphs while ComfyUI streams weights",
    f"{MANAGEMENT}.STREAMS": "the CPU waits for the GPU before weights that have changed are brought",
    f"{MANAGEMENT}.stream_counters": "weights that are streamed are not brought ahead of their region",
    PREFETCH_QUEUES: "weights are brought ahead although the network brings them itself",
    "comfy.cli_args.args": "worker processes start with ComfyUI's defaults",
    "folder_paths.get_user_directory": "the store is in the folder of models",
    "folder_paths.models_dir": "the store is in the current user's home",
    "folder_paths.get_folder_paths": "the doctor names no other extensions",
}
"""Names of ComfyUI's modules, and what is lost without each."""

PATCHER_NEEDS = (
    "clone",
    "model",
    "model_options",
    "load_device",
    "object_patches",
    "add_object_patch",
    "get_model_object",
)
"""What a ModelPatcher must have."""
PATCHER_OFFERS = {
    "wrappers": "torch.compile of an earlier node is not set aside",
    "add_callback_with_key": "no CUDA graphs, no DeepCache; each call is looked at",
    "remove_callbacks_with_key": "no CUDA graphs, no DeepCache; each call is looked at",
    "add_wrapper_with_key": "a LoRA on quantised weights is merged, also with the switch",
    "remove_wrappers_with_key": "a LoRA on quantised weights is merged, also with the switch",
}
"""What a ModelPatcher has in some versions, and what is lost without it."""
VAE_NEEDS = ("first_stage_model", "patcher", "device")
CLIP_NEEDS = ("cond_stage_model", "patcher", "tokenize", "layer_idx", "clone")
CONTROL_NET_NEEDS = ("control_model", "copy", "previous_controlnet")
CONTROL_NET_PATCHER = "control_model_wrapped"
"""ControlNets without one have no network of their own."""

# Keys of `transformer_options`. One that is called otherwise is an option like any other: a region that looks it up
# stays eager.
OPTIONS = "transformer_options"
PATCHES = "patches"
REPLACEMENTS = "patches_replace"
BLOCK = "block"
WRAPPERS = "wrappers"
STEP = "sigmas"
STEPS = "sample_sigmas"
CONDITIONINGS = "uuids"
ATTENTION_OVERRIDE = "optimized_attention_override"
CACHE = "past_key_value"
"""Argument of a language model's blocks: what it keeps of the tokens before, while it generates text."""
ATTENTION_MODULE = "comfy.ldm.modules.attention"
"""Where ComfyUI's attention functions stand, which share one calling convention."""
OPTION_KEYS = (PATCHES, REPLACEMENTS, BLOCK, WRAPPERS, STEP, STEPS, ATTENTION_OVERRIDE)

CONDITIONS = "extra_conds"
"""Method by which a model makes a network's inputs of a prompt, once for each sampling."""
TEXT_METHOD = "preprocess_text_embeds"
"""Method of a network that `CONDITIONS` calls, in some models."""

NETWORK_WRAPPERS = "diffusion_model"
"""Key of a network's wrappers in `transformer_options["wrappers"]`."""

_AROUND_CALLS = ("predict_noise", "calc_cond_batch", "apply_model")
"""Keys of the wrappers around a network's calls."""

FUNCTION_WRAPPER = "model_function_wrapper"
"""Key of `model_options` for the one function that wraps the model's call."""
CLASS_FACTORIES = {
    "comfy.ops.mixed_precision_ops": {
        "quant_config": "_quant_config",
        "compute_dtype": "_compute_dtype",
        "full_precision_mm": "_full_precision_mm",
        "disabled": "_disabled",
    }
}
"""Functions that make classes of layers: each argument, and the attribute of the class in which it is kept."""

FP8_PRODUCTS = "fp8_matrix_mult"
"""Closure variable of `comfy.ops.scaled_fp8_ops`: whether its layers multiply in float8."""
FP8_FORWARD = "forward_comfy_cast_weights"
FP8_SCALE = "scale_weight"

COMPUTE_DTYPE = "manual_cast_dtype"
"""Attribute of a model, which a clone may replace."""
SETTINGS_FILE = ("default", "comfy.settings.json")
"""Where the user folder keeps the settings dialog's values, without --multi-user."""

_BEFORE_SAMPLING, _AFTER_SAMPLING, _AFTER_CLONE = "ON_PRE_RUN", "ON_CLEANUP", "ON_CLONE"
_AFTER_UNLOADING, _AROUND_SAMPLING = "ON_DETACH", "OUTER_SAMPLE"
_FOR_COPIES = "ON_DEEPCLONE_MULTIGPU", "ON_MATCH_MULTIGPU_CLONES"

NO_SCOPES = "disable_comfy_compiler"
"""The option (0.34 on) without which ComfyUI records the allocations of a step and replays their places.

Some networks open such a scope in their `forward`, which is inside ours. One that is left by an exception, opened
twice, or opened during a capture fails the prompt or ends the process (`comfy.model_prefetch`, `comfy_aimdo`).
"""
_scopes_lock = threading.Lock()
_scopes_off: list[bool] = []
"""What the option was, once for each call that runs now."""


def find(name: str) -> Any:
    """Return what a name in MODULE_NAMES stands for, or None if this ComfyUI has no such name."""
    if name not in MODULE_NAMES:
        raise KeyError(name)
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(sys.modules.get(module) or importlib.import_module(module), attribute, None)
    except ImportError:
        return None


def missing(thing: Any, names: Iterable[str]) -> str:
    """Return the sentence for a thing that lacks one of these attributes, or nothing if it has all."""
    lacking = next((name for name in names if not hasattr(thing, name)), None)
    if lacking is None:
        return ""
    return say("Not compiled: this ComfyUI's {thing} has no {lacking}", thing=type(thing).__name__, lacking=lacking)


def torch_device() -> torch.device:
    """Return the device that ComfyUI samples on."""
    if get := find(f"{MANAGEMENT}.get_torch_device"):
        return get()
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def check_cancelled() -> None:
    """Raise ComfyUI's own exception if the person asked to stop."""
    if check := find(f"{MANAGEMENT}.throw_exception_if_processing_interrupted"):
        check()


def is_cancellation(error: BaseException) -> bool:
    """Whether an exception is the one that ComfyUI raises to cancel a prompt."""
    cls = find(f"{MANAGEMENT}.InterruptProcessingException")
    return cls is not None and isinstance(error, cls)


def cancel_prompt() -> None:
    """Ask the running prompt to stop."""
    if interrupt := find(f"{MANAGEMENT}.interrupt_current_processing"):
        interrupt(True)


def is_cancelled() -> bool:
    """Whether a cancellation waits for its prompt."""
    interrupted = find(f"{MANAGEMENT}.processing_interrupted")
    return bool(interrupted and interrupted())


def progress_bar(total: int, node_id: str) -> Any:
    """Return a progress bar for a node, or None. Versions of 2024 do not take the node."""
    cls = find("comfy.utils.ProgressBar")
    if cls is None:
        return None
    takes_node = "node_id" in inspect.signature(cls).parameters and node_id
    return cls(total, **({"node_id": node_id} if takes_node else {}))


def start_options() -> dict[str, Any]:
    """Return the options that ComfyUI was started with."""
    options = find("comfy.cli_args.args")
    return dict(options) if isinstance(options, Mapping) else dict(vars(options)) if options is not None else {}


def memory_left_free() -> int:
    """Return how many bytes of a GPU ComfyUI is told to leave free. It gives weights up for them."""
    options = start_options()
    return int(2**30 * sum(float(options.get(name) or 0) for name in ("vram_headroom", "reserve_vram")))


def set_start_options(values: Mapping[str, Any]) -> None:
    """Make ComfyUI, in a process of our own, what it is with these options."""
    options = find("comfy.cli_args.args")
    for name, value in values.items() if options is not None else ():
        if isinstance(options, Mapping):
            options[name] = value
        else:
            setattr(options, name, value)


def user_directory() -> str | None:
    """Return ComfyUI's user folder; None for versions that have none."""
    get = find("folder_paths.get_user_directory")
    return get() if get else None


def models_directory() -> str | None:
    """Return ComfyUI's folder of models."""
    return find("folder_paths.models_dir")


def extension_folders() -> list[str]:
    """Return the folders that hold ComfyUI's extensions."""
    get = find("folder_paths.get_folder_paths")
    return list(get("custom_nodes")) if get else []


def compute_dtype(patcher: Any) -> torch.dtype | None:
    """Return what a model computes in, as the Model Compute Dtype node may have set it; None for its weights' dtype."""
    own = getattr(patcher.model, COMPUTE_DTYPE, None)
    return getattr(patcher, "object_patches", {}).get(COMPUTE_DTYPE, own)


def is_streamed(patcher: Any) -> bool:
    """Whether a patcher leaves weights in their files and brings each layer's to the GPU when it runs (0.18 on)."""
    return bool(getattr(patcher, "is_dynamic", bool)())


def streams_weights() -> bool:
    """Whether patchers of this process may do so."""
    return bool(find(f"{MEMORY}.aimdo_enabled"))


def can_stream() -> bool:
    """Whether this ComfyUI has all functions by which streamed weights can be brought for a graph."""
    names = ("cast_modules_with_vbar", "resolve_cast_module_with_vbar")
    needs = [*(f"comfy.ops.{name}" for name in names), "comfy.model_prefetch.cleanup_prefetched_modules"]
    needs += [f"{VBAR}.{name}" for name in ("vbar_fault", "vbar_unpin", "vbar_signature_compare")]
    return all(find(name) is not None for name in needs)


def has_streams(device: torch.device) -> bool:
    """Whether work is launched over streams: on an NVIDIA or AMD GPU."""
    return device.type == "cuda"


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return the stream on which this thread launches; None for a device without any."""
    return torch.cuda.current_stream(device) if has_streams(device) else None


def wait_for_stream(device: torch.device, stream: Any) -> None:
    """Have what is launched on a device from now on wait for another stream."""
    current = current_stream(device)
    if stream is not None and current is not None:
        current.wait_stream(stream)


def hold_back_offload_streams(device: torch.device) -> None:
    """Have ComfyUI's streams for weights wait for all that has been launched on a device.

    `get_offload_stream` makes its stream wait for what was launched before the previous cast. That is enough where each
    layer casts its weights. A replayed CUDA graph casts none, and may still read what the next cast overwrites.
    """
    streams, current = find(f"{MANAGEMENT}.STREAMS"), current_stream(device)
    if current is None:
        return
    if streams is None:
        current.synchronize()
        return
    for stream in streams.get(device, ()):
        stream.wait_stream(current)


def join_offload_streams(device: torch.device) -> None:
    """Have ComfyUI's streams for weights, and what is launched on a device from now on, wait for each other.

    After an error: copies that were begun may still be under way, over a stream that nobody has waited for.
    """
    for stream in (find(f"{MANAGEMENT}.STREAMS") or {}).get(device, ()):
        wait_for_stream(device, stream)
    hold_back_offload_streams(device)


def finish_offload_streams(device: torch.device) -> None:
    """Have the CPU wait for all that ComfyUI has launched over its streams for weights."""
    for stream in (find(f"{MANAGEMENT}.STREAMS") or {}).get(device, ()):
        stream.synchronize()


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Launch what follows over one of ComfyUI's streams, or where it is launched anyway if that is None."""
    return nullcontext() if stream is None else getattr(stream, "as_context", torch.cuda.stream)(stream)


def can_bring_ahead() -> bool:
    """Whether weights can come over a stream of their own.

    Not while a network brings its blocks' weights itself: it would fault a block a second time, and unpin it once.
    """
    return bool(find(f"{MANAGEMENT}.stream_counters")) and not find(PREFETCH_QUEUES)


def has_ram_to_pin(size: int) -> bool:
    """Whether there is RAM for so many bytes of pinned memory, and twice what ComfyUI wants to keep free.

    See `ensure_pin_budget` and `ensure_pin_registerable`. Windows may refuse to pin memory that there is.
    """
    used, most = find(f"{MANAGEMENT}.TOTAL_PINNED_MEMORY"), find(f"{MANAGEMENT}.MAX_PINNED_MEMORY")
    if used is None or most is None or used + size > most or os.name == "nt":
        return False
    import psutil  # ComfyUI needs it

    spare = max(find(f"{MEMORY}.RAM_CACHE_HEADROOM") or 0, 4 * 2**30)
    return psutil.virtual_memory().available > size + spare


def pinned_bytes(layer: nn.Module, subsets: Iterable[str]) -> torch.Tensor | None:
    """Return the bytes of a layer's weights in pinned memory, or None if they are not there."""
    get = find("comfy.pinned_memory.get_pin")
    if get is None or not _has_parameter(get, "subset") or not find(f"{MEMORY}.interpret_gathered_like"):
        return None
    return next((pin for subset in subsets if (pin := get(layer, subset=subset)) is not None), None)


@lru_cache(maxsize=4)
def _has_parameter(function: Callable, name: str) -> bool:
    """Whether a function takes an argument of this name. It is remembered, so it must not be a method of an object."""
    return name in inspect.signature(function).parameters


def announces_samplings(patcher: Any = None) -> bool:
    """Whether ComfyUI (since 2025) says when a sampling of a patcher begins and ends; without one, of its own patchers.

    Worker processes ask, too. So this does not import `comfy.model_patcher`: all text encoders come with it, which took
    each of eight processes 6 s.
    """
    methods = () if patcher is None else ("add_callback_with_key", "remove_callbacks_with_key")
    return None not in _moments() and all(hasattr(patcher, name) for name in methods)


@contextmanager
def without_allocation_scopes() -> Iterator[None]:
    """Keep networks from opening a scope for allocations, on any thread, while this lasts."""
    options = find("comfy.cli_args.args")
    if not hasattr(options, NO_SCOPES):
        yield
        return
    with _scopes_lock:
        _scopes_off.append(_scopes_off[0] if _scopes_off else getattr(options, NO_SCOPES))
        setattr(options, NO_SCOPES, True)
    try:
        yield
    finally:
        with _scopes_lock:
            before = _scopes_off.pop()
            if not _scopes_off:
                setattr(options, NO_SCOPES, before)


def call_after_clone(patcher: Any, key: str, function: Callable[[Any, Any], None]) -> None:
    """Have a function called with a patcher and each clone that is made of it, if this ComfyUI says so (2025 on)."""
    moment = getattr(find("comfy.patcher_extension.CallbacksMP"), _AFTER_CLONE, None)
    if moment is not None and hasattr(patcher, "add_callback_with_key"):
        patcher.add_callback_with_key(moment, key, function)


def announces_copies() -> bool:
    """Whether ComfyUI (0.33 on) says when it has made a copy of a patcher for another device."""
    names = find("comfy.patcher_extension.CallbacksMP")
    return all(hasattr(names, name) for name in _FOR_COPIES)


def call_for_copies(patcher: Any, key: str, function: Callable[[Any, Any], None]) -> None:
    """Have a function called with a patcher and each copy of it for another device, if this ComfyUI says so."""
    if announces_copies() and hasattr(patcher, "add_callback_with_key"):
        for name in _FOR_COPIES:
            moment = getattr(find("comfy.patcher_extension.CallbacksMP"), name)
            patcher.add_callback_with_key(moment, key, function)


def copies_of(patcher: Any) -> list[Any]:
    """Return the copies of a patcher that run beside it on other devices."""
    return list(getattr(patcher, "get_additional_models_with_key", lambda key: ())("multigpu"))


def call_around_samplings(patcher: Any, key: str, begin: Callable | None, end: Callable | None) -> None:
    """Have functions called with the patcher when a sampling begins and ends. Needs `announces_samplings`."""
    for moment, function in zip(_moments(), (begin, end)):
        if function is not None:
            patcher.add_callback_with_key(moment, key, function)


def wraps_calls(patcher: Any) -> bool:
    """Whether other code runs around each call of the model. It may change the network in some steps only."""
    wrapper = patcher.model_options.get(FUNCTION_WRAPPER)
    while getattr(wrapper, "keeps_network", False):
        wrapper = wrapper.inner
    options = patcher.model_options.get(OPTIONS, {})
    groups = getattr(patcher, "wrappers", {}), options.get(WRAPPERS, {})
    return wrapper is not None or any(any(group.get(kind, {}).values()) for group in groups for kind in _AROUND_CALLS)


def wraps_samplings(patcher: Any) -> bool:
    """Whether a function can be put around a patcher's samplings, before its weights are loaded (2025 on)."""
    has_methods = all(hasattr(patcher, name) for name in ("add_wrapper_with_key", "remove_wrappers_with_key"))
    return has_methods and _outermost() is not None and announces_samplings(patcher)


def wrap_samplings(patcher: Any, key: str, function: Callable, unloaded: Callable[[], None]) -> None:
    """Put a function around each sampling of a patcher; call another one when ComfyUI has unloaded its weights.

    The first is called with what samples, whose `class_obj` is the guider, and with arguments for it. Needs
    `wraps_samplings`.
    """
    patcher.add_wrapper_with_key(_outermost(), key, function)
    moment = getattr(find("comfy.patcher_extension.CallbacksMP"), _AFTER_UNLOADING, None)
    if moment is not None:
        # A patcher that is freed, or makes way for a clone, leaves the weights where they are.
        patcher.add_callback_with_key(moment, key, lambda patcher, everything: everything and unloaded())


def forget_callbacks(patcher: Any, key: str) -> None:
    """Take out the functions that were added with a key."""
    names = find("comfy.patcher_extension.CallbacksMP")
    others = [getattr(names, name, None) for name in (_AFTER_CLONE, _AFTER_UNLOADING, *_FOR_COPIES)]
    for moment in (*_moments(), *others) if hasattr(patcher, "remove_callbacks_with_key") else ():
        if moment is not None:
            patcher.remove_callbacks_with_key(moment, key)
    if hasattr(patcher, "remove_wrappers_with_key") and _outermost() is not None:
        patcher.remove_wrappers_with_key(_outermost(), key)


def _outermost() -> str | None:
    return getattr(find("comfy.patcher_extension.WrappersMP"), _AROUND_SAMPLING, None)


def free_memory(device: torch.device, size: int) -> None:
    """Have ComfyUI make room for so many bytes."""
    if free := find(f"{MANAGEMENT}.free_memory"):
        free(size, device)


def merged_weight(patcher: Any, key: str, device: torch.device) -> torch.Tensor | None:
    """Return a weight with a patcher's patches in it, rounded as ComfyUI rounds it; the patcher keeps its own.

    None for a ComfyUI (such as 0.3.64) that only puts it into the model.
    """
    merge = patcher.patch_weight_to_device
    if not _has_parameter(getattr(merge, "__func__", merge), "return_weight"):
        return None
    return merge(key, device_to=device, return_weight=True)


def _moments() -> tuple[str | None, str | None]:
    names = find("comfy.patcher_extension.CallbacksMP")
    return getattr(names, _BEFORE_SAMPLING, None), getattr(names, _AFTER_SAMPLING, None)


def take_torch_compile_out(patcher: Any) -> bool:
    """Take out how core's TorchCompileModel has a model compiled, since 2025; return whether it was there.

    It adds a wrapper with a key (`comfy_api.torch_helpers`).
    """
    wrappers = getattr(patcher, "wrappers", {}).get("apply_model", {})
    patcher.model_options.pop("torch_compile_kwargs", None)
    return bool(wrappers.pop("torch.compile", None))


def chooses_by_size(layer: nn.Module) -> bool:
    """Whether a layer of scaled float8 multiplies its scale with what is smaller, weight or input."""
    function = getattr(type(layer), FP8_FORWARD, None)
    if getattr(layer, FP8_SCALE, None) is None or not inspect.isfunction(function):
        return False
    return inspect.getclosurevars(function).nonlocals.get(FP8_PRODUCTS) is False
