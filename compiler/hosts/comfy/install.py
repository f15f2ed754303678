"""Puts compiled regions into a ModelPatcher: choose, build, compile, attach."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ...backends import AUTO, choose_backend
from ...backends.inductor.float8 import MIN_WEIGHTS
from ...common.reason import Unsupported
from ...common.words import join, say
from ...compile_cache.background_queue import Background
from ...identity.fingerprint import fingerprint
from ...identity.graph_spec import GraphIdentity
from ...identity.regions import Region, find_regions
from ...runtime.compiled_model import CompiledModel, Options
from ...runtime.graph_supply import CannotCallAhead
from ...runtime.network_wrapper import NetworkWrapper, VAEWrapper
from ...runtime.region_kinds import Target
from ...runtime.sampling import Beside
from ...tracing.shape_discovery import ModelCall
from . import comfy_compat, process, synthetic_calls
from .coexistence import (
    CALLBACKS_KEY,
    foreign_forward,
    free_regions,
    is_reached,
    methods_without_regions,
    set_torch_compile_aside,
    tidy_after,
)
from .low_rank import LowRankBranches
from .other_devices import OtherDevices, Steps, Uncompiled, lock_calls
from .patched_network import CompiledNetwork, CompilePlan, NotCompiled, PatchedNetwork, UnattachedModel
from .progress import BackgroundReport, ProgressReport
from .request import Request
from .rules.host import HOST
from .sampling_hooks import (
    add_speed_trial,
    announce_samplings,
    arrange_weights,
    call_around_samplings,
    has_gpu_events,
    replay_steps,
)
from .status import Status
from .texts import WITHOUT_BLOCKS, no_branches, untouched_lines

log = logging.getLogger(__name__)

Report = ProgressReport | BackgroundReport


def install(target: PatchedNetwork, request: Request) -> str:
    """Compile a network and put the graphs into its patcher; return what to tell the person.

    Copies of the patcher for other devices follow, those that it has and those that ComfyUI will make.
    """
    made = _compile_network(target, request)
    if isinstance(made, NotCompiled):
        return say("Not compiled: {reason}", reason=made.reason)
    _attach_all(target, request, made)
    status = made.built.status
    log.info("Node %s: %s", request.node_id, status.counts())
    others = status.others = _other_devices(target, request, status)
    others.follow(target.patcher)
    others.compile_those_of(target.patcher)
    return status.text()


def _compile_network(
    target: PatchedNetwork, request: Request, of: Status | None = None
) -> CompiledNetwork | NotCompiled:
    """Compile a network; `of` is the status of the one that it is a copy of."""
    chosen = _choose(target, request)
    if isinstance(chosen, NotCompiled):
        return chosen
    if chosen.only_loads:
        request = replace(request, background=False)  # there is nothing to do beside the model
    branches = _branches(target, request, chosen)
    # What compiles in the background sees the branches of the calls that ask for it.
    with branches.ahead(target.patcher) if branches and not request.background else nullcontext():
        built = _build(target, request, chosen, of)
        _compile(target, request, built)
        if chosen.only_loads and not built.compiled.graphs():
            return NotCompiled(chosen.only_loads)
        # The forwards are made of the network as it was described, with the branches that it had then.
        return CompiledNetwork(chosen, built, built.compiled.forwards(), branches)


def _attach_all(target: PatchedNetwork, request: Request, made: CompiledNetwork) -> None:
    """Put what was compiled for a network into a patcher that runs it."""
    _attach(target, request, made)
    if made.branches is not None:
        _attach_branches(target, made.built, made.branches)


def _other_devices(target: PatchedNetwork, request: Request, status: Status) -> OtherDevices[CompiledNetwork]:
    """Return what compiles the copies of a patcher."""
    for_copy = target.for_copy
    if for_copy is None:
        return OtherDevices(None, lambda patcher: patcher.model, status.tell)

    def compile_copy(patcher: Any) -> CompiledNetwork | Uncompiled:
        copied = for_copy(patcher)
        made = _compile_network(copied, request, status)
        if isinstance(made, NotCompiled):
            return Uncompiled(made.reason)
        status.copies[copied.device] = made.built.status
        log.info("Node %s, %s: %s", request.node_id, copied.device, made.built.status.counts())
        return made

    def attach_all(patcher: Any, made: CompiledNetwork) -> None:
        _attach_all(for_copy(patcher), request, made)

    def leave(patcher: Any) -> None:
        copied = for_copy(patcher)
        if copied.prefix:  # what samples, and may do so beside others
            lock_calls(patcher, copied.network, f"{copied.prefix}forward")

    return OtherDevices(Steps(compile_copy, attach_all, leave), lambda patcher: for_copy(patcher).network, status.tell)


def lists_encoder(network: nn.Module, listed: Sequence[GraphIdentity]) -> bool:
    """Whether graphs are listed that only a VAE's encoder has a use for."""
    regions = find_regions(network) if listed else []
    decoder, encoder = ({_fingerprint(r) for r in regions if is_reached(r, (m,))} for m in ("decode", "encode"))
    return not (encoder - decoder).isdisjoint(identity.fingerprint for identity in listed)


def _choose(target: PatchedNetwork, request: Request) -> CompilePlan | NotCompiled:
    """Return what is compiled and by which backend, or why nothing is."""
    set_aside = set_torch_compile_aside(target.patcher)
    regions, taken = free_regions(target.patcher, target.network, target.prefix, target.calls)
    left = untouched_lines(taken, target.network, set_aside)
    if regions:
        left += [WITHOUT_BLOCKS[method] for method in methods_without_regions(target.network, target.calls)]
    backend, reason = choose_backend(_backend_name(request, regions), target.device, only_loads=True)
    if backend is None:
        return NotCompiled(reason)
    if not regions:
        none = say("{name} has no block that can be compiled", name=type(target.network).__name__)
        return NotCompiled(join([none, *left]))
    if backend.rounds and _is_quantized(regions):
        left.append(say("Compiled without {name}: the model's weights are quantised already.", name=backend.name))
        backend, reason = choose_backend(AUTO, target.device, only_loads=True)
    if request.low_rank and not comfy_compat.wraps_samplings(target.patcher):
        left.append(no_branches())
    return CompilePlan(regions, backend, left, reason)


def _branches(target: PatchedNetwork, request: Request, chosen: CompilePlan) -> LowRankBranches | None:
    """Return what runs LoRAs beside quantised weights, if somebody has asked for it and ComfyUI can be asked."""
    if request.low_rank and target.prefix and comfy_compat.wraps_samplings(target.patcher):
        return LowRankBranches(target.network, [region.path for region in chosen.regions])
    return None


def _attach_branches(target: PatchedNetwork, built: UnattachedModel, branches: LowRankBranches) -> None:
    """Put the branches around the samplings of the patcher."""
    comfy_compat.wrap_samplings(target.patcher, CALLBACKS_KEY, branches, branches.unloaded)
    call_around_samplings(target, branches.begin, None)
    built.status.branches = branches
    branches.on_change = built.status.tell


def _is_quantized(regions: Iterable[Region]) -> bool:
    """Whether the large layers of these regions have quantised weights: none is left that a backend could round."""
    matrices = [w for region in regions for w in region.module.parameters() if w.ndim == 2]
    quantized = {id(weight) for weight in matrices if _consists_of_others(weight)}
    return bool(quantized) and all(id(w) in quantized or w.numel() < MIN_WEIGHTS for w in matrices)


def _consists_of_others(weight: torch.Tensor) -> bool:
    try:
        return HOST.inner_tensors(weight) is not None
    except Unsupported:  # of a type that nobody knows
        return True


def _build(target: PatchedNetwork, request: Request, chosen: CompilePlan, of: Status | None) -> UnattachedModel:
    """Return the compiled model, with what takes the place of the network's methods."""
    status = Status(request, () if of else chosen.notices, bool(target.prefix), of)
    registry = process.registry()
    compiles_later = request.background and registry.cache.workers is not None
    options = Options(request.verify, Background(status.tell, HOST) if compiles_later else None, status.tell)
    place = Target(target.device, chosen.backend, HOST)
    compiled = CompiledModel(target.network, chosen.regions, place, registry.cache, options)
    wrappers = [_wrapper(target, method, compiled) for method in target.calls]
    for each in wrappers:
        status.add(each)
        tidy_after(each, target.network, each.method)
    return UnattachedModel(compiled, wrappers, status)


def _wrapper(target: PatchedNetwork, method: str, compiled: CompiledModel) -> NetworkWrapper:
    inner = foreign_forward(target.patcher, target.network, target.prefix + method, method)
    kind = VAEWrapper if method in ("decode", "encode") else NetworkWrapper
    repeat = getattr(target.calls[method], "repeat", _repeat)
    return kind(target.network, method, inner, compiled, repeat)


def _repeat(network: nn.Module, method: str, args: tuple, kwargs: Mapping[str, Any]) -> ModelCall:
    return lambda weightless, sizes: synthetic_calls.repeat(weightless, method, args, dict(kwargs), sizes)


def _compile(target: PatchedNetwork, request: Request, built: UnattachedModel) -> None:
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


def _attach(target: PatchedNetwork, request: Request, made: CompiledNetwork) -> None:
    """Put the wrappers into the patcher, and have it say when it samples."""
    chosen, built = made.chosen, made.built
    register_use = _register_use(request, target, built)
    for each in built.wrappers:
        each.inner = foreign_forward(target.patcher, target.network, target.prefix + each.method, each.method)
        each.on_call, each.device = register_use, target.device
        if isinstance(each, VAEWrapper):
            each.on_broken = built.status.tell_broken
        each.install_while_running(made.forwards)
        target.patcher.add_object_patch(target.prefix + each.method, each)
    announces = bool(target.prefix) and comfy_compat.announces_samplings(target.patcher)
    if request.backend == AUTO and has_gpu_events(target.device):
        add_speed_trial(target, chosen, built, announces)
    if announces:
        announce_samplings(target, built)
        arrange_weights(target, chosen, built)
        if request.capture and chosen.backend.capture_context is not None:
            replay_steps(target, chosen, built)
        for each in built.wrappers:
            call_around_samplings(target, None, each.end_sampling)
        call_around_samplings(target, None, built.status.tell_news)
    else:
        for each in built.wrappers:
            each.on_setup, each.sampling = built.status.tell_news, Beside()
    register_use()


def _register_use(request: Request, target: PatchedNetwork, built: UnattachedModel) -> Callable[[], None]:
    """Return what to call when the model runs, so that the registry knows which workflows run it."""
    reference, registry = weakref.ref(built.compiled), process.registry()
    name = f"{request.node_id}:{target.kind}" + (f" {target.device}" if built.status.of else "")

    def register_use() -> None:
        if model := reference():
            registry.assign(request.workflow(), name, model)

    return register_use


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
