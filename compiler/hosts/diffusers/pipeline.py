"""Compiled regions in diffusers' pipelines.

This module compiles a pipeline's networks in place, because people pass pipelines around and move them, and let
diffusers, PEFT and accelerate change them. So each region checks at every call whether it has changed (see
`region_forward`). A network that two pipelines share is compiled once.
"""

from __future__ import annotations

import inspect
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn

from ...backends import choose_backend
from ...common.devices import with_number
from ...common.files import open_regular, write_whole
from ...compile_cache.graph_cache import GraphCache
from ...identity.graph_spec import CompiledGraph, GraphIdentity
from ...identity.regions import find_regions, is_torch_compiled
from ...registry.registry import Registry
from ...runtime.compiled_model import CompiledModel
from ...runtime.compiled_model import Options as CompileOptions
from ...runtime.graph_supply import CannotCallAhead
from ...runtime.network_wrapper import NetworkWrapper, VAEWrapper
from ...runtime.region_kinds import Target
from ...runtime.sampling import Scheduled
from ...runtime.summary import Progress, Summary, log_progress
from ...storage.graph_file import SUFFIX, GraphFileError, StoredGraph, read_contents, write_graphs
from ...storage.store import open_store
from ...storage.trust import Trust
from ...tracing.shape_discovery import ModelCall
from ...tracing.weightless_copy import weightless_copy
from . import synthetic_calls
from .rules.host import HOST, STATE

log = logging.getLogger(__name__)

_TEXT_PARTS = ("text_encoder", "image_encoder")
_OTHER_PARTS = ("safety_checker",)


@dataclass(frozen=True)
class Options:
    """Settings of `compile_pipe` besides the parts that it leaves out."""

    verify: bool = True
    """Compare each graph with eager on its first call, and use it only if they agree."""
    text_encoders: bool = False
    """Compile text and image encoders too. They run only once per image."""


@dataclass(frozen=True)
class SavedPart:
    """One file that `save_pipe` wrote."""

    part: str
    path: Path
    graphs: int
    size: int
    """Bytes."""


@dataclass(frozen=True)
class LoadedPart:
    """What `load_pipe` found for one part."""

    part: str
    regions: int
    """Kinds of region."""
    loaded: int
    """Kinds that graphs of the files serve now."""
    waiting: int
    """Graphs that fit no region now. They are for another dtype or device, and the part may still move there."""


@lru_cache(maxsize=1)
def registry() -> Registry:
    """Return this process's registry. Its store is COMPILED_GRAPHS_STORE, by default in the user's cache folder."""
    return Registry(GraphCache(open_store(os.environ.get("COMPILED_GRAPHS_STORE") or str(_default_folder()))))


def _default_folder() -> Path:
    if os.name == "nt":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "compiled_graphs"


def compile_pipe(
    pipe: Any, *, backend: str = "auto", ignores: Iterable[str] = (), options: Options | None = None
) -> Any:
    """Compile the repeated blocks of a pipeline's networks, in place; return the pipeline.

    A network's graphs are made when it first runs, or by `save_pipe`. Each graph serves any size and batch. `ignores`
    names parts or prefixes of their names, such as "vae" or "vae.encoder". Parts stay as they are if they are None,
    have no blocks to compile, or were compiled by `torch.compile`. Raises TypeError if `pipe` is not a pipeline, and
    ValueError if the backend cannot run here or the weights were never loaded.
    """
    options = options or Options()
    for name, network in _parts(pipe, ignores, options):
        _install(name, network, pipe, backend, options)
    return pipe


def compile_module(module: nn.Module, *, backend: str = "auto", options: Options | None = None) -> nn.Module:
    """Compile the repeated blocks of one network, such as `pipe.unet` or `pipe.vae.decoder`; return it."""
    _install(type(module).__name__, module, module, backend, options or Options())
    return module


def restore_pipe(pipe: Any) -> Any:
    """Undo `compile_pipe` and `load_pipe`. Networks that another compiled pipeline shares stay compiled."""
    for _, network, part in _compiled_parts(pipe):
        part.owners -= {pipe, network}
        if not part.owners:
            part.uninstall(network)
    return pipe


def save_pipe(
    pipe: Any,
    dir: str | os.PathLike,  # noqa: A002  OneDiffX's name
    *,
    ignores: Iterable[str] = (),
    overwrite: bool = True,
) -> list[SavedPart]:
    """Write the graphs of a pipeline to a folder, one file for each part; return what was written.

    The pipeline need not have run before: this function compiles missing graphs now, from the networks' own configs.
    It also saves the variants that earlier runs used. Other files in the folder stay. Raises FileExistsError if a file
    exists and `overwrite` is false. Raises ValueError if there is nothing to save, and makes no folder then.
    """
    ignores, folder = tuple(ignores), Path(dir).expanduser()
    if not any(_compiled_parts(pipe, ignores)):
        compile_pipe(pipe, ignores=ignores)
    parts = {name: (network, part) for name, network, part in _compiled_parts(pipe, ignores)}
    paths = {name: folder / f"{name}{SUFFIX}" for name in parts}
    if not overwrite and (taken := next((path for path in paths.values() if path.exists()), None)):
        raise FileExistsError(f"{taken} is there already: choose another folder, or pass overwrite=True")
    graphs = {name: part.all_graphs(network) for name, (network, part) in parts.items()}
    graphs = {name: found for name, found in graphs.items() if found}
    if not graphs:
        raise ValueError(f"nothing of this {type(pipe).__name__} could be compiled, so there is nothing to save")
    folder.mkdir(parents=True, exist_ok=True)
    return [_write(name, paths[name], found) for name, found in graphs.items()]


def load_pipe(
    pipe: Any,
    dir: str | os.PathLike,  # noqa: A002  OneDiffX's name
    *,
    ignores: Iterable[str] = (),
    options: Options | None = None,
) -> list[LoadedPart]:
    """Use the graphs of a folder that `save_pipe` wrote; return what was found for each part.

    The pipeline may be compiled already, or not. Graphs of this machine load without tracing or compiling. Graphs for
    another dtype or device wait until the pipeline moves there. Files from another machine may not run here, so this
    function compiles the graphs that they list. Raises FileNotFoundError if there is no such folder, and
    GraphFileError if the folder has no graph files, or none for this pipeline.
    """
    options = options or Options()
    stored, listed, backend = _read(Path(dir).expanduser())
    parts = dict(_parts(pipe, ignores, options))
    for name, network in parts.items():
        _install(name, network, pipe, backend, options)
    found = [_load(name, network, stored, listed) for name, network in parts.items() if _part_of(network)]
    if not any(part.loaded for part in found) and not _may_fit_later(parts.values(), [*stored, *listed]):
        raise GraphFileError(
            f"{dir} holds graphs of {_regions_text(stored, listed)}, and none of them is in this {type(pipe).__name__}:"
            " it was saved from another pipeline"
        )
    return found


def warmup(pipe: Any, sizes: Iterable[tuple[int, int]], **arguments: Any) -> None:
    """Make one-step images of the given (height, width) in pixels, so that the first real images need not wait.

    `arguments` go to the pipeline. A pipeline that takes a prompt and gets none runs with an empty one.
    """
    accepted = inspect.signature(type(pipe).__call__).parameters
    if "prompt" in accepted and not {"prompt", "prompt_embeds"} & arguments.keys():
        arguments["prompt"] = ""
    for height, width in sizes:
        # With a strength below 1, image-to-image pipelines leave the first steps out: here, the only one.
        options = {"num_inference_steps": 1, "height": height, "width": width, "strength": 1.0}
        pipe(**{name: value for name, value in options.items() if name in accepted} | arguments)


def summaries(pipe: Any) -> dict[str, Summary]:
    """Return a summary of each compiled part of a pipeline."""
    return {name: part.compiled.summary() for name, _, part in _compiled_parts(pipe)}


class Part:
    """The compiled state of one network: its regions, and how to take them out again."""

    def __init__(self, name: str, compiled: CompiledModel, force_upcast: bool) -> None:
        self.compiled = compiled
        self.owners: weakref.WeakSet = weakref.WeakSet()
        """Pipelines that asked to compile the network."""
        self._name = name
        self._force_upcast = force_upcast
        self._ours: list[tuple[weakref.ref, Callable]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Copy nothing: a copy of a network is not compiled."""

    def __reduce__(self) -> tuple:
        """Pickle as None: a network from a pickle is not compiled."""
        return type(None), ()

    def install(self, network: nn.Module, wrapper: NetworkWrapper) -> None:
        """Install the compiled regions, and the wrapper of the network that tells them which call is running."""
        for path, forward in self.compiled.forwards().items():
            self._replace(network.get_submodule(path), forward)
        self._enter(network, wrapper)
        setattr(network, STATE, self)

    def _enter(self, network: nn.Module, wrapper: NetworkWrapper) -> None:
        """Install a network's wrapper below all hooks: what is removed puts back what it found when it was made."""
        holder, name = _innermost(network)
        before = vars(holder).get(name)
        is_own = isinstance(before, MethodType) and before.__func__ is type(network).forward
        wrapper.inner = None if is_own else before
        self._ours.append((weakref.ref(network), wrapper))
        setattr(holder, name, wrapper)

    def uninstall(self, network: nn.Module) -> None:
        """Put the original forwards back."""
        for reference, ours in reversed(self._ours):
            if (module := reference()) is not None:
                _put_back(module, ours)
        self._ours.clear()
        network.__dict__.pop(STATE, None)

    def all_graphs(self, network: nn.Module) -> list[CompiledGraph]:
        """Compile the graphs that the network's pipelines are known to need. Return these and all others in use."""
        graphs = _prepared(self._name, self.compiled, network)
        if self._force_upcast and any(p.dtype == torch.float16 for p in network.parameters()):
            upcast = weightless_copy(network, HOST, _in_float32)
            graphs += _prepared(f"{self._name} in float32", self.compiled.like(upcast, find_regions(upcast)), upcast)
        return list({graph.key: graph for graph in graphs}.values())

    def _replace(self, module: nn.Module, ours: Callable) -> None:
        self._ours.append((weakref.ref(module), ours))
        module.forward = ours


def _in_float32(tensor: torch.Tensor) -> torch.Tensor:
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")


def _prepared(name: str, compiled: CompiledModel, network: nn.Module) -> list[CompiledGraph]:
    call = synthetic_calls.first_call(network)
    if call is None:
        cls = type(network).__name__
        log.warning("%s is a %s, which is compiled when it first runs; run it before saving.", name, cls)
    else:
        try:
            compiled.prepare(call, _log_progress, type(network).__name__)
        except CannotCallAhead as reason:
            log.warning("%s is compiled when it first runs; it cannot be called ahead of it: %s", name, reason)
    return compiled.graphs()


def _log_progress(progress: Progress) -> None:
    log_progress(log, progress)


def _parts(pipe: Any, ignores: Iterable[str], options: Options) -> Iterator[tuple[str, nn.Module]]:
    """Yield the networks of a pipeline that may be compiled, with the names that `ignores` takes."""
    components = getattr(pipe, "components", None)
    if not isinstance(components, Mapping):
        raise TypeError(f"{type(pipe).__name__} is no diffusers pipeline; for a single network there is compile_module")
    ignores = (ignores,) if isinstance(ignores, str) else tuple(ignores)
    for component, module in components.items():
        if not isinstance(module, nn.Module) or component.startswith(_OTHER_PARTS):
            continue
        if component.startswith(_TEXT_PARTS) and not options.text_encoders:
            continue
        for name, network in _networks(component, module):
            if not any(name == ignored or name.startswith(f"{ignored}.") for ignored in ignores):
                yield name, network


def _compiled_parts(pipe: Any, ignores: Iterable[str] = ()) -> Iterator[tuple[str, nn.Module, Part]]:
    for name, network in _parts(pipe, ignores, Options(text_encoders=True)):
        if part := _part_of(network):
            yield name, network, part


def _networks(component: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the networks that pipelines call: both halves of a VAE, each of several ControlNets, or the component."""
    halves = {half: getattr(module, half, None) for half in ("encoder", "decoder")}
    if component.startswith(("vae", "movq", "vqgan")) and any(isinstance(half, nn.Module) for half in halves.values()):
        yield from ((f"{component}.{n}", half) for n, half in halves.items() if isinstance(half, nn.Module))
    elif isinstance(nets := getattr(module, "nets", None), nn.ModuleList):
        yield from ((f"{component}.{number}", net) for number, net in enumerate(nets))
    else:
        yield component, module


def _install(name: str, network: nn.Module, owner: Any, backend: str, options: Options) -> None:
    part = _part_of(network)
    if part and backend in ("auto", part.compiled.backend):
        part.owners.add(owner)
        return
    owners = [owner, *(part.owners if part else ())]
    if part:
        part.uninstall(network)
    if is_torch_compiled(network):
        log.warning("%s is compiled by torch.compile already, and left so.", name)
        return
    found = find_regions(network)
    regions = [region for region in found if HOST.module_is_clean(region.module)]
    if found and not regions:
        text = (
            "%s is not compiled: other code has hooks on its blocks. Compile a pipeline first, and then enable caches."
        )
        log.warning(text, name)
        return
    if not regions:
        log.info("%s has no block that can be compiled.", name)
        return
    device = _execution_device(network, owner)
    chosen, reason = choose_backend(backend, device)
    if chosen is None:
        raise ValueError(f"{name} cannot be compiled: {reason}")
    target = Target(device, chosen, HOST)
    compiled = CompiledModel(network, regions, target, registry().cache, CompileOptions(options.verify))
    kind = VAEWrapper if _is_coder(network) else NetworkWrapper
    wrapper = kind(network, "forward", None, compiled, _repeat)
    part = Part(name, compiled, _is_coder(network) and _forces_upcast(owner, name))
    part.owners.update(owners)
    if not _is_coder(network) and not name.startswith(_TEXT_PARTS):  # those run when somebody calls them
        wrapper.sampling = Scheduled(partial(_schedules, part.owners))
    part.install(network, wrapper)
    registry().assign(type(owner).__name__, name, compiled)


def _schedules(owners: Iterable[Any]) -> list[torch.Tensor]:
    """Return the timesteps of the pipelines' schedulers. Each run of a pipeline makes a new tensor."""
    found = (getattr(getattr(owner, "scheduler", None), "timesteps", None) for owner in list(owners))
    return [timesteps for timesteps in found if isinstance(timesteps, torch.Tensor)]


def _part_of(network: nn.Module) -> Part | None:
    return network.__dict__.get(STATE)


def _is_coder(network: nn.Module) -> bool:
    return type(network).__name__ in ("Decoder", "Encoder", "DecoderTiny", "EncoderTiny", "TemporalDecoder")


def _forces_upcast(pipe: Any, name: str) -> bool:
    config = getattr(getattr(pipe, name.partition(".")[0], None), "config", None)
    return bool(getattr(config, "force_upcast", False))


def _execution_device(network: nn.Module, owner: Any) -> torch.device:
    """Return the device on which a network runs. The weights of an offloaded network are on another one."""
    own = next(network.parameters()).device
    if own.type == "meta" and not any("_hf_hook" in module.__dict__ for module in network.modules()):
        raise ValueError(f"{type(network).__name__} has no weights yet (it is on the meta device): load them first")
    return with_number(torch.device(getattr(owner, "_execution_device", None) or own))


def _repeat(network: nn.Module, method: str, args: tuple, kwargs: Mapping[str, Any]) -> ModelCall:
    return synthetic_calls.repeated_call(network, args, dict(kwargs))


def _innermost(module: nn.Module) -> tuple[Any, str]:
    """Return where a module's own forward is kept: by accelerate's hook, by the first hook of diffusers, or by itself.

    See `accelerate.hooks.add_hook_to_module` and `diffusers.hooks.HookRegistry.register_hook`.
    """
    if "_old_forward" in module.__dict__:
        return module, "_old_forward"
    for first in _diffusers_hooks(module)[:1]:
        return first, "forward" if getattr(first, "original_forward", None) is None else "original_forward"
    return module, "forward"


def _diffusers_hooks(module: nn.Module) -> list[Any]:
    return list(getattr(module.__dict__.get("_diffusers_hook"), "_fn_refs", ()))


def _put_back(module: nn.Module, ours: Callable) -> None:
    """Undo one replacement, even if accelerate or a hook of diffusers has wrapped it since."""
    before = getattr(ours, "inner", None)
    if module.__dict__.get("forward") is ours:
        module.__dict__.pop("forward")
        if before is not None:
            module.forward = before
        return
    hooks = ((hook, name) for hook in _diffusers_hooks(module) for name in ("forward", "original_forward"))
    for holder, name in ((module, "_old_forward"), *hooks):
        if getattr(holder, name, None) is ours:
            setattr(holder, name, before or MethodType(type(module).forward, module))


def _write(name: str, path: Path, graphs: Sequence[CompiledGraph]) -> SavedPart:
    data = write_graphs([StoredGraph.of(graph) for graph in graphs], Trust())
    write_whole(path, data)
    return SavedPart(name, path, len(graphs), len(data))


def _read(folder: Path) -> tuple[list[StoredGraph], list[GraphIdentity], str]:
    """Return the graphs of a folder, the graphs that it only lists, and the backend of both."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; save_pipe makes it")
    stored: list[StoredGraph] = []
    listed: list[GraphIdentity] = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            with open_regular(path) as file:
                contents = read_contents(file, Trust())
        except (GraphFileError, OSError) as error:
            log.warning("%s cannot be used; compiled instead: %s.", path, error)
            continue
        if contents.untrusted:
            text = "%s may not run here (%s), so its %d graphs are compiled instead."
            log.warning(text, path, contents.untrusted, len(contents.listed))
        stored += contents.graphs
        listed += contents.listed
    if not stored and not listed:
        raise GraphFileError(f"{folder} holds no graph file that can be used; save_pipe writes them")
    return stored, listed, [*stored, *listed][0].backend


def _load(name: str, network: nn.Module, stored: list[StoredGraph], listed: list[GraphIdentity]) -> LoadedPart:
    compiled = _part_of(network).compiled
    for reason in compiled.load(stored, keep=True):
        log.warning("%s: %s.", name, reason)
    if listed:
        compiled.compile_listed(listed, _log_progress)
    summary = compiled.summary()
    if compiled.pending and not summary.loaded:
        text = "%s: none of its graphs in the files is for the dtype and device it has now; it compiles when it runs."
        log.warning(text, name)
    return LoadedPart(name, summary.regions, summary.loaded, compiled.pending)


def _may_fit_later(networks: Iterable[nn.Module], graphs: Iterable[GraphIdentity]) -> bool:
    """Whether graphs are for regions of these classes. They may fit once the dtype or device changes."""
    classes = {type(region.module).__name__ for network in networks for region in find_regions(network)}
    return any(graph.spec.region in classes for graph in graphs)


def _regions_text(*graphs: Iterable[GraphIdentity]) -> str:
    return ", ".join(sorted({graph.spec.region for group in graphs for graph in group}))
