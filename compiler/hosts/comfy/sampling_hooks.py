"""What a compiled network does when a sampling begins and ends: checks, weights, captures, the trial of its speed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ...common.attached import attached
from ...common.devices import current
from ...identity.regions import is_torch_compiled
from ...runtime.channels_last_weights import ChannelsLastWeights
from ...runtime.cuda_graph import can_capture, capture_within
from ...runtime.network_wrapper import VAEWrapper
from ...runtime.sampling import Announced
from ...runtime.speed_trial import SpeedTrial
from ...runtime.step_replay import StepReplay
from ...tracing.call_lock import call_lock
from . import comfy_compat
from .coexistence import CALLBACKS_KEY, undo_network_first
from .patched_network import CompilePlan, PatchedNetwork, UnattachedModel
from .rules.host import HOST
from .synthetic_prompts import ENCODE

_STEP_REPLAY = "step replay"
_speed_trials: weakref.WeakKeyDictionary[nn.Module, dict[tuple, SpeedTrial]] = weakref.WeakKeyDictionary()
"""By network, and by what clones have in common that run the same graphs."""


def announce_samplings(target: PatchedNetwork, built: UnattachedModel) -> None:
    """Have the network looked at once a sampling, and not at each call."""
    weights = built.compiled.weights
    call_around_samplings(target, _if_compiled(built, weights.begin_sampling), weights.end_sampling)
    for each in built.wrappers:
        each.sampling = sampling = Announced()
        call_around_samplings(target, None, sampling.end)
        comfy_compat.call_around_samplings(target.patcher, CALLBACKS_KEY, partial(_begin, sampling), None)


def _begin(sampling: Announced, patcher: Any) -> None:
    undo_network_first(patcher)
    sampling.begin(comfy_compat.wraps_calls(patcher))


def arrange_weights(target: PatchedNetwork, chosen: CompilePlan, built: UnattachedModel) -> None:
    """Have the weights of convolutions in channels_last while the model samples."""
    if target.device.type in HOST.channels_last_on and any(HOST.uses_channels_last(r.module) for r in chosen.regions):
        arrangement = ChannelsLastWeights(target.network, target.device)
        if comfy_compat.is_streamed(target.patcher):
            arrangement = built.compiled.weights.channels_last
        call_around_samplings(target, _if_compiled(built, arrangement.begin), arrangement.end)


def _if_compiled(built: UnattachedModel, begin: Callable[[], None]) -> Callable[[], None]:
    """Return `begin`, wrapped so that it runs only before samplings whose calls are compiled."""
    trials = [each.speed_trial for each in built.wrappers if each.speed_trial is not None]

    def begin_compiled() -> None:
        if not any(trial.runs_eagerly for trial in trials):
            begin()

    return begin_compiled


def add_speed_trial(target: PatchedNetwork, chosen: CompilePlan, built: UnattachedModel, announces: bool) -> None:
    """Have a network run uncompiled if that is faster. A VAE's decoder may be left so; its encoder stays compiled.

    It is decided once for all clones that run the same graphs. `announces` says that ComfyUI tells of samplings.
    """
    wrapper = built.wrappers[0]
    if announces:
        trial = SpeedTrial()
    elif isinstance(wrapper, VAEWrapper):
        trial = SpeedTrial.of_decoder()
    elif wrapper.method == ENCODE:
        trial = SpeedTrial.of_encoder()
    else:
        trial = SpeedTrial.of_calls()
    known = _speed_trials.setdefault(target.network, {})
    wrapper.speed_trial = known.setdefault(_same_graphs(target, chosen), trial)


def has_gpu_events(device: torch.device) -> bool:
    """Whether a device says what its work takes. A CPU's work takes longer whenever others use it."""
    return device.type == "cuda"


def _same_graphs(target: PatchedNetwork, chosen: CompilePlan) -> tuple:
    """Return what clones that run the same graphs have in common."""
    return target.device, chosen.backend.name, tuple(region.path for region in chosen.regions)


def replay_steps(target: PatchedNetwork, chosen: CompilePlan, built: UnattachedModel) -> None:
    """Let the steps of a sampling be captured and replayed, where nobody else has a hand in the network.

    The memory that they work in is given back when the sampling ends: ComfyUI counts it as free.
    """
    (wrapper,), network = built.wrappers, target.network
    if not can_capture(target.device) or wrapper.inner is not None or _has_other_patches(target):
        return
    if not type(network).__module__.startswith("comfy.") or any(map(is_torch_compiled, network.modules())):
        return
    wrapper.step_replay = replay = _step_replay(target, chosen, built)
    call_around_samplings(target, None, replay.end_sampling)


def _step_replay(target: PatchedNetwork, chosen: CompilePlan, built: UnattachedModel) -> StepReplay:
    """Return what captures a network's steps: one for all clones that run the same graphs.

    A node runs again when a LoRA before it changes. The captures that were made for its last clone still hold.
    """
    what = _same_graphs(target, chosen)
    known, replay = attached(target.network).get(_STEP_REPLAY, (None, None))
    if known != what:
        capture, weights = capture_within(chosen.backend.capture_context), built.compiled.weights
        replay = StepReplay(target.network, HOST, target.device, built.compiled.counters, capture, weights)
        attached(target.network)[_STEP_REPLAY] = what, replay
    return replay


def _has_other_patches(target: PatchedNetwork) -> bool:
    own = f"{target.prefix}forward"
    return any(name.startswith(target.prefix) and name != own for name in target.patcher.object_patches)


def call_around_samplings(
    target: PatchedNetwork, begin: Callable[[], None] | None, end: Callable[[], None] | None
) -> None:
    """Have functions called when a sampling of this patcher begins and ends.

    A sampling that fails on one GPU ends while another one's thread may still be inside of a call.
    """
    device = target.device  # the functions last as long as the patcher, and must not refer to it

    def at_begin(patcher: Any) -> None:
        with current(device):
            begin()

    def at_end(patcher: Any) -> None:
        with call_lock.exclusive(), current(device):
            end()

    comfy_compat.call_around_samplings(target.patcher, CALLBACKS_KEY, begin and at_begin, end and at_end)
