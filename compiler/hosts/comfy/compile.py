"""Compiled regions in ComfyUI's objects.

Everything goes through ComfyUI's own means: a clone of the ModelPatcher, and an object patch on the method
by which ComfyUI enters the network. State-dict keys, LoRA keys, other clones and the original stay as they
are, and ComfyUI takes the patch out again when it unloads the clone.
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

import comfy.model_management
import comfy.model_patcher
import comfy.utils

from ...arrangement import Arrangement
from ...attention import opaque_attention, opaque_map_attention, register_operator
from ...backends import choose_backend
from ...backends.base import Backend
from ...background import Background
from ...entrance import CodingEntrance, Entrance
from ...fingerprint import fingerprint, is_outside
from ...graph import CompiledGraph, GraphIdentity
from ...graph_file import StoredGraph
from ...host import Host
from ...libraries import load_libraries
from ...model import CannotCallAhead, CompiledModel, Progress, Summary
from ...options import TracedOptions, fresh
from ...patches import PatchCall
from ...probe import ModelCall
from ...recordings import Recordings, recordable
from ...region import Region, find_regions, is_torch_compiled
from ...registry import Registry
from ...sampling import Announced
from ...source import functions_in
from ...store import StoreError, open_store
from ...workers import Workers
from . import attention_patches, deep_cache, synthetic_calls, worker_setup
from .progress import ProgressReport, log_progress
from .scaled_fp8 import multiply_weights

log = logging.getLogger(__name__)

_OVERRIDE = "optimized_attention_override"
_OURS = frozenset({"entrance.Entrance", "entrance.CodingEntrance"})

# What a block may look up to hand it on. Tracing sees to it that the block does no more with it.
_BOOKKEEPING = attention_patches.PLACES | {"patches", "patches_replace"}

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
        "_full_precision_mm",
    }
)

_CALLBACKS_KEY = "compiled_graphs"
_UNET_MODULES = ("comfy.ldm.modules.diffusionmodules.openaimodel", "comfy.ldm.modules.attention")


class ComfyHost(Host):
    """ComfyUI from mid-2024 on."""

    context_arguments = frozenset({"transformer_options"})
    weight_hooks = frozenset({"weight_function", "bias_function", "weight_lowvram_function", "bias_lowvram_function"})
    volatile_attributes = weight_hooks | {
        "last_z_shape",  # a VAE's decoder of 2024 notes what it was last called with
        # `ModelPatcher.load` marks the layers of extensions, too.
        "comfy_cast_weights",
        "prev_comfy_cast_weights",
        "comfy_patched_weights",
        "comfy_force_cast_weights",
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
        return name in self.volatile_attributes or name.endswith("_comfy_model_dtype")

    def layer_settings(self, module: nn.Module) -> frozenset[str] | None:
        """What layers of `comfy.ops` were built with, by torch's own lists and those of layers that torch lacks."""
        cls = type(module)
        if cls.__module__ != "comfy.ops" or _has_code_of_others(module):
            return None
        return _LAYER_SETTINGS.union(*(vars(base).get("__constants__", ()) for base in cls.__mro__))

    def arranges(self, region: nn.Module) -> bool:
        """Blocks of UNets, on a core that says when a sampling begins and ends (2025)."""
        is_of_unet = type(region).__module__ in _UNET_MODULES
        return is_of_unet and hasattr(comfy.model_patcher.ModelPatcher, "add_callback_with_key")

    def stand_in(self, name: str, strings: frozenset[str], hooks: str) -> TracedOptions:
        """Options with operators for patches; where the core offers the hook, attention becomes one, too."""
        own = {_OVERRIDE: opaque_attention} if _OVERRIDE in strings else {}
        return attention_patches.traced_options(own, hooks)

    def hooks(self, context: Mapping[str, Any], strings: frozenset[str]) -> str:
        return attention_patches.hooks_of(context.get("transformer_options") or {}, strings)

    def patch_call(self, context: Mapping[str, Any]) -> PatchCall:
        return attention_patches.PatchCalls(context["transformer_options"])

    def record_patches(self, context: Mapping[str, Any], hooks: str) -> attention_patches.RecordedPatches:
        return attention_patches.RecordedPatches(context["transformer_options"], hooks)

    def leave_behind(self, context: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        options = context.get("transformer_options")
        if options is not None:
            options.update({name: fresh(value) for name, value in values.items()})

    def patch_names(self, context: Mapping[str, Any], hooks: str) -> frozenset[str]:
        return attention_patches.patch_names(context["transformer_options"], hooks)

    def adapt(self, twin: nn.Module) -> None:
        """A VAE's attention chooses its function when it is built, and some of those look at free memory."""
        for module in twin.modules():
            if function := module.__dict__.get("optimized_attention"):
                module.__dict__["optimized_attention"] = opaque_map_attention(function)
        multiply_weights(twin)

    def reaches(self, context: Mapping[str, Any], strings: frozenset[str]) -> str | None:
        """A patch reaches into a region if the region's code can look it up, for the block it is in."""
        options = context.get("transformer_options") or {}
        operators = attention_patches.HOOKS if attention_patches.can_be_operators(strings) else frozenset()
        for name, patches in options.get("patches", {}).items():
            if patches and name in strings and name not in operators:
                return f"patch {name}"
        for name, blocks in options.get("patches_replace", {}).items():
            if name in strings and name not in operators and _covers(blocks, options.get("block")):
                return f"replacement patch {name}"
        for name in options:
            if name in strings and name not in _BOOKKEEPING:
                return f"transformer option {name}"
        return None

    def unrepeatable(self, context: Mapping[str, Any], strings: frozenset[str]) -> str | None:
        """A step that no patch, wrapper or option that the network looks up can change."""
        options = context.get("transformer_options") or {}
        if self.steps(context) < 1:
            return "a call outside of a sampling"
        if deep_cache.MARK in options:
            return "DeepCache, whose steps are not alike"
        if any(options.get("patches", {}).values()) or any(options.get("patches_replace", {}).values()):
            return "a patch"
        if any(options.get("wrappers", {}).get("diffusion_model", {}).values()):
            return "a wrapper of the network"
        return self.reaches(context, strings)

    def steps(self, context: Mapping[str, Any]) -> int:
        sigmas = (context.get("transformer_options") or {}).get("sample_sigmas")
        return 0 if sigmas is None else len(sigmas) - 1

    def check_cancelled(self) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()

    def is_cancellation(self, error: BaseException) -> bool:
        return isinstance(error, comfy.model_management.InterruptProcessingException)

    def give_back_cancellation(self) -> None:
        comfy.model_management.interrupt_current_processing(True)

    def is_cancelled(self) -> bool:
        return comfy.model_management.processing_interrupted()


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
    return home.partition(".")[0] == "comfy" or is_outside(home, HOST)


HOST = ComfyHost()


_registry_lock = threading.Lock()


def registry() -> Registry:
    """Return this ComfyUI's registry, with graphs kept in its user folder.

    The environment variable COMPILED_GRAPHS_STORE names another folder, or an fsspec URL.
    """
    with _registry_lock:  # a node and a request over HTTP may both be the first to ask
        return _only_registry()


@lru_cache(maxsize=1)
def _only_registry() -> Registry:
    try:
        store = open_store(os.environ.get("COMPILED_GRAPHS_STORE") or _default_folder())
    except StoreError as error:
        log.warning("Compiled graphs go to ComfyUI's user folder, not where COMPILED_GRAPHS_STORE says: %s", error)
        store = open_store(_default_folder())
    return Registry(store, workers=Workers(worker_setup.setup, HOST))


def _default_folder() -> str:
    import folder_paths

    if hasattr(folder_paths, "get_user_directory"):
        return os.path.join(folder_paths.get_user_directory(), "compiled_graphs")
    return os.path.join(folder_paths.models_dir, "compiled_graphs", "store")


@dataclass(frozen=True)
class Request:
    """What a node wants of the object it is given."""

    backend: str = "auto"
    verify: bool = True
    node_id: str = ""
    workflow: Callable[[], str] = lambda: ""
    """Asked whenever the object runs: ComfyUI may hand one node's output to another workflow."""
    on_change: Callable[[str], None] = lambda text: None
    """Told when a later prompt compiles more, or a graph is retired."""
    on_progress: Callable[[str], None] = lambda text: None
    """Told in words how far compiling is, while the node runs."""
    graphs: Sequence[StoredGraph] = ()
    """From a file. They serve the regions they were made for; only what they leave is looked for elsewhere."""
    listed: Sequence[GraphIdentity] = ()
    """From a file whose graphs cannot be loaded: compiled here, at once."""
    source: str = ""
    """What people call the file."""
    background: bool = False
    """Whether to compile while the model runs, block by block, and not before."""
    record: bool = True
    """Whether steps that repeat may be replayed as CUDA graphs."""


def warm_up(backend: str = "auto") -> None:
    """Begin, in a thread, what the first compile, load and step of this process need to have in it: 2 to 6 seconds."""
    if backend not in _WARMED:
        _WARMED.add(backend)
        threading.Thread(target=_warm_up, args=(backend,), name=f"warm up {backend}", daemon=True).start()


_WARMED: set[str] = set()


def _warm_up(backend: str) -> None:
    device = comfy.model_management.get_torch_device()
    chosen, _ = choose_backend(backend, device)
    if chosen is None:
        return
    home = registry()
    if home.workers is not None and home.workers.count > 1 and home.store is not None and not home.store.keys():
        home.workers.start(chosen.name, device)  # nothing was ever compiled here, so something will be now
    register_operator()
    chosen.warm_up()
    load_libraries(device)


def compile_model(patcher: Any, request: Request = Request()) -> tuple[Any, str]:
    """Return a clone of a ModelPatcher whose regions run compiled, and what to tell the person.

    The clone shares the model and its weights with the original. If nothing can be compiled here the
    original comes back, with the reason and the remedy. Raises only what ComfyUI raises to cancel a prompt.
    """
    clone = _clone(patcher)
    network = getattr(clone.model, "diffusion_model", None)
    if network is None:
        return patcher, f"not compiled: {type(clone.model).__name__} has no diffusion model"
    kind = _network_kind(clone.model)
    call = synthetic_calls.SamplingCall(clone, HOST)
    text = _install(clone, network, "diffusion_model.", {"forward": call}, patcher.load_device, kind, request)
    return (clone if graphs_in_use(clone) is not None else patcher), text


def compile_vae(vae: Any, request: Request = Request(), encode: bool | None = False) -> tuple[Any, str]:
    """Return a copy of a `comfy.sd.VAE` whose regions run compiled, and what to tell the person.

    The copy shares the network and its weights with the original, which is never touched, and has a
    patcher of its own. The decoder is compiled, and the encoder too with `encode`; None means: if the
    request's graphs have it. Otherwise as `compile_model`.
    """
    network = vae.first_stage_model
    if network is None:
        return vae, "not compiled: the checkpoint has no VAE"
    if encode is None:
        encode = _lists_encoder(network, [*request.graphs, *request.listed])
    twin = copy.copy(vae)
    twin.patcher = _clone(vae.patcher)
    methods = ("decode", "encode") if encode else ("decode",)
    calls = {method: synthetic_calls.coding_call(vae, method) for method in methods}
    text = _install(twin.patcher, network, "", calls, vae.device, "VAE", request)
    return (twin if graphs_in_use(twin.patcher) is not None else vae), text


def compile_control_net(control_net: Any, request: Request = Request()) -> tuple[Any, str]:
    """Return a copy of a `comfy.controlnet.ControlNet` whose regions run compiled, and what to tell the person.

    The copy shares the network and its weights with the original, which is never touched, and has a patcher
    of its own. Otherwise as `compile_model`.
    """
    patcher = getattr(control_net, "control_model_wrapped", None)
    if patcher is None:
        return control_net, f"not compiled: {_no_network_text(control_net)}"
    twin = control_net.copy()
    twin.previous_controlnet = control_net.previous_controlnet
    twin.control_model_wrapped = _clone(patcher)
    calls = {"forward": synthetic_calls.control_call(control_net)}
    network, device = control_net.control_model, patcher.load_device
    text = _install(twin.control_model_wrapped, network, "", calls, device, "ControlNet", request)
    return (twin if graphs_in_use(twin.control_model_wrapped) is not None else control_net), text


def _no_network_text(control_net: Any) -> str:
    name = type(control_net).__name__
    if hasattr(control_net, "control_weights"):
        return f"a {name} is made anew from the model's own weights for every image"
    return f"a {name} runs once per image, and there is nothing to gain"


def patcher_of(thing: Any) -> Any:
    """Return the ModelPatcher of a MODEL, a VAE or a CONTROL_NET; None if a CONTROL_NET has none."""
    if hasattr(thing, "get_control"):
        return getattr(thing, "control_model_wrapped", None)
    return getattr(thing, "patcher", thing)


def compiled_model(thing: Any) -> CompiledModel | None:
    """Return what a MODEL, VAE or CONTROL_NET was compiled as, or None."""
    return _compiled(patcher_of(thing))


def graphs_in_use(patcher: Any) -> list[CompiledGraph] | None:
    """Return the graphs that a compiled ModelPatcher uses so far, or None if it is not compiled."""
    compiled = _compiled(patcher)
    return None if compiled is None else compiled.graphs()


def finish(patcher: Any) -> None:
    """Wait until what a ModelPatcher compiles in the background is done. The person can cancel."""
    compiled = _compiled(patcher)
    if compiled is not None and compiled.background is not None:
        compiled.background.wait(HOST.check_cancelled)


def _compiled(patcher: Any) -> CompiledModel | None:
    patches = patcher.object_patches.values() if patcher is not None else ()
    found = (getattr(patch, "compiled", None) for patch in patches)
    return next((model for model in found if model is not None), None)


def _install(
    clone: Any,
    network: nn.Module,
    prefix: str,
    calls: Mapping[str, ModelCall],
    device: torch.device,
    kind: str,
    request: Request,
) -> str:
    """Compile a network and put the graphs into a patcher; return what to tell the person.

    `calls` are the methods by which the host enters the network, and how it would call them.
    """
    set_aside = _set_torch_compile_aside(clone)
    regions, taken = _free_regions(clone, network, prefix, calls)
    left = _left_text(taken, network, set_aside)
    chosen, reason = choose_backend(_backend_name(request, regions), device)
    if chosen is None:
        return f"not compiled: {reason}"
    if not regions:
        return f"not compiled: {type(network).__name__} has no block that can be compiled{left}"
    entrances = [
        (Entrance if method == "forward" else CodingEntrance)(
            network, method, _foreign_forward(clone, network, prefix + method, method)
        )
        for method in calls
    ]
    # What the compiled model is given must not keep them: they keep the model's forward from being tidied.
    references = [weakref.ref(entrance) for entrance in entrances]
    compiled = CompiledModel(
        network,
        regions,
        device,
        chosen,
        registry(),
        HOST,
        _current_call(references),
        request.verify,
        lambda: request.on_change(text()),
        Background(lambda: request.on_change(text()), HOST) if request.background and registry().workers else None,
    )

    def text() -> str:
        summary = compiled.summary()
        told = loaded_text(summary, request.source) if request.source else summary_text(summary)
        goes_on = compiled.background is not None and compiled.background.is_busy
        lines = [told, *refused, *(["compiling in the background"] if goes_on else []), *_recording_lines(references)]
        return "\n".join(lines) + left

    refused = compiled.load(request.graphs)
    listed = [*request.graphs, *request.listed]
    if compiled.background is None:
        report = ProgressReport(request.node_id, request.on_progress)
        report.begin()
        _compile(compiled, listed, calls, report)
    else:

        def report(progress: Progress) -> None:
            log_progress(progress)
            request.on_change(text())

        compiled.background.submit("ahead", lambda: _compile(compiled, listed, calls, report))
    forwards = compiled.forwards()
    for entrance in entrances:
        entrance.compiled = compiled
        entrance.on_call = _role(request, kind, compiled)
        if isinstance(entrance, CodingEntrance):
            entrance.on_broken = lambda line: request.on_change(f"{text()}\n{line}")
        entrance.install_while_running(forwards)
        clone.add_object_patch(prefix + entrance.method, entrance)
        _tidy_after(entrance, network, entrance.method)
    _announce_samplings(clone, entrances, prefix)
    if prefix and device.type in HOST.arranged_on and any(HOST.arranges(region.module) for region in regions):
        arrangement = Arrangement(network, device)
        clone.add_callback_with_key("on_pre_run", _CALLBACKS_KEY, lambda patcher: arrangement.begin())
        clone.add_callback_with_key("on_cleanup", _CALLBACKS_KEY, lambda patcher: arrangement.end())
    if request.record and prefix and chosen.recording is not None:
        _record_steps(clone, network, prefix, chosen, lambda: request.on_change(text()))
    entrances[0].on_call()
    return text()


def _announce_samplings(clone: Any, entrances: Sequence[Entrance], prefix: str) -> None:
    """Have a core that can (2025) say when a sampling of this patcher begins."""
    if not prefix or not hasattr(clone, "add_callback_with_key"):
        return
    for entrance in entrances:
        entrance.sampling = sampling = Announced()
        clone.add_callback_with_key("on_pre_run", _CALLBACKS_KEY, lambda patcher, own=sampling: own.begin())
        clone.add_callback_with_key("on_cleanup", _CALLBACKS_KEY, lambda patcher, own=sampling: own.end())


def _compile(
    compiled: CompiledModel,
    listed: Sequence[GraphIdentity],
    calls: Mapping[str, ModelCall],
    on_progress: Callable[[Progress], None],
) -> None:
    """Compile what a file lists and what the calls will use."""
    compiled.compile_listed(listed, on_progress)
    for method, call in calls.items() if compiled.summary().waiting else ():
        try:
            compiled.prepare(call, on_progress, method)
        except CannotCallAhead as reason:
            log.info("A model is compiled when it first runs; it cannot be called ahead of it: %s", reason)


def _record_steps(clone: Any, network: nn.Module, prefix: str, backend: Backend, tell: Callable[[], None]) -> None:
    """Let the steps of a sampling be recorded and replayed, where nobody else has a hand in the network.

    What they work in is given back when the sampling ends (`CallbacksMP.ON_CLEANUP`): ComfyUI counts it as free. A
    core without that callback (before 2025) gets none.
    """
    entrance = clone.object_patches[f"{prefix}forward"]
    compiled = entrance.compiled
    others = [name for name in clone.object_patches if name.startswith(prefix) and name != f"{prefix}forward"]
    if not hasattr(clone, "add_callback_with_key") or not recordable(compiled.device):
        return
    if entrance.inner is not None or others or not type(network).__module__.startswith("comfy."):
        return
    if any(is_torch_compiled(module) for module in network.modules()):
        return
    recordings = Recordings(network, HOST, compiled.counters, compiled.device, within=backend.recording)
    entrance.recordings = recordings
    told = [""]

    def end(patcher: Any) -> None:
        recordings.rest()
        lines = "".join(_recording_lines([weakref.ref(entrance)]))
        if lines != told[0]:
            told[0] = lines
            tell()

    clone.add_callback_with_key("on_cleanup", _CALLBACKS_KEY, end)


def _recording_lines(entrances: Iterable[weakref.ref[Entrance]]) -> list[str]:
    """Say how the steps of the last sampling were run, once there was one."""
    for entrance in _alive(entrances):
        if (recordings := entrance.recordings) is not None:
            if recordings.reason:
                return [f"steps without CUDA graphs: {recordings.reason}"]
            if entrance.compiled.counters.replays:
                return ["steps as CUDA graphs"]
    return []


def _alive(entrances: Iterable[weakref.ref[Entrance]]) -> Iterator[Entrance]:
    return (entrance for reference in entrances if (entrance := reference()))


def _current_call(entrances: Sequence[weakref.ref[Entrance]]) -> Callable[[], ModelCall | None]:
    """Return what finds the running call."""

    def find() -> ModelCall | None:
        running = next(((e.method, *call) for e in _alive(entrances) if (call := e.running_call())), None)
        return None if running is None else lambda twin, sizes: synthetic_calls.repeat(twin, *running, sizes)

    return find


def _tidy_after(patch: Callable, module: nn.Module, method: str) -> None:
    """When a patch is gone for good, take away what ComfyUI put back in its place.

    It puts back a bound method, and a module that holds its own bound method is freed only when Python next
    looks for cycles: a queue that changes checkpoints would hold two.
    """
    weakref.finalize(patch, _tidy, weakref.ref(module), method).atexit = False


def _tidy(reference: weakref.ref, method: str) -> None:
    module = reference()
    held = module.__dict__.get(method) if module is not None else None
    if held is not None and getattr(held, "__func__", None) is getattr(type(module), method):
        module.__dict__.pop(method, None)


def _role(request: Request, kind: str, compiled: CompiledModel) -> Callable[[], None]:
    """Return what to call when the model runs, so that the registry knows which workflows run it."""
    reference, home = weakref.ref(compiled), registry()

    def play() -> None:
        if model := reference():
            home.assign(request.workflow(), f"{request.node_id}:{kind}", model)

    return play


def _network_kind(model: nn.Module) -> str:
    """Return what people call a network in a workflow."""
    if type(model).__name__ == "SDXLRefiner":
        return "refiner UNet"
    return "base UNet" if type(model.diffusion_model).__name__ == "UNetModel" else "diffusion model"


def summary_text(summary: Summary) -> str:
    """Return what the node shows, such as "14 regions, 14 compiled (3 from memory), 0 eager, 12.4 s"."""
    sources = [(summary.from_memory, "memory"), (summary.from_disk, "disk")]
    found = ", ".join(f"{count} from {place}" for count, place in sources if count)
    text = f"{summary.regions} regions, {summary.compiled} compiled{f' ({found})' if found else ''}, "
    text += f"{summary.eager} eager, {summary.seconds:.1f} s"
    return _with_rest(text, summary)


def loaded_text(summary: Summary, source: str) -> str:
    """Return what Load Graph shows, such as "14 of 14 regions from sdxl_00001_, 0 compiled, 0.9 s"."""
    text = f"{summary.loaded} of {summary.regions} regions from {source}, "
    text += f"{summary.from_disk} from disk, " if summary.from_disk else ""
    text += f"{summary.compiles} compiled, {summary.seconds:.1f} s"
    return _with_rest(text, summary, [f"compiled here: {region}" for region in summary.compiled_here])


def _with_rest(text: str, summary: Summary, lines: Sequence[str] = ()) -> str:
    if summary.waiting:
        text += f"; {summary.waiting} compile when first used"
    return "\n".join([text, *lines, *(f"eager: {reason}" for reason in summary.reasons)])


def _left_text(taken: int, network: nn.Module, set_aside: bool) -> str:
    lines = [f"{taken} blocks left alone: another patch replaces their forward"] if taken else []
    if any(map(is_torch_compiled, network.modules())):
        lines.append("what torch.compile has compiled in this model already is left so")
    if set_aside:
        lines.append("torch.compile of an earlier node is set aside: this node compiles instead")
    return "".join(f"\n{line}" for line in lines)


def _set_torch_compile_aside(clone: Any) -> bool:
    """Take out what earlier nodes hung into a clone to run it, or blocks of it, by torch.compile.

    Core's TorchCompileModel adds a wrapper with a key (`comfy_api.torch_helpers`), or an object patch before
    2025; other nodes add object patches of blocks. Two compilers for one block would be neither's.
    """
    compiled = [
        n for n, patch in clone.object_patches.items() if isinstance(patch, nn.Module) and is_torch_compiled(patch)
    ]
    for name in compiled:
        del clone.object_patches[name]
    wrappers = getattr(clone, "wrappers", {}).get("apply_model", {})
    wrapper = wrappers.pop("torch.compile", None)
    clone.model_options.pop("torch_compile_kwargs", None)
    return bool(compiled or wrapper)


def _clone(patcher: Any) -> Any:
    """Return a clone without what an earlier node of ours put into the patcher: the later node decides."""
    # Newer cores stream weights behind a model's back unless a clone asks them not to.
    options = {"disable_dynamic": True} if "disable_dynamic" in inspect.signature(patcher.clone).parameters else {}
    clone = patcher.clone(**options)
    clone.model_options = _own_containers(patcher.model_options)
    if hasattr(clone, "remove_callbacks_with_key"):
        for when in ("on_pre_run", "on_cleanup"):
            clone.remove_callbacks_with_key(when, _CALLBACKS_KEY)
    for name, patch in list(clone.object_patches.items()):
        if _is_ours(patch):
            del clone.object_patches[name]
            if patch.inner is not None:
                clone.object_patches[name] = patch.inner
    return clone


def _own_containers(options: Any) -> Any:
    """Copy a patcher's options as newer cores do: other extensions' objects in them are not copied.

    Cores of 2025 copy wrappers and patches with what they remember, and a node that resets its own reaches no copy.
    """
    if type(options) is dict:
        return {name: _own_containers(value) for name, value in options.items()}
    if type(options) is list:
        return [_own_containers(value) for value in options]
    return options


def _is_ours(forward: Any) -> bool:
    """By name, for there may be two copies of this extension."""
    cls = type(forward)
    return f"{cls.__module__.rpartition('.compiler.')[2]}.{cls.__qualname__}" in _OURS


def _free_regions(clone: Any, network: nn.Module, prefix: str, methods: Iterable[str]) -> tuple[list[Region], int]:
    """Return the regions whose `forward` nobody else replaces, and how many somebody does."""
    regions = [region for region in find_regions(network) if region.path and _is_reached(region, methods)]
    free = [r for r in regions if _foreign_forward(clone, r.module, f"{prefix}{r.path}.forward", "forward") is None]
    return free, len(regions) - len(free)


def _is_reached(region: Region, methods: Iterable[str]) -> bool:
    """A VAE's two halves are told apart by name: "decoder", "taesd_encoder", "first_stage.encoder" ..."""
    unwanted = {"decode", "encode"} - set(methods)
    return len(unwanted) != 1 or f"{unwanted.pop()}r" not in region.path


def _backend_name(request: Request, regions: Iterable[Region]) -> str:
    """Return the backend that a file's graphs for these regions have, or the one that was asked for."""
    backends = {graph.fingerprint: graph.backend for graph in request.graphs}
    for region in regions if backends else ():
        if found := backends.get(_fingerprint(region)):
            return found
    return request.backend


def _lists_encoder(network: nn.Module, listed: Sequence[GraphIdentity]) -> bool:
    regions = find_regions(network) if listed else []
    decoder, encoder = ({_fingerprint(r) for r in regions if _is_reached(r, (m,))} for m in ("decode", "encode"))
    return not (encoder - decoder).isdisjoint(identity.fingerprint for identity in listed)


def _fingerprint(region: Region) -> str:
    try:
        return fingerprint(region.module, HOST)
    except Exception:  # a block can hold anything, and anything can refuse to be looked at
        return ""


def _foreign_forward(clone: Any, module: nn.Module, name: str, method: str) -> Callable | None:
    """Return what another extension has put in the place of a module's method, as a patch or directly.

    `get_model_object` looks past the patches of another clone that is loaded just now. Of an earlier Compile
    Model, only what it found there counts; the later node decides.
    """
    found = clone.get_model_object(name)
    if _is_ours(found):
        return found.inner
    return None if getattr(found, "__func__", None) is getattr(type(module), method) else found
