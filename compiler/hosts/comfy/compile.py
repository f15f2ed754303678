"""Compiled regions in ComfyUI's objects.

Everything goes through ComfyUI's own means: a clone of the ModelPatcher, and an object patch on the method
by which ComfyUI enters the network. State-dict keys, LoRA keys, other clones and the original stay as they
are, and ComfyUI takes the patch out again when it unloads the clone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from ...common.words import say
from ...identity.graph_spec import CompiledGraph
from ...runtime.compiled_model import CompiledModel
from . import comfy_compat, synthetic_calls, synthetic_prompts
from .coexistence import clone_without_ours, replaces_network
from .install import install, lists_encoder
from .other_devices import device_of
from .patched_network import PatchedNetwork
from .request import ANYTHING, Request
from .rules.host import HOST
from .texts import network_kind, no_network_text


def compile_model(patcher: Any, request: Request = ANYTHING) -> tuple[Any, str]:
    """Return a clone of a ModelPatcher whose regions run compiled, and what to tell the person.

    The clone shares the model and its weights with the original. If nothing can be compiled here the
    original comes back, with the reason and the remedy. Raises only what ComfyUI raises to cancel a prompt.
    """
    if reason := comfy_compat.missing(patcher, comfy_compat.PATCHER_NEEDS):
        return patcher, reason
    network = getattr(patcher.model, "diffusion_model", None)
    if network is None:
        return patcher, say("Not compiled: {name} has no diffusion model", name=type(patcher.model).__name__)
    clone = clone_without_ours(patcher)
    if replaces_network(clone):
        return patcher, say("Not compiled: another node puts its own network in the place of this model's")
    text = install(_diffusion_network(clone), request)
    return (clone if graphs_in_use(clone) is not None else patcher), text


def compile_vae(vae: Any, request: Request = ANYTHING, encode: bool | None = False) -> tuple[Any, str]:
    """Return a copy of a `comfy.sd.VAE` whose regions run compiled, and what to tell the person.

    The copy shares the network and its weights with the original, which is never touched, and has a
    patcher of its own. The decoder is compiled, and the encoder too with `encode`; None means: if the
    request's graphs have it. Otherwise as `compile_model`.
    """
    if getattr(vae, "first_stage_model", vae) is None:
        return vae, say("Not compiled: the checkpoint has no VAE")
    if reason := _missing_of_vae(vae):
        return vae, reason
    network = vae.first_stage_model
    if encode is None:
        encode = lists_encoder(network, [*request.graphs, *request.listed, *request.left])
    clone = copy.copy(vae)
    clone.patcher = clone_without_ours(vae.patcher)
    text = install(_vae_network(clone, ("decode", "encode") if encode else ("decode",)), request)
    return (clone if graphs_in_use(clone.patcher) is not None else vae), text


def compile_control_net(control_net: Any, request: Request = ANYTHING) -> tuple[Any, str]:
    """Return a copy of a `comfy.controlnet.ControlNet` whose regions run compiled, and what to tell the person.

    The copy shares the network and its weights with the original, which is never touched, and has a patcher
    of its own. Otherwise as `compile_model`.
    """
    patcher = patcher_of(control_net)
    if patcher is None:
        return control_net, say("Not compiled: {reason}", reason=no_network_text(control_net))
    needs = comfy_compat.CONTROL_NET_NEEDS, comfy_compat.PATCHER_NEEDS
    if reason := comfy_compat.missing(control_net, needs[0]) or comfy_compat.missing(patcher, needs[1]):
        return control_net, reason
    clone = control_net.copy()
    clone.previous_controlnet = control_net.previous_controlnet
    clone.control_model_wrapped = clone_without_ours(patcher)
    calls = {"forward": synthetic_calls.control_call(control_net)}
    network, device = control_net.control_model, patcher.load_device
    text = install(PatchedNetwork(clone.control_model_wrapped, network, "", calls, device, "ControlNet"), request)
    return (clone if graphs_in_use(clone.control_model_wrapped) is not None else control_net), text


def compile_clip(clip: Any, request: Request = ANYTHING) -> tuple[Any, str]:
    """Return a copy of a `comfy.sd.CLIP` whose regions run compiled while it encodes, and what to tell the person.

    The copy shares the networks and their weights with the original, which is never touched, and has a patcher of its
    own. ComfyUI's own code generates its text. Otherwise as `compile_model`.
    """
    if clip is None:
        return clip, say("Not compiled: the checkpoint has no text encoder")
    if reason := _missing_of_clip(clip):
        return clip, reason
    clone = clip.clone()
    clone.patcher = clone_without_ours(clip.patcher)
    network, device = clip.cond_stage_model, clip.patcher.load_device
    bare = _without_network(clip, "cond_stage_model")
    calls = {synthetic_prompts.ENCODE: synthetic_prompts.PromptCall(bare, device)}
    text = install(PatchedNetwork(clone.patcher, network, "", calls, device, "text encoder"), request)
    return (clone if graphs_in_use(clone.patcher) is not None else clip), text


def _missing_of_clip(clip: Any) -> str:
    own = comfy_compat.missing(clip, comfy_compat.CLIP_NEEDS)
    return own or comfy_compat.missing(clip.patcher, comfy_compat.PATCHER_NEEDS)


def _diffusion_network(patcher: Any) -> PatchedNetwork:
    """Return the network of a ModelPatcher that samples."""
    calls = {"forward": synthetic_calls.SamplingCall(patcher, HOST)}
    network, kind = patcher.model.diffusion_model, network_kind(patcher.model)
    return PatchedNetwork(patcher, network, "diffusion_model.", calls, device_of(patcher), kind, _diffusion_network)


def _vae_network(vae: Any, methods: Sequence[str]) -> PatchedNetwork:
    """Return the network of a VAE whose patcher is ours."""
    bare = _without_network(vae, "first_stage_model")
    calls = {method: synthetic_calls.coding_call(bare, method) for method in methods}

    def for_copy(patcher: Any) -> PatchedNetwork:
        copied = copy.copy(bare)
        copied.patcher, copied.first_stage_model, copied.device = patcher, patcher.model, device_of(patcher)
        return _vae_network(copied, methods)

    return PatchedNetwork(vae.patcher, vae.first_stage_model, "", calls, vae.device, "VAE", for_copy)


def _without_network(thing: Any, name: str) -> Any:
    """Return a shallow copy of a CLIP or a VAE that leads neither to its patcher nor to its network.

    What a patcher holds must not lead back to it: only the search for cycles would free the weights.
    """
    bare = copy.copy(thing)
    bare.patcher = None
    setattr(bare, name, None)
    return bare


def _missing_of_vae(vae: Any) -> str:
    own = comfy_compat.missing(vae, comfy_compat.VAE_NEEDS)
    return own or comfy_compat.missing(vae.patcher, comfy_compat.PATCHER_NEEDS)


def patcher_of(thing: Any) -> Any:
    """Return the ModelPatcher of a MODEL, a VAE, a CLIP or a CONTROL_NET; None if a CONTROL_NET has none."""
    if hasattr(thing, "get_control"):
        return getattr(thing, comfy_compat.CONTROL_NET_PATCHER, None)
    return getattr(thing, "patcher", thing)


def block_classes(*things: Any) -> set[str]:
    """Return the names of all classes of layers and blocks in the networks of what nodes pass on."""
    networks = [getattr(patcher_of(thing), "model", None) for thing in things if thing is not None]
    return {type(part).__name__ for network in networks if network is not None for part in network.modules()}


def compiled_model(thing: Any) -> CompiledModel | None:
    """Return what a MODEL, VAE, CLIP or CONTROL_NET was compiled as, or None."""
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
    patches = getattr(patcher, "object_patches", {}).values()
    found = (getattr(patch, "compiled", None) for patch in patches)
    return next((model for model in found if model is not None), None)
