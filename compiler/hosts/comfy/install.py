"""Puts compiled regions into a ModelPatcher: choose, build, compile, attach."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ...backends import AUTO, choose_backend
from ...backends.base import Backend
from ...backends.inductor.float8 import FEWEST_WEIGHTS
from ...common.attached import attached
from ...common.devices import current
from ...common.reason import Reason, Unsupported
from ...common.words import Words, join, say
from ...compile_cache.background_queue import Background
from ...identity.fingerprint import fingerprint
from ...identity.graph_spec import GraphIdentity
from ...identity.regions import Region, find_regions, is_torch_compiled
from ...runtime.channels_last_weights import ChannelsLastWeights
from ...runtime.compiled_model import CompiledModel, Options
from ...runtime.cuda_graph import can_capture, capture_within
from ...runtime.graph_supply import CannotCallAhead
from ...runtime.network_wrapper import NetworkWrapper, VAEWrapper
from ...runtime.region_forward import RegionForward
from ...runtime.region_kinds import Target
from ...runtime.sampling import Announced, Beside
from ...runtime.speed_trial import SpeedTrial
from ...runtime.step_replay import StepReplay
from ...tracing.call_lock import call_lock
from ...tracing.shape_discovery import ModelCall
from . import comfy_compat, process, synthetic_calls
from .coexistence import (
    CALLBACKS_KEY,
    foreign_forward,
    free_regions,
    is_reached,
    set_torch_compile_aside,
    tidy_after,
    undo_network_first,
)
from .low_rank import LowRankBranches
from .other_devices import OtherDevices, Steps, Uncompiled, lines_of, lock_calls
from .progress import BackgroundReport, ProgressReport
from .request import Request
from .rules.host import HOST
from .synthetic_prompts import ENCODE
from .texts import (
    branches_line,
    capture_line,
    counts_text,
    no_branches,
    slower_line,
    status_text,
    uncompiled_line,
    untouched_lines,
    with_measured,
)

log = logging.getLogger(__name__)

Report = ProgressReport | BackgroundReport


_STEP_REPLAY = "step replay"
_speed_trials: weakref.WeakKeyDictionary[nn.Module, dict[tuple, SpeedTrial]] = weakref.WeakKeyDictionary()
"""By network, and by what clones have in common that run the same graphs."""


@dataclass(frozen=True)
class PatchedNetwork:
    """A network, and the patcher of ours that its graphs go into."""

    patcher: Any
    network: nn.Module
    prefix: str
    """What the patcher puts before the names of the network's parts; empty for one that does not sample by itself."""
    calls: Mapping[str, ModelCall]
    """The methods by which ComfyUI enters the network, and how it would call them."""
    device: torch.device
    kind: str
    """What people call the network in a workflow."""
    for_copy: Callable[[Any], PatchedNetwork] | None = None
    """Returns the same of a copy of the patcher, which runs another network on another device."""


@dataclass(frozen=True)
class Refused:
    """Why a network is not compiled, with the remedy."""

    reason: str


@dataclass(frozen=True)
class Chosen:
    """What is compiled of a target."""

    regions: Sequence[Region]
    backend: Backend
    left: Sequence[Words]
    """What a person is told of what is left alone."""
    only_loads: str = ""
    """Why graphs can be loaded here and not compiled, if that is so."""


@dataclass(frozen=True)
class Built:
    """A compiled model that is not in its patcher yet."""

    compiled: CompiledModel
    wrappers: Sequence[NetworkWrapper]
    status: Status


@dataclass(frozen=True)
class Made:
    """What is compiled for one network, to be put into each patcher that runs it."""

    chosen: Chosen
    built: Built
    forwards: Mapping[str, RegionForward]
    branches: LowRankBranches | None


class Status:
    """Tells a person how a compiled model stands. Holds neither the model nor its wrappers."""

    def __init__(self, request: Request, left: Sequence[Words], samples: bool, of: Status | None = None) -> None:
        """`samples` says that calls of the network are steps of a sampling. `of` is that of the model copied."""
        self.of = of
        self.refused: Sequence[str] = ()
        """Why graphs of a file cannot serve here."""
        self.branches: LowRankBranches | None = None
        """What runs LoRAs beside quantised weights, if somebody asked for that."""
        self.copies: dict[torch.device, Status] = {}
        """How the copies on other devices stand."""
        self.others: OtherDevices | None = None
        self._request = request
        self._left = left
        self._samples = samples
        self._told = ""
        self._workflow = request.workflow()
        self._wrappers: list[weakref.ref[NetworkWrapper]] = []

    def follow(self, wrapper: NetworkWrapper) -> None:
        """Tell of this wrapper's model from now on."""
        self._wrappers.append(weakref.ref(wrapper))

    def text(self) -> str:
        """Return how things stand now; nothing once the model is gone."""
        entrance = next(iter(self._alive()), None)
        if entrance is None:
            return ""
        compiled, trial = entrance.compiled, entrance.speed_trial
        is_busy = compiled.background is not None and compiled.background.is_busy
        summary = compiled.summary() if trial is None else with_measured(compiled.summary(), trial)
        stands = status_text(summary, self._request.source, is_busy, self._samples)
        steps = slower_line(trial) or next((line for each in self._alive() if (line := capture_line(each))), "")
        beside = [lines_of(text, device) for device, each in self.copies.items() if (text := each.text())]
        beside += self.others.lines() if self.others else []
        self._told = join([stands, *self.refused, steps, branches_line(self.branches), *self._left, *beside])
        return self._told

    def counts(self) -> str:
        """Return how things stand now, for the log."""
        return next((counts_text(wrapper.compiled.summary()) for wrapper in self._alive()), "")

    def _alive(self) -> list[NetworkWrapper]:
        return [found for reference in self._wrappers if (found := reference()) is not None]

    def tell(self, line: str = "") -> None:
        """Tell how things stand now, and this besides."""
        if self.of is not None:
            self.of.tell(line)
        elif text := self.text():
            log.info("Node %s: %s", self._request.node_id, self.counts())
            self._request.on_change(join([text, line]))

    def tell_broken(self, reason: Reason) -> None:
        """Tell why something was made again uncompiled."""
        self.tell(uncompiled_line(reason, ""))

    def tell_news(self) -> None:
        """Tell how things stand now if that is news, or if another workflow runs the model than before."""
        if self.of is not None:
            self.of.tell_news()
            return
        before = self._told, self._workflow
        self._workflow = self._request.workflow()
        if (self.text(), self._workflow) != before:
            self.tell()


def install(target: PatchedNetwork, request: Request) -> str:
    """Compile a network and put the graphs into its patcher; return what to tell the person.

    Copies of the patcher for other devices follow, those that it has and those that ComfyUI will make.
    """
    made = _make(target, request)
    if isinstance(made, Refused):
        return say("Not compiled: {reason}", reason=made.reason)
    _put_in(target, request, made)
    status = made.built.status
    log.info("Node %s: %s", request.node_id, status.counts())
    others = status.others = _other_devices(target, request, status)
    others.follow(target.patcher)
    others.compile_those_of(target.patcher)
    return status.text()


def _make(target: PatchedNetwork, request: Request, of: Status | None = None) -> Made | Refused:
    """Compile a network; `of` is the status of the one that it is a copy of."""
    chosen = _choose(target, request)
    if isinstance(chosen, Refused):
        return chosen
    if chosen.only_loads:
        request = replace(request, background=False)  # there is nothing to do beside the model
    branches = _branches(target, request, chosen)
    # What compiles in the background sees the branches of the calls that ask for it.
    with branches.ahead(target.patcher) if branches and not request.background else nullcontext():
        built = _build(target, request, chosen, of)
        _compile(target, request, built)
        if chosen.only_loads and not built.compiled.graphs():
            return Refused(chosen.only_loads)
        # The forwards are made of the network as it was described, with the branches that it had then.
        return Made(chosen, built, built.compiled.forwards(), branches)


def _put_in(target: PatchedNetwork, request: Request, made: Made) -> None:
    """Put what was compiled for a network into a patcher that runs it."""
    _attach(target, request, made)
    if made.branches is not None:
        _attach_branches(target, made.built, made.branches)


def _other_devices(target: PatchedNetwork, request: Request, status: Status) -> OtherDevices[Made]:
    """Return what compiles the copies of a patcher."""
    for_copy = target.for_copy
    if for_copy is None:
        return OtherDevices(None, lambda patcher: patcher.model, status.tell)

    def compile_copy(patcher: Any) -> Made | Uncompiled:
        copied = for_copy(patcher)
        made = _make(copied, request, status)
        if isinstance(made, Refused):
            return Uncompiled(made.reason)
        status.copies[copied.device] = made.built.status
        log.info("Node %s, %s: %s", request.node_id, copied.device, made.built.status.counts())
        return made

    def put_in(patcher: Any, made: Made) -> None:
        _put_in(for_copy(patcher), request, made)

    def leave(patcher: Any) -> None:
        copied = for_copy(patcher)
        if copied.prefix:  # what samples, and may do so beside others
            lock_calls(patcher, copied.network, f"{copied.prefix}forward")

    return OtherDevices(Steps(compile_copy, put_in, leave), lambda patcher: for_copy(patcher).network, status.tell)


def lists_encoder(network: nn.Module, listed: Sequence[GraphIdentity]) -> bool:
    """Whether graphs are listed that only a VAE's encoder has a use for."""
    regions = find_regions(network) if listed else []
    decoder, encoder = ({_fingerprint(r) for r in regions if is_reached(r, (m,))} for m in ("decode", "encode"))
    return not (encoder - decoder).isdisjoint(identity.fingerprint for identity in listed)


def _choose(target: PatchedNetwork, request: Request) -> Chosen | Refused:
    """Return what is compiled and by which backend, or why nothing is."""
    set_aside = set_torch_compile_aside(target.patcher)
    regions, taken = free_regions(target.patcher, target.network, target.prefix, target.calls)
    left = untouched_lines(taken, target.network, set_aside)
    backend, reason = choose_backend(_backend_name(request, regions), target.device, only_loads=True)
    if backend is None:
        return Refused(reason)
    if not regions:
        none = say("{name} has no block that can be compiled", name=type(target.network).__name__)
        return Refused(join([none, *left]))
    if backend.rounds and _is_quantized(regions):
        left.append(say("Compiled without {name}: the model's weights are quantised already.", name=backend.name))
        backend, reason = choose_backend(AUTO, target.device, only_loads=True)
    if request.low_rank and not comfy_compat.wraps_samplings(target.patcher):
        left.append(no_branches())
    return Chosen(regions, backend, left, reason)


def _branches(target: PatchedNetwork, request: Request, chosen: Chosen) -> LowRankBranches | None:
    """Return what runs LoRAs beside quantised weights, if somebody has asked for it and ComfyUI can be asked."""
    if request.low_rank and target.prefix and comfy_compat.wraps_samplings(target.patcher):
        return LowRankBranches(target.network, [region.path for region in chosen.regions])
    return None


def _attach_branches(target: PatchedNetwork, built: Built, branches: LowRankBranches) -> None:
    """Put the branches around the samplings of the patcher."""
    comfy_compat.wrap_samplings(target.patcher, CALLBACKS_KEY, branches, branches.unloaded)
    _call_around_samplings(target, branches.begin, None)
    built.status.branches = branches
    branches.on_change = built.status.tell


def _is_quantized(regions: Iterable[Region]) -> bool:
    """Whether the large layers of these regions have quantised weights: none is left that a backend could round."""
    matrices = [w for region in regions for w in region.module.parameters() if w.ndim == 2]
    quantized = {id(weight) for weight in matrices if _consists_of_others(weight)}
    return bool(quantized) and all(id(w) in quantized or w.numel() < FEWEST_WEIGHTS for w in matrices)


def _consists_of_others(weight: torch.Tensor) -> bool:
    try:
        return HOST.inner_tensors(weight) is not None
    except Unsupported:  # of a type that nobody knows
        return True


def _build(target: PatchedNetwork, request: Request, chosen: Chosen, of: Status | None) -> Built:
    """Return the compiled model, with what takes the place of the network's methods."""
    status = Status(request, () if of else chosen.left, bool(target.prefix), of)
    registry = process.registry()
    compiles_later = request.background and registry.cache.workers is not None
    options = Options(request.verify, Background(status.tell, HOST) if compiles_later else None, status.tell)
    place = Target(target.device, chosen.backend, HOST)
    compiled = CompiledModel(target.network, chosen.regions, place, registry.cache, options)
    wrappers = [_wrapper(target, method, compiled) for method in target.calls]
    for each in wrappers:
        status.follow(each)
        tidy_after(each, target.network, each.method)
    return Built(compiled, wrappers, status)


def _wrapper(target: PatchedNetwork, method: str, compiled: CompiledModel) -> NetworkWrapper:
    inner = foreign_forward(target.patcher, target.network, target.prefix + method, method)
    kind = VAEWrapper if method in ("decode", "encode") else NetworkWrapper
    repeat = getattr(target.calls[method], "repeat", _repeat)
    return kind(target.network, method, inner, compiled, repeat)


def _repeat(network: nn.Module, method: str, args: tuple, kwargs: Mapping[str, Any]) -> ModelCall:
    return lambda weightless, sizes: synthetic_calls.repeat(weightless, method, args, dict(kwargs), sizes)


def _compile(target: PatchedNetwork, request: Request, built: Built) -> None:
    """Provide the graphs: from a file, then ahead of the first call, now or in the background."""
    built.status.refused = built.compiled.load(request.graphs, left=request.left)
    background = built.compiled.background
    report = ProgressReport(request.node_id, request.on_progress)
    if background is not None:
        report = BackgroundReport(built.status.tell)
    report.begin()
    job = partial(
        _compile_ahead, built.compiled, [*request.graphs, *request.listed, *request.left], target.calls, report
    )
    if background is None:
        job()
    else:
        background.submit("ahead", job)


def _compile_ahead(
    compiled: CompiledModel, listed: Sequence[GraphIdentity], calls: Mapping[str, ModelCall], report: Report
) -> None:
    """Compile what a file lists and what the calls will use."""
    compiled.compile_listed(listed, report)
    for method, call in calls.items() if compiled.summary().waiting else ():
        try:
            compiled.prepare(call, report, method)
        except CannotCallAhead as reason:
            log.info("The model compiles when it first runs, because calling it ahead failed: %s", reason)


def _attach(target: PatchedNetwork, request: Request, made: Made) -> None:
    """Put the wrappers into the patcher, and have it say when it samples."""
    chosen, built = made.chosen, made.built
    play = _role(request, target, built)
    for each in built.wrappers:
        each.inner = foreign_forward(target.patcher, target.network, target.prefix + each.method, each.method)
        each.on_call, each.device = play, target.device
        if isinstance(each, VAEWrapper):
            each.on_broken = built.status.tell_broken
        each.install_while_running(made.forwards)
        target.patcher.add_object_patch(target.prefix + each.method, each)
    announces = bool(target.prefix) and comfy_compat.announces_samplings(target.patcher)
    if request.backend == AUTO and times_itself(target.device):
        _add_speed_trial(target, chosen, built, announces)
    if announces:
        _announce_samplings(target, built)
        _arrange_weights(target, chosen, built)
        if request.capture and chosen.backend.capture_context is not None:
            _replay_steps(target, chosen, built)
        for each in built.wrappers:
            _call_around_samplings(target, None, each.end_sampling)
        _call_around_samplings(target, None, built.status.tell_news)
    else:
        for each in built.wrappers:
            each.on_setup, each.sampling = built.status.tell_news, Beside()
    play()


def _announce_samplings(target: PatchedNetwork, built: Built) -> None:
    """Have the network looked at once a sampling, and not at each call."""
    weights = built.compiled.weights
    _call_around_samplings(target, _if_compiled(built, weights.begin_sampling), weights.end_sampling)
    for each in built.wrappers:
        each.sampling = sampling = Announced()
        _call_around_samplings(target, None, sampling.end)
        comfy_compat.call_around_samplings(target.patcher, CALLBACKS_KEY, partial(_begin, sampling), None)


def _begin(sampling: Announced, patcher: Any) -> None:
    undo_network_first(patcher)
    sampling.begin(comfy_compat.wraps_calls(patcher))


def _arrange_weights(target: PatchedNetwork, chosen: Chosen, built: Built) -> None:
    """Have the weights of convolutions in channels_last while the model samples."""
    if target.device.type in HOST.channels_last_on and any(HOST.uses_channels_last(r.module) for r in chosen.regions):
        arrangement = ChannelsLastWeights(target.network, target.device)
        if comfy_compat.is_streamed(target.patcher):
            arrangement = built.compiled.weights.channels_last
        _call_around_samplings(target, _if_compiled(built, arrangement.begin), arrangement.end)


def _if_compiled(built: Built, begin: Callable[[], None]) -> Callable[[], None]:
    """Return `begin`, wrapped so that it runs only before samplings whose calls are compiled."""
    trials = [each.speed_trial for each in built.wrappers if each.speed_trial is not None]

    def begin_compiled() -> None:
        if not any(trial.runs_eagerly for trial in trials):
            begin()

    return begin_compiled


def _add_speed_trial(target: PatchedNetwork, chosen: Chosen, built: Built, announces: bool) -> None:
    """Have a network run uncompiled if that is faster. A VAE's decoder may be left so; its encoder stays compiled.

    It is decided once for all clones that run the same graphs. `announces` says that ComfyUI tells of samplings.
    """
    entrance = built.wrappers[0]
    if announces:
        trial = SpeedTrial()
    elif isinstance(entrance, VAEWrapper):
        trial = SpeedTrial.of_decoder()
    elif entrance.method == ENCODE:
        trial = SpeedTrial.of_encoder()
    else:
        trial = SpeedTrial.of_calls()
    known = _speed_trials.setdefault(target.network, {})
    entrance.speed_trial = known.setdefault(_same_graphs(target, chosen), trial)


def times_itself(device: torch.device) -> bool:
    """Whether a device says what its work takes. A CPU's work takes longer whenever others use it."""
    return device.type == "cuda"


def _same_graphs(target: PatchedNetwork, chosen: Chosen) -> tuple:
    """Return what clones that run the same graphs have in common."""
    return target.device, chosen.backend.name, tuple(region.path for region in chosen.regions)


def _replay_steps(target: PatchedNetwork, chosen: Chosen, built: Built) -> None:
    """Let the steps of a sampling be captured and replayed, where nobody else has a hand in the network.

    The memory that they work in is given back when the sampling ends: ComfyUI counts it as free.
    """
    (entrance,), network = built.wrappers, target.network
    if not can_capture(target.device) or entrance.inner is not None or _has_other_patches(target):
        return
    if not type(network).__module__.startswith("comfy.") or any(map(is_torch_compiled, network.modules())):
        return
    entrance.step_replay = replay = _step_replay(target, chosen, built)
    _call_around_samplings(target, None, replay.release_memory)


def _step_replay(target: PatchedNetwork, chosen: Chosen, built: Built) -> StepReplay:
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


def _call_around_samplings(
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


def _role(request: Request, target: PatchedNetwork, built: Built) -> Callable[[], None]:
    """Return what to call when the model runs, so that the registry knows which workflows run it."""
    reference, registry = weakref.ref(built.compiled), process.registry()
    name = f"{request.node_id}:{target.kind}" + (f" {target.device}" if built.status.of else "")

    def play() -> None:
        if model := reference():
            registry.assign(request.workflow(), name, model)

    return play


def _backend_name(request: Request, regions: Iterable[Region]) -> str:
    """Return the backend that a file's graphs for these regions have, or the one that was asked for."""
    backends = {graph.fingerprint: graph.backend for graph in [*request.left, *request.graphs]}
    for region in regions if backends else ():
        if found := backends.get(_fingerprint(region)):
            return found
    return request.backend


def _fingerprint(region: Region) -> str:
    try:
        return fingerprint(region.module, HOST)
    except Exception:  # a block can hold anything, and anything can refuse to be looked at
        return ""
