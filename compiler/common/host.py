"""What the compiler must know about the program that a model runs in.

The default host is plain PyTorch. A host that passes bookkeeping through its blocks, attaches functions to weights
or lets people cancel overrides methods of this class. Nothing else in the compiler depends on the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from .inner_tensors import TENSOR_TYPES, InnerTensors
from .reason import Reason, ReasonCode, Unsupported
from .torch_compat import FakeTensor
from .weight_source import NetworkWeights, ResidentWeights

PatchCall = Callable[..., torch.Tensor]
"""Calls the patch for a hook: f(hook, constants, *tensors, **arguments) -> the patch's result.

Its attribute `unforeseen`, if it has one, names hooks that act although the graph does not say so.
"""


@dataclass(frozen=True)
class FrameCache:
    """The names of two arguments by which blocks of a video VAE keep frames between the chunks of a video."""

    entries: str
    """A list that all blocks share. Each block reads and writes some entries of its own."""
    cursor: str
    """A list of one int: where the block's entries begin. The block moves it to where they end."""


@dataclass(frozen=True)
class FrameCarry:
    """The names of two arguments by which blocks of a video VAE hand frames on from one chunk to the next."""

    given: str
    """A list from whose front each block takes what it put for this chunk; None for the first chunk."""
    left: str
    """A list to whose end each block puts what it will take for the next chunk; None for the last chunk."""


@dataclass(frozen=True)
class FrameMemory:
    """The name of an argument by which blocks of a video VAE keep frames from one chunk to the next."""

    entries: str
    """A dictionary that all blocks share. Each module of a block keeps one entry, under itself as the key."""


FrameKeeping = FrameCache | FrameCarry | FrameMemory
"""By which arguments blocks keep frames."""


class RecordedPatches(Protocol):
    """A call's patches, which run once, for an eager region. A graph then gets the results that they returned."""

    error: str
    """How the graph's arguments to a patch differ from the eager region's; empty if they agree."""

    @property
    def context(self) -> Mapping[str, Any]:
        """The context arguments for the eager region."""
        ...

    def hand_over(self) -> None:
        """Copy what the region left in its context into the call's own context."""
        ...

    def __call__(self, hook: str, constants: Mapping[str, Any], *tensors: torch.Tensor) -> torch.Tensor: ...


class Host:
    """A plain PyTorch program."""

    folder: Path | None = None
    """The folder of the host's code. What its subfolder `rules` holds decides what a graph is, and is part of each
    graph's key. The rest decides which graphs a model needs. None for a host without code of its own."""

    context_arguments: frozenset[str] = frozenset()
    """Names of arguments that carry bookkeeping (step counts, patches) and no data. They stay out of graphs."""

    volatile_attributes: frozenset[str] = frozenset()
    """Instance attributes that the host sets on modules while it manages memory. They are not part of a region's
    identity. One that `weight_hooks` names keeps a region eager while it is truthy, unless the host applies it."""

    weight_hooks: frozenset[str] = frozenset()
    """Those of `volatile_attributes` that change weights on the fly when they are set."""

    traced_attributes: frozenset[str] = frozenset()
    """Those of `volatile_attributes` that a trace must see. They change how a module reads its weights, for instance
    cast to the dtype of its input, but not what it computes."""

    infrastructure: tuple[str, ...] = ()
    """Prefixes of Python modules whose code moves tensors and settings, but does not decide what a region
    computes. A region's fingerprint does not follow calls into them, and does not read their globals."""

    layer_modules: tuple[str, ...] = ()
    """Python modules of the host's own layers. Their code is part of a fingerprint; their globals are bookkeeping."""

    settings: frozenset[str] = frozenset()
    """Instance attributes that people change on a model in use (adapters, processors). A change is followed."""

    weights_say_device: bool = True
    """Whether weights on another device mean that the model runs there now. They do not if the host brings
    weights to the device call by call."""

    channels_last_on: frozenset[str] = frozenset({"cuda"})
    """Device types on which graphs take weights in channels_last, for regions that the host `uses_channels_last`."""

    frame_cells: str = ""
    """The attribute in which modules of video VAEs keep frames between the chunks of a video: a dictionary with one
    entry for each thread."""

    def is_volatile(self, name: str) -> bool:
        """Whether the host sets this attribute of a module while it manages memory, or keeps frames in it."""
        return name in self.volatile_attributes or name == self.frame_cells

    def uses_channels_last(self, region: nn.Module) -> bool:
        """Whether the weights of a region's convolutions are brought into channels_last while its model runs.

        Their layout is then not part of the region's fingerprint.
        """
        return False

    def layer_settings(self, module: nn.Module) -> frozenset[str] | None:
        """Return the attributes that decide what one of the host's own layers computes; None for any other module.

        The host sets more attributes on its layers while it loads, casts and offloads them. A list of those to leave
        out would not stay complete.
        """
        return None

    def weight_dtype(self, layer: nn.Module, name: str, tensor: torch.Tensor) -> torch.dtype:
        """Return the dtype in which a layer's weight reaches the layer's code.

        A host that casts while it loads may keep the weight in another.
        """
        return tensor.dtype

    def inner_tensors(self, tensor: torch.Tensor) -> InnerTensors | None:
        """Return what a weight consists of; None for one that stands for itself.

        Raises Unsupported for one of a type or layout that the host does not know.
        """
        if type(tensor) in TENSOR_TYPES or isinstance(tensor, FakeTensor):
            return None
        raise Unsupported(ReasonCode.WEIGHT_TYPE, type(tensor).__name__)

    def with_inner_tensors(self, weight: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a weight like this one that consists of other tensors, in the order of `inner_tensors`."""
        raise KeyError("a host that knows no such weights makes none")

    def traced_functions(self, is_lenient: bool = False) -> AbstractContextManager[Any]:
        """Enter around code that runs with fake tensors inside of weights that consist of others.

        A strict one, for a trace, raises Unsupported for what the host's own class would answer by a choice that a
        graph must not make. A lenient one is for code whose results do not matter.
        """
        return nullcontext()

    def weight_hooks_of(self, attributes: Mapping[str, Any]) -> frozenset[str]:
        """Return those of a layer's attributes that change its weights on the fly when they are set."""
        return self.weight_hooks & attributes.keys()

    def without_allocation_scopes(self) -> AbstractContextManager[None]:
        """Enter around a call of the network, real or ahead: the host must not record what is allocated in it."""
        return nullcontext()

    def memory_left_free(self) -> int:
        """Return how many bytes of a GPU the host leaves free. It gives weights up if it cannot."""
        return 0

    def network_weights(self, network: nn.Module, device: torch.device) -> NetworkWeights:
        """Return where the weights of a network that runs on this device come from."""
        return ResidentWeights()

    def applies_weight_function(self, attributes: Mapping[str, Any], name: str, in_place: bool = False) -> bool:
        """Whether a weight function of a layer, set under this name, is applied by whoever brings the weight.

        `in_place` asks whether what it makes then lies where the weight lies. A function that nobody applies keeps
        the region eager. `attributes` are the layer's.
        """
        return False

    def is_own_code(self, module: str) -> bool:
        """Whether a Python module is the host's own. Code of others may read any attribute of the host's layers."""
        return True

    def setting(self, name: str, value: Any) -> Any:
        """Return the part of an instance attribute that decides what a region computes."""
        return value

    def placeholder_for(self, name: str, string_constants: frozenset[str], patch_points: str) -> Any:
        """Return the placeholder for a context argument while a region is traced.

        `string_constants` are those of the region's code, that is, the keys that it can look up. `patch_points` come
        from the method of that name, or from a file that need not be trusted. May raise any exception.
        """
        raise KeyError(name)

    def patch_points(self, context: Mapping[str, Any], string_constants: frozenset[str]) -> str:
        """Return which patches of this call can be operators inside a graph, in a canonical form; empty if none.

        Calls with different patch points need different graphs. A reason from `unsupported_patch` keeps the region
        eager in any case.
        """
        return ""

    def patch_call(self, context: Mapping[str, Any]) -> PatchCall:
        """Return the function by which those operators call this call's patches."""
        raise KeyError("a host that names no patch points has no patches")

    def record_patches(self, context: Mapping[str, Any], patch_points: str) -> RecordedPatches:
        """Return patches that run for an eager region, and then return the same results to its graph."""
        raise KeyError("a host that names no patch points has no patches")

    def operator_for(self, function: str) -> Callable:
        """Return what a graph calls in place of a function that a block is given, by its `module:name`.

        Raises Unsupported for a function that nothing can take the place of.
        """
        raise Unsupported(ReasonCode.ARGUMENT_TYPE, f"function ({function.replace(':', '.')})")

    def frame_cache(self, cls: type) -> FrameKeeping | None:
        """Return by which arguments blocks of a class keep frames between calls; None for blocks that keep none."""
        return None

    def apply_writes(self, context: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Write to a call's context arguments what the region's own code would have written."""

    def patch_names(
        self, context: Mapping[str, Any], patch_points: str, string_constants: frozenset[str]
    ) -> frozenset[str]:
        """Return the names of the functions that a graph calls in this call: those behind the patch points, and others
        that any graph of code with these string constants calls. A graph is checked once with each function.
        """
        return frozenset()

    def prepare_for_tracing(self, weightless: nn.Module) -> None:
        """Change a weightless copy before it is traced, if parts of it must not be traced through."""

    def unsupported_patch(self, context: Mapping[str, Any], string_constants: frozenset[str]) -> Reason | None:
        """Return why this call's context arguments would change what a region computes, or None."""
        return None

    def unsupported_read(self, context: Mapping[str, Any], names: frozenset[str]) -> Reason | None:
        """Return why a graph cannot serve this call: it was traced without an option of one of these names."""
        return None

    def can_be_captured(self, operator: str) -> bool:
        """Whether a CUDA graph may capture an operator, such as "aten.mul". It neither waits nor keeps memory."""
        return True

    def precision(self, module: nn.Module) -> torch.dtype | None:
        """Return the dtype to whose precision layers of a module round what they are given, or None if none does.

        A graph that fuses keeps more digits before such a layer than eager does, so some values are rounded otherwise.
        """
        return None

    def keeps_memory_for_streams(self, operator: str) -> bool:
        """Whether an operator allocates memory at its first run on a stream: it must run there before a capture."""
        return False

    def capture_blocker(self, context: Mapping[str, Any], string_constants: frozenset[str]) -> Reason | None:
        """Return why a CUDA graph of the network must not replay a call with these context arguments, or None.

        `string_constants` are those of the network's code.
        """
        return Reason(ReasonCode.HOST_SILENT)

    def runs_inside(self, context: Mapping[str, Any]) -> bool:
        """Whether other code runs inside of this call, before the regions. It may change them until the call ends."""
        return False

    def is_comparable(self, context: Mapping[str, Any]) -> bool:
        """Whether this call takes as long as others of its size: other code may leave a part of it out."""
        return not self.runs_inside(context)

    def steps(self, context: Mapping[str, Any]) -> int:
        """Return the number of steps of the sampling to which a call with these context arguments belongs."""
        return 0

    def hook_acts(self, hook: Callable) -> bool:
        """Whether a hook on a module inside a region does anything in this call."""
        return True

    def check_cancelled(self) -> None:
        """Raise the host's own exception if the person asked to stop."""

    def is_cancellation(self, error: BaseException) -> bool:
        """Whether the host raises this exception to cancel. A host's layers may raise it on any thread."""
        return False

    def return_cancellation(self) -> None:
        """Return a cancellation that was raised on a thread of ours to the prompt that it is meant for."""

    def is_cancelled(self) -> bool:
        """Whether a cancellation is waiting for its prompt."""
        return False

    def class_recipe(self, cls: type) -> tuple[Callable, tuple] | None:
        """Return a function and its arguments that make a class again in another process, or None.

        Asked for classes that cannot be imported by their name.
        """
        return None

    def module_is_clean(self, module: nn.Module) -> bool:
        """Whether a module runs the `forward` of its class."""
        replaced = module.__dict__.get("forward")
        return replaced is None or getattr(replaced, "__func__", None) is type(module).forward
