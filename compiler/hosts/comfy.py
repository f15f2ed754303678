"""Compiled regions in ComfyUI's objects.

Everything goes through ComfyUI's own means: a clone of the ModelPatcher, and object patches on the
`forward` of each region. State-dict keys, LoRA keys, other clones and the original stay as they are, and
ComfyUI takes the patches out again when it unloads the clone.
"""

from __future__ import annotations

import inspect
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import comfy.model_management
import comfy.utils
import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..attention import opaque_attention
from ..backends import choose_backend
from ..graph import CompiledGraph
from ..graph_file import StoredGraph
from ..host import Host
from ..model import CannotCallAhead, CompiledModel, Progress, Summary
from ..probe import ModelCall, Sizes
from ..region import Region, find_regions
from ..registry import Registry
from ..skeleton import skeleton
from ..store import FolderStore

log = logging.getLogger(__name__)

_OVERRIDE = "optimized_attention_override"

# What blocks look up only to hand it to patches, or to say where they are.
_BOOKKEEPING = frozenset(
    {"block", "block_index", "activations_shape", "original_shape", "transformer_index", "patches", "patches_replace"}
)


class ComfyHost(Host):
    """ComfyUI from mid-2024 on."""

    context_arguments = frozenset({"transformer_options"})
    weight_hooks = frozenset({"weight_function", "bias_function", "weight_lowvram_function", "bias_lowvram_function"})
    volatile_attributes = weight_hooks | {"comfy_cast_weights", "prev_comfy_cast_weights", "comfy_patched_weights"}
    infrastructure = (
        "comfy.model_management",
        "comfy.cli_args",
        "comfy.cli_args_types",
        "comfy.utils",
        "comfy.patcher_extension",
        "comfy.execution_context",
        "comfy.memory_management",
    )

    def stand_in(self, name: str, literals: frozenset[str]) -> dict[str, Any]:
        """Options without patches; where the core offers the hook, attention becomes an operator."""
        return {_OVERRIDE: opaque_attention} if _OVERRIDE in literals else {}

    def reaches(self, context: Mapping[str, Any], literals: frozenset[str]) -> str | None:
        """A patch reaches into a region if the region's code can look it up, for the block it is in."""
        options = context.get("transformer_options") or {}
        for name, patches in options.get("patches", {}).items():
            if patches and name in literals:
                return f"patch {name}"
        for name, blocks in options.get("patches_replace", {}).items():
            if name in literals and _covers(blocks, options.get("block")):
                return f"replacement patch {name}"
        for name in options:
            if name in literals and name not in _BOOKKEEPING:
                return f"transformer option {name}"
        return None

    def check_cancelled(self) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()


def _covers(blocks: Mapping[tuple, Any], block: tuple | None) -> bool:
    """Replacement patches name (place, number) or (place, number, transformer)."""
    return any(block is None or tuple(key[:2]) == tuple(block[:2]) for key in blocks)


HOST = ComfyHost()


@lru_cache(maxsize=1)
def registry() -> Registry:
    """Return this ComfyUI's registry, with graphs kept in its user folder.

    The environment variable COMPILED_GRAPHS_STORE names another folder.
    """
    return Registry(store=FolderStore(os.environ.get("COMPILED_GRAPHS_STORE") or _default_folder()))


def _default_folder() -> str:
    import folder_paths

    if hasattr(folder_paths, "get_user_directory"):
        return os.path.join(folder_paths.get_user_directory(), "compiled_graphs")
    return os.path.join(folder_paths.models_dir, "compiled_graphs", "store")


def compile_model(
    patcher: Any,
    backend: str = "auto",
    verify: bool = True,
    workflow: str = "",
    node_id: str = "",
    on_change: Callable[[str], None] = lambda text: None,
    graphs: Sequence[StoredGraph] = (),
    source: str = "",
) -> tuple[Any, str]:
    """Return a clone of a ModelPatcher whose regions run compiled, and what to tell the person.

    The clone shares the model and its weights with the original. If nothing can be compiled here the
    original comes back, with the reason and the remedy. `on_change` is told when a later prompt compiles
    more or a graph is retired. `graphs`, from a file that people know as `source`, serve the regions they
    were made for; only what they leave is looked for elsewhere. Raises only what ComfyUI raises to cancel
    a prompt.
    """
    device = patcher.load_device
    chosen, reason = choose_backend(backend, device)
    if chosen is None:
        return patcher, f"not compiled: {reason}"
    clone = _clone(patcher)
    network = getattr(clone.model, "diffusion_model", None)
    if network is None:
        return patcher, f"not compiled: {type(clone.model).__name__} has no diffusion model"
    regions, taken = _free_regions(clone, network)
    if not regions:
        return patcher, f"not compiled: {type(network).__name__} has no block that repeats{_taken_text(taken)}"
    model_forward = _ModelForward(network, _foreign_forward(clone, network, "diffusion_model.forward"))
    compiled = CompiledModel(
        network,
        regions,
        device,
        chosen,
        registry(),
        HOST,
        model_forward.current_call,
        verify,
        lambda: on_change(_text()),
    )

    def _text() -> str:
        summary = compiled.summary()
        text = loaded_text(summary, source) if source else summary_text(summary)
        return "\n".join([text, *refused]) + _taken_text(taken)

    refused = compiled.load(graphs) if graphs else []
    if compiled.summary().waiting:
        try:
            compiled.prepare(_synthetic_call(clone), _progress(node_id))
        except CannotCallAhead as reason:
            name = type(network).__name__
            log.info("%s is compiled at its first step; it cannot be called ahead of it: %s", name, reason)
    model_forward.compiled = compiled
    clone.add_object_patch("diffusion_model.forward", model_forward)
    for path, forward in compiled.forwards().items():
        clone.add_object_patch(f"diffusion_model.{path}.forward", forward)
    registry().assign(workflow, f"{node_id}:model", compiled)
    return clone, _text()


def summary_text(summary: Summary) -> str:
    """Return what the node shows, such as "14 regions, 14 compiled (3 from memory), 0 eager, 12.4 s"."""
    sources = [(summary.from_memory, "memory"), (summary.from_disk, "disk")]
    found = ", ".join(f"{count} from {place}" for count, place in sources if count)
    text = f"{summary.regions} regions, {summary.compiled} compiled{f' ({found})' if found else ''}, "
    text += f"{summary.eager} eager, {summary.seconds:.1f} s"
    if summary.waiting:
        text += f"; {summary.waiting} compile when first used"
    return "\n".join([text, *(f"eager: {reason}" for reason in summary.reasons)])


def loaded_text(summary: Summary, source: str) -> str:
    """Return what Load Graph shows, such as "14 of 14 regions from sdxl_00001_, 0 compiled, 0.9 s"."""
    served = summary.from_file + summary.from_memory
    text = f"{min(served, summary.regions)} of {summary.regions} regions from {source}, "
    text += f"{summary.compiles} compiled, {summary.seconds:.1f} s"
    if summary.waiting:
        text += f"; {summary.waiting} compile when first used"
    return "\n".join([text, *(f"eager: {reason}" for reason in summary.reasons)])


def graphs_in_use(patcher: Any) -> list[CompiledGraph]:
    """Return the graphs that a compiled ModelPatcher uses; nothing if it is not compiled."""
    patch = patcher.object_patches.get("diffusion_model.forward")
    compiled = getattr(patch, "compiled", None)
    return compiled.graphs() if compiled else []


def _taken_text(taken: int) -> str:
    return f"\n{taken} blocks left alone: another patch replaces their forward" if taken else ""


def _clone(patcher: Any) -> Any:
    """Newer cores stream weights behind a model's back unless a clone asks them not to."""
    if "disable_dynamic" in inspect.signature(patcher.clone).parameters:
        return patcher.clone(disable_dynamic=True)
    return patcher.clone()


def _free_regions(clone: Any, network: nn.Module) -> tuple[list[Region], int]:
    """Return the regions whose `forward` nobody else replaces, and how many somebody does."""
    regions = find_regions(network)
    free = [region for region in regions if _is_free(clone, region)]
    return free, len(regions) - len(free)


def _is_free(clone: Any, region: Region) -> bool:
    name = f"diffusion_model.{region.path}.forward"
    return _foreign_forward(clone, region.module, name) is None


def _foreign_forward(clone: Any, module: nn.Module, name: str) -> Callable | None:
    """Return what another extension has put in the place of a module's `forward`, as a patch or directly.

    `get_model_object` looks past the patches of another clone that is loaded just now. Of an earlier Compile
    Model, only what it found there counts; the later node decides.
    """
    forward = clone.get_model_object(name)
    if type(forward).__name__ in ("RegionForward", "_ModelForward"):
        return forward.inner
    return None if getattr(forward, "__func__", None) is type(module).forward else forward


def _progress(node_id: str) -> Callable[[Progress], None]:
    takes_node = "node_id" in inspect.signature(comfy.utils.ProgressBar).parameters and node_id
    bars: list[Any] = []

    def report(progress: Progress) -> None:
        if not bars:
            options = {"node_id": node_id} if takes_node else {}
            bars.append(comfy.utils.ProgressBar(progress.total, **options))
        bars[0].update_absolute(progress.done, progress.total)
        log.info(
            "[%d/%d] %s: %s, %.1f s", progress.done, progress.total, progress.region, progress.source, progress.seconds
        )

    return report


class _ModelForward:
    """Takes the place of the network's `forward` to know, inside a region, which call is running."""

    def __init__(self, network: nn.Module, inner: Callable | None) -> None:
        self._network = weakref.ref(network)
        self._cls = type(network)
        self.inner = inner
        self.compiled: CompiledModel | None = None
        """What it was installed with, for those who hold only the patcher."""
        self._running = threading.local()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outer = getattr(self._running, "call", None)
        self._running.call = (args, kwargs)
        try:
            if self.inner is not None:
                return self.inner(*args, **kwargs)
            return self._cls.forward(self._network(), *args, **kwargs)
        finally:
            self._running.call = outer

    def current_call(self) -> ModelCall | None:
        """Return the running call as one that can be repeated at other sizes."""
        call = getattr(self._running, "call", None)
        return None if call is None else lambda twin, sizes: _repeat(twin, *call, sizes)


def _repeat(twin: nn.Module, args: tuple, kwargs: dict[str, Any], sizes: Sizes) -> None:
    """Repeat a call of a network at other sizes; if it bears no other batch than its own, at that one."""
    # Stable Video Diffusion has its frames in the batch, and their number as an argument.
    frames = kwargs.get("num_video_frames") or 1
    try:
        _call_resized(twin, args, kwargs, sizes, sizes.batch * frames)
    except Exception:
        _call_resized(twin, args, kwargs, sizes, args[0].shape[0])


def _call_resized(twin: nn.Module, args: tuple, kwargs: dict[str, Any], sizes: Sizes, batch: int) -> None:
    """Call a network with empty tensors in place of a call's own, and without patches."""
    kwargs = {name: value for name, value in kwargs.items() if name not in ("control", "transformer_options")}
    latent = args[0]
    context = kwargs.get("context")
    tokens = context.shape[1] if isinstance(context, torch.Tensor) and context.ndim == 3 else None
    area = (sizes.frames, sizes.height, sizes.width)[-(latent.ndim - 2) :]
    if latent.ndim == 5 and latent.shape[2] == 1:
        area = (1, *area[1:])

    def resize(tensor: torch.Tensor) -> torch.Tensor:
        shape = list(tensor.shape)
        if shape and shape[0] == latent.shape[0]:
            shape[0] = batch
        if tensor.ndim == latent.ndim:
            shape[2:] = area
        elif tensor.ndim in (2, 3) and tokens is not None and shape[1] == tokens:
            shape[1] = sizes.tokens
        return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)

    args, kwargs = pytree.tree_map_only(torch.Tensor, resize, (args, kwargs))
    twin(*args, transformer_options={}, **kwargs)


def _synthetic_call(patcher: Any) -> ModelCall:
    """Return a call of the network as sampling would make it, from what the model says of itself.

    Conditioning goes through the model's own `extra_conds` (`comfy.model_base.BaseModel`), so each
    architecture gets its own inputs. The widths of text and pooled embeddings are read off its config.
    """
    model, device = patcher.model, patcher.load_device

    def call(network: nn.Module, sizes: Sizes) -> None:
        config = model.model_config.unet_config
        widths = _text_width(config), _pooled_width(config)
        try:
            _apply(_base_around(model, network), device, sizes, *widths)
        except Exception:
            if _latent_dimensions(model) < 3:
                raise
            # An image model on video latents takes one frame.
            _apply(_base_around(model, network), device, replace(sizes, frames=1), *widths)

    return call


def _base_around(model: nn.Module, network: nn.Module) -> nn.Module:
    """Return a copy of a BaseModel around another network, with its own small buffers."""
    rest = {name: child for name, child in model._modules.items() if name != "diffusion_model"}
    base = model.__class__.__new__(model.__class__)
    base.__dict__.update(model.__dict__)
    base.__dict__["_modules"] = {
        **{n: skeleton(c, HOST, lambda t: t) for n, c in rest.items()},
        "diffusion_model": network,
    }
    return base


def _apply(base: Any, device: torch.device, sizes: Sizes, text_width: int, pooled_width: int) -> None:
    area = (sizes.frames, sizes.height, sizes.width)[-_latent_dimensions(base) :]
    latent = torch.empty((sizes.batch, base.latent_format.latent_channels, *area), device=device)
    conditions = base.extra_conds(
        noise=latent,
        latent_image=latent,
        device=device,
        cross_attn=torch.empty((sizes.batch, sizes.tokens, text_width), device=device),
        pooled_output=torch.empty((sizes.batch, pooled_width), device=device),
        width=sizes.width * 8,
        height=sizes.height * 8,
        prompt_type="positive",
        seed=0,
    )
    whole = (*area, *[0] * len(area))
    inputs = {
        name: condition.process_cond(batch_size=sizes.batch, device=device, area=whole).cond
        for name, condition in conditions.items()
    }
    base.apply_model(latent, torch.full((sizes.batch,), 1.0, device=device), transformer_options={}, **inputs)


def _latent_dimensions(model: nn.Module) -> int:
    return getattr(model.latent_format, "latent_dimensions", 2)


def _text_width(config: Mapping[str, Any]) -> int:
    for name in ("context_dim", "context_in_dim", "text_dim", "joint_attention_dim", "cap_feat_dim", "cond_seq_dim",
                 "caption_channels", "text_states_dim", "cross_attention_dim"):  # fmt: skip
        width = config.get(name)
        if isinstance(width, list):
            width = width[0]
        if isinstance(width, int):
            return width
    embedder = config.get("context_embedder_config") or {}
    return embedder.get("params", {}).get("in_features", 4096)


def _pooled_width(config: Mapping[str, Any]) -> int:
    """A UNet's `adm_in_channels` is SDXL's pooled embedding and its sizes; a DiT's is the pooled width."""
    if "vec_in_dim" in config:
        return config["vec_in_dim"] or 768
    if "context_embedder_config" in config:
        return config.get("adm_in_channels") or 2048
    return 1280
