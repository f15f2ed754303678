"""What the compiler must know of the program a model lives in.

The default host is plain PyTorch. A host that passes bookkeeping through its blocks, hangs functions on
weights or lets people cancel says so by overriding a method here; nothing else in the compiler asks
where it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from .patches import PatchCall, RecordedPatches


class Host:
    """A PyTorch program without habits of its own."""

    context_arguments: frozenset[str] = frozenset()
    """Names of arguments that carry bookkeeping (step counts, patches), never data. They stay out of graphs."""

    volatile_attributes: frozenset[str] = frozenset()
    """Instance attributes the host sets on modules while it manages memory. They are not part of a region's
    identity, and a truthy one named in `weight_hooks` keeps a region eager."""

    weight_hooks: frozenset[str] = frozenset()
    """Those of `volatile_attributes` that change weights on the fly when they are set."""

    traced_attributes: frozenset[str] = frozenset()
    """Those of `volatile_attributes` that a trace must see: with them a module reads its weights in another way, such
    as cast to the dtype of its input, and computes the same."""

    infrastructure: tuple[str, ...] = ()
    """Python module prefixes whose code moves tensors and settings about without deciding what a region
    computes. A region's fingerprint does not follow calls into them, nor read their globals."""

    layer_modules: tuple[str, ...] = ()
    """Python modules of the host's own layers. Their code is part of a fingerprint; their globals are bookkeeping."""

    settings: frozenset[str] = frozenset()
    """Instance attributes that people change on a model in use (adapters, processors). A change is followed."""

    weights_say_device: bool = True
    """Whether weights that lie on another device than before mean that the model runs there now. Where the host
    brings them to the device itself, call by call, they do not."""

    arranged_on: frozenset[str] = frozenset({"cuda"})
    """Types of device for which graphs of regions that it `arranges` take weights in channels_last."""

    def is_volatile(self, name: str) -> bool:
        """Whether an attribute of a module is one that the host sets while it manages memory."""
        return name in self.volatile_attributes

    def arranges(self, region: nn.Module) -> bool:
        """Whether the weights of a region's convolutions are arranged for as long as its model runs.

        Their layout is then no part of what the region is.
        """
        return False

    def layer_settings(self, module: nn.Module) -> frozenset[str] | None:
        """Return the attributes that decide what a layer of the host's own computes; None for any other module.

        The host marks its layers while it loads, casts and offloads them, and no list of such marks stays complete.
        """
        return None

    def setting(self, name: str, value: Any) -> Any:
        """Return the part of an instance attribute that decides what a region computes."""
        return value

    def stand_in(self, name: str, strings: frozenset[str], hooks: str) -> Any:
        """Return what a context argument is while a region is traced.

        `strings` are the string constants of the region's code: what keys it can possibly look up. `hooks` are as
        the method of that name gave them, or from a file that need not be trusted. Raises what it likes.
        """
        raise KeyError(name)

    def hooks(self, context: Mapping[str, Any], strings: frozenset[str]) -> str:
        """Return which patches of this call can be operators inside a graph, in a canonical form; empty if none.

        Calls with other hooks have other graphs. What `reaches` names keeps the region eager anyhow.
        """
        return ""

    def patch_call(self, context: Mapping[str, Any]) -> PatchCall:
        """Return what calls this call's patches for those operators."""
        raise KeyError("a host that names no hooks has no patches")

    def record_patches(self, context: Mapping[str, Any], hooks: str) -> RecordedPatches:
        """Return what calls this call's patches for an eager region and then answers for them to its graph."""
        raise KeyError("a host that names no hooks has no patches")

    def leave_behind(self, context: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Leave in a call's context arguments what the region's own code would have left there."""

    def patch_names(self, context: Mapping[str, Any], hooks: str) -> frozenset[str]:
        """Return names of the functions behind the hooks; a graph is checked once with each."""
        return frozenset()

    def adapt(self, twin: nn.Module) -> None:
        """Change a skeleton before it is traced, where a part of it must not be traced through."""

    def reaches(self, context: Mapping[str, Any], strings: frozenset[str]) -> str | None:
        """Return why this call's context arguments would change what a region computes, or None."""
        return None

    def unrepeatable(self, context: Mapping[str, Any], strings: frozenset[str]) -> str | None:
        """Return why a recorded call of the network may not stand for one with these context arguments, or None.

        `strings` are the string constants of the network's code.
        """
        return "a host that does not say what its calls depend on"

    def steps(self, context: Mapping[str, Any]) -> int:
        """Return how many steps the sampling has that a call with these context arguments belongs to."""
        return 0

    def hook_acts(self, hook: Callable) -> bool:
        """Whether a hook on a module inside a region does anything in this call."""
        return True

    def check_cancelled(self) -> None:
        """Raise the host's own exception if the person asked to stop."""

    def is_cancellation(self, error: BaseException) -> bool:
        """Whether an exception is what the host raises to cancel. Layers of a host may raise it, on any thread."""
        return False

    def give_back_cancellation(self) -> None:
        """Let the person's cancellation, which was raised on a thread of ours, reach the prompt that it is for."""

    def is_cancelled(self) -> bool:
        """Whether a cancellation waits for its prompt."""
        return False

    def module_is_clean(self, module: nn.Module) -> bool:
        """Whether a module's `forward` is the one of its class."""
        replaced = module.__dict__.get("forward")
        return replaced is None or getattr(replaced, "__func__", None) is type(module).forward
