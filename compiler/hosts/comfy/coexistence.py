"""Living beside other extensions in one ModelPatcher: what is ours, what is theirs, and what to leave alone."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import nn

from ...identity.regions import Region, find_regions, is_torch_compiled
from . import comfy_compat
from .synthetic_prompts import ENCODE, is_of_other_sense

CALLBACKS_KEY = "compiled_graphs"
"""Key of our callbacks in a patcher, which another copy of this extension uses as well."""

_PACKAGE = "compiled_graphs"
_OF_OLDER_COPIES = frozenset({"entrance.Entrance", "entrance.CodingEntrance"})
"""Classes of a copy of this extension that does not mark them yet."""


def clone_without_ours(patcher: Any) -> Any:
    """Return a clone without what an earlier node of ours put into the patcher: the later node decides."""
    clone = patcher.clone()
    clone.model_options = _own_containers(patcher.model_options)
    take_ours_out(clone)
    return clone


def take_ours_out(patcher: Any) -> None:
    """Take out of a patcher what a node of ours put into it."""
    comfy_compat.forget_callbacks(patcher, CALLBACKS_KEY)
    for name, patch in list(patcher.object_patches.items()):
        if is_ours(patch):
            del patcher.object_patches[name]
            if patch.inner is not None:
                patcher.object_patches[name] = patch.inner


def _own_containers(options: Any) -> Any:
    """Copy a patcher's options as newer cores do: other extensions' objects in them are not copied.

    Cores of 2025 copy wrappers and patches with what they remember, and a node that resets its own reaches no copy.
    """
    if type(options) is dict:
        return {name: _own_containers(value) for name, value in options.items()}
    if type(options) is list:
        return [_own_containers(value) for value in options]
    return options


def is_ours(forward: Any) -> bool:
    """Whether an object patch is one of this extension, of which two copies may be installed."""
    cls = type(forward)
    name = f"{cls.__module__.rpartition('.compiler.')[2]}.{cls.__qualname__}"
    return getattr(cls, "package", None) == _PACKAGE or name in _OF_OLDER_COPIES


def set_torch_compile_aside(clone: Any) -> bool:
    """Take out what earlier nodes hung into a clone to run it, or blocks of it, by torch.compile.

    Core's TorchCompileModel adds a wrapper with a key, or an object patch before 2025; other nodes add object
    patches of blocks. Two compilers for one block would be neither's.
    """
    compiled = [
        n for n, patch in clone.object_patches.items() if isinstance(patch, nn.Module) and is_torch_compiled(patch)
    ]
    for name in compiled:
        del clone.object_patches[name]
    is_wrapped = comfy_compat.take_torch_compile_out(clone)
    return bool(compiled) or is_wrapped


def replaces_network(patcher: Any) -> bool:
    """Whether another node has the model run another network than its own. Our wrapper would run its own."""
    patch = patcher.object_patches.get("diffusion_model")
    return patch is not None and not is_torch_compiled(patch)


def undo_network_first(patcher: Any) -> None:
    """Have ComfyUI put the model's own network back before it takes our wrapper out of that.

    It undoes object patches in the order in which it made them. If another node has replaced the network after us, the
    forward that we had replaced would get into the other network.
    """
    backup = getattr(patcher, "object_patches_backup", {})
    own = backup.get("diffusion_model")
    if own is not None and is_ours(vars(own).get("forward")):
        others = {name: value for name, value in backup.items() if name != "diffusion_model"}
        backup.clear()
        backup.update({"diffusion_model": own, **others})


def free_regions(clone: Any, network: nn.Module, prefix: str, methods: Iterable[str]) -> tuple[list[Region], int]:
    """Return the regions whose `forward` nobody else replaces, and how many somebody does."""
    regions = [region for region in find_regions(network) if region.path and is_reached(region, methods)]
    before = _parts_before_sampling(clone.model, network)
    regions = [region for region in regions if region.path.partition(".")[0] not in before]
    free = [r for r in regions if foreign_forward(clone, r.module, f"{prefix}{r.path}.forward", "forward") is None]
    return free, len(regions) - len(free)


def is_reached(region: Region, methods: Iterable[str]) -> bool:
    """Whether methods of a network run a region.

    A VAE's two halves are told apart by name: "decoder", "taesd_encoder", "first_stage.encoder" ... So are the parts of
    a text encoder that look at images.
    """
    if ENCODE in methods:
        return not is_of_other_sense(region.path)
    unwanted = {"decode", "encode"} - set(methods)
    return len(unwanted) != 1 or f"{unwanted.pop()}r" not in region.path


def methods_without_regions(network: nn.Module, methods: Collection[str]) -> list[str]:
    """Return those of a VAE's methods that run no region, if there are others."""
    if len(methods) == 1:
        return []
    regions = [region for region in find_regions(network) if region.path]
    return [method for method in methods if not any(is_reached(region, (method,)) for region in regions)]


def _parts_before_sampling(model: Any, network: nn.Module) -> frozenset[str]:
    """Return names among which are the parts of a network that prepare a text, once for each sampling.

    Their blocks (in LTX-2, Anima and MiniMax H3) run outside of the network's `forward`, and too rarely to be worth a
    compile.
    """
    if comfy_compat.TEXT_METHOD not in _names_in(type(model), comfy_compat.CONDITIONS):
        return frozenset()
    return _names_in(type(network), comfy_compat.TEXT_METHOD)


def _names_in(cls: type, method: str) -> frozenset[str]:
    """Return the names of attributes and globals that a method's code mentions; none if there is no such code."""
    code = getattr(getattr(cls, method, None), "__code__", None)
    return frozenset(code.co_names if code else ())


def foreign_forward(clone: Any, module: nn.Module, name: str, method: str) -> Callable | None:
    """Return what another extension has put in the place of a module's method, as a patch or directly.

    `get_model_object` looks past the patches of another clone that is loaded just now. Of an earlier Compile
    Model, only what it found there counts; the later node decides.
    """
    found = clone.get_model_object(name)
    if is_ours(found):
        return found.inner
    return None if getattr(found, "__func__", None) is getattr(type(module), method) else found


def tidy_after(patch: Callable, module: nn.Module, method: str) -> None:
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
