"""What equal regions of a model share: the graphs that serve their calls, and how each call is served.

A lookup has three answers: a plan to call a graph by, a refusal with its reason, or a miss. Nothing here compiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ..common.devices import is_another
from ..common.errors import one_line
from ..common.host import Host
from ..common.inner_tensors import plain_tensors
from ..common.reason import Reason, ReasonCode, Unsupported
from ..common.tensor_slots import tensor_slots
from ..compile_cache.graph_cache import MAX_SIGNATURES, CacheEntry
from ..identity.call_signature import (
    Call,
    CallSignature,
    ContextArguments,
    Place,
    bind,
    places_of_sizes,
    read,
    with_sizes,
)
from ..identity.fingerprint import Description
from ..identity.graph_spec import MEMORY_FORMATS
from ..identity.memory_format import has_format
from ..identity.object_arguments import Dimension
from ..tracing.frame_windows import WindowSizes

MAX_PLANS = 1024
"""Remembered argument shapes per kind of region; past it they are worked out again."""

MAX_BRANCHES = 4
"""Graphs for one signature: code that branches on a size gets one for each branch, and no more than this."""

MAX_CHUNKS = 16
"""The same for blocks that keep frames: chunks have one, two or four frames, and so have the frames that are kept."""

_SIZES_OUTSIDE = Reason(ReasonCode.SIZES_OUTSIDE)
_TOO_LARGE = Reason(ReasonCode.TOO_LARGE)
_MANY_SIGNATURES = Reason(ReasonCode.MANY_SIGNATURES, str(MAX_SIGNATURES))


@dataclass(frozen=True)
class Plan:
    """How calls with one set of argument shapes are served."""

    entry: CacheEntry
    order: tuple[int, ...]
    """Which of the call's tensors is the graph's n-th input."""
    relayout: tuple[tuple[int, torch.memory_format], ...]
    """Inputs that arrive in another layout than the graph was compiled for."""
    small_sizes: frozenset[str]
    """Sizes of these calls for which a graph that was checked at others is not yet checked."""
    few_frames: frozenset[str]
    """Those of them that are numbers of frames."""
    defaults: tuple[torch.Tensor, ...]
    """Tensors that the call leaves to the defaults of `forward`; they follow the call's own."""
    reads: frozenset[str]
    """Options that the traced code looked up and did not find. A call that has one runs eagerly."""
    writes: Mapping[str, Any]
    """What the region's code leaves in its options."""

    @property
    def is_stale(self) -> bool:
        """Whether the graph went out of use since the plan was made."""
        return self.entry.is_out or self.few_frames in self.entry.wrong_at


@dataclass(frozen=True)
class Refusal:
    """Calls with one set of argument shapes run eagerly."""

    reason: Reason
    is_stale = False
    defaults = ()


@dataclass(frozen=True)
class Miss:
    """There is no graph for calls of this signature and these shapes, and nobody has said that there will be none."""

    signature: CallSignature
    shapes: tuple[tuple[int, ...], ...]
    """The shapes of the call's tensors, in the order of the signature."""


@dataclass(eq=False)
class RegionKind:
    """What equal regions of one model share."""

    cls: type
    fingerprint: str
    string_constants: frozenset[str]
    context: ContextArguments
    device: torch.device
    """Where the model runs."""
    graphs: dict[str, list[CacheEntry]] = field(default_factory=dict)
    """By signature text. More than one if sizes once fixed turned out not to be."""
    refusals: dict[str, Reason] = field(default_factory=dict)
    """By signature text: why there is no graph, or no other than there are."""
    plans: dict[Any, Plan | Refusal] = field(default_factory=dict)
    """By argument shapes."""
    size_places: list[dict[Place, Dimension | None]] = field(default_factory=list)
    """Where calls have ints that are sizes, by the signatures seen so far."""
    window_sizes: WindowSizes = field(default_factory=dict)
    """How many entries of its list of frames the block uses: under its own fingerprint, once that is known."""
    closed: Reason | None = None
    """Why no call at all can be compiled."""

    @classmethod
    def of(cls, module: nn.Module, description: Description, host: Host, device: torch.device) -> RegionKind:
        return cls(
            type(module),
            description.fingerprint,
            description.string_constants,
            ContextArguments(type(module), host.context_arguments),
            device,
            closed=description.obscure or _unusual_weight(module, host),
        )

    @classmethod
    def closed_for(cls, reason: Reason, path: str, module: nn.Module, device: torch.device) -> RegionKind:
        """Return a kind for one region of which no call can be compiled."""
        context = ContextArguments(type(module), frozenset())
        return cls(type(module), f"{path}: {reason}", frozenset(), context, device, closed=reason)

    def add(self, signature_text: str, entry: CacheEntry) -> None:
        """Use a graph for calls of this signature from now on."""
        others = (other for other in self.graphs.get(signature_text, ()) if not other.is_evicted and other is not entry)
        self.graphs[signature_text] = [*others, entry]
        self._note_sizes(signature_text)
        self.refusals.pop(signature_text, None)
        self.plans.clear()

    def mark_eager(self, signature_text: str, reason: Reason) -> None:
        """Run calls of this signature eagerly from now on, but for sizes that a graph serves."""
        self.refusals[signature_text] = reason
        self._note_sizes(signature_text)
        self.plans.clear()

    def _note_sizes(self, signature_text: str) -> None:
        places = places_of_sizes(signature_text)
        if places and places not in self.size_places:
            self.size_places.append(places)

    def _readings(self) -> list[dict[Place, Dimension | None]]:
        """Return where a call may have ints that are sizes: where calls of one graph do, or those of any."""
        if len(self.size_places) < 2:
            return self.size_places
        return [*self.size_places, dict(chain.from_iterable(places.items() for places in self.size_places))]

    def evict(self, keys: Set[str]) -> None:
        """Forget graphs; calls that want them ask for them again. Not while a call runs."""
        for text, entries in list(self.graphs.items()):
            kept = [entry for entry in entries if entry.retired or entry.graph.key not in keys]
            if kept:
                self.graphs[text] = kept
            else:
                del self.graphs[text]
        self.plans.clear()

    def lookup(
        self, args: tuple, kwargs: Mapping[str, Any], patch_points: str
    ) -> tuple[Plan | Refusal | Miss, list[torch.Tensor]]:
        """Return how a call is served, and its tensors as the plan counts them.

        `patch_points` are the host's patches that act in this call, as `Host.patch_points` writes them.
        """
        token, tensors = self.context.token(args, kwargs)
        token = (token, _repeats(tensors), patch_points)
        found = self.plans.get(token)
        if found is None or found.is_stale:
            found = self._find(args, kwargs, patch_points, tensors)
            if isinstance(found, Miss):
                return found, tensors
            if len(self.plans) >= MAX_PLANS:
                self.plans.clear()
            self.plans[token] = found
        if found.defaults:
            tensors = [*tensors, *found.defaults]
        return found, tensors

    def _find(
        self, args: tuple, kwargs: Mapping[str, Any], patch_points: str, tensors: Sequence[torch.Tensor]
    ) -> Plan | Refusal | Miss:
        if self.closed:
            return Refusal(self.closed)
        try:
            signature, ordered = self._read(bind(self.cls, args, kwargs, self.context.names), patch_points)
        except Unsupported as error:
            return Refusal(error.reason)
        if any(is_another(tensor.device, self.device) for tensor in ordered):
            return Refusal(Reason(ReasonCode.CALL_DEVICE))
        shapes = tuple(tuple(t.shape) for t in ordered)
        entries = self.graphs_of(signature.text)
        if entry := next((e for e in entries if e.fits(shapes)), None):
            return Refusal(entry.retired) if entry.retired else _plan(entry, tensors, ordered)
        if any(entry.graph.spec.is_exceeded_by(shapes) for entry in entries):
            return Refusal(_TOO_LARGE)
        if signature.text in self.refusals:
            return Refusal(self.refusals[signature.text])
        if len(entries) >= (MAX_CHUNKS if any(e.graph.spec.frames for e in entries) else MAX_BRANCHES):
            return Refusal(_SIZES_OUTSIDE)
        return Miss(signature, shapes) if self.has_room(signature.text) else Refusal(_MANY_SIGNATURES)

    def _read(self, call: Call, patch_points: str) -> tuple[CallSignature, list[torch.Tensor]]:
        """Return a call's signature and tensors; with ints as sizes, if such calls are settled, patched or not."""
        plain = read(call, patch_points=patch_points)
        if plain[0].text in self.graphs:
            return plain
        readings = [read(call, patch_points=patch_points, sizes=places) for places in self._readings()]
        for known in (self.graphs, self.refusals):
            for text_of in (attrgetter("text"), attrgetter("unpatched")):
                if sized := next((each for each in readings if text_of(each[0]) in known), None):
                    return sized
        return plain

    def has_room(self, signature_text: str) -> bool:
        """Whether calls of a signature may have a graph of their own."""
        return signature_text in self.graphs or len(self.graphs) + len(self.refusals) < MAX_SIGNATURES

    def serves(self, signature_text: str, shapes: Sequence[Sequence[int]]) -> bool:
        """Whether there is a graph for calls of a signature with these shapes, also if it is retired."""
        return any(entry.fits(shapes) for entry in self.graphs_of(signature_text))

    def graphs_of(self, signature_text: str) -> list[CacheEntry]:
        """Return the graphs for calls of a signature, also those that are retired."""
        return [entry for entry in self.graphs.get(signature_text, ()) if not entry.is_evicted]

    def has_resolved(self, miss: Miss) -> bool:
        """Whether calls that were a miss have a graph by now, or a reason to have none."""
        text = miss.signature.text
        if text in self.graphs and text not in self.refusals:
            return self.serves(text, miss.shapes)
        return self.is_settled(text)

    def is_settled(self, signature_text: str) -> bool:
        """Whether calls of a signature have a graph, or a reason to have none."""
        readings = [signature_text, *(with_sizes(signature_text, places) for places in self._readings())]
        return any(map(self._is_known, readings))

    def _is_known(self, signature_text: str) -> bool:
        return bool(self.graphs_of(signature_text)) or signature_text in self.refusals


def _plan(entry: CacheEntry, tensors: Sequence[torch.Tensor], ordered: Sequence[torch.Tensor]) -> Plan | Refusal:
    """Return how a graph serves a call with these tensors; `ordered` are the graph's inputs among them."""
    spec, shapes = entry.graph.spec, [t.shape for t in ordered]
    given = {id(tensor) for tensor in tensors}
    defaults = tuple({id(t): t for t in ordered if id(t) not in given}.values())
    everything = [*tensors, *defaults]
    order = tuple(next(i for i, t in enumerate(everything) if t is tensor) for tensor in ordered)
    formats = [MEMORY_FORMATS[item.memory_format] for item in spec.inputs]
    relayout = tuple(
        (i, fmt) for i, (t, fmt) in enumerate(zip(ordered, formats, strict=True)) if not has_format(t, fmt)
    )
    try:
        writes = spec.left_behind(shapes)
        spec.frame_writes  # noqa: B018  raises here if a file's text makes no sense, and not within a call
    except Exception as error:  # a file says what it likes
        return Refusal(Reason(ReasonCode.CONTRACT, one_line(error)))
    small, few = spec.small_sizes(shapes), spec.few_frames(shapes)
    return Plan(entry, order, relayout, small, few, defaults, frozenset(spec.reads), writes)


def _unusual_weight(module: nn.Module, host: Host) -> Reason | None:
    """Weights of a type that the host does not know decide for themselves what an operator does to them."""
    try:
        plain_tensors((group[name] for _, (group, name) in tensor_slots(module)), host.inner_tensors)
    except Unsupported as error:
        return error.reason
    return None


def _repeats(tensors: list[torch.Tensor]) -> tuple[int, ...] | None:
    """Return which arguments are one and the same tensor: a plan for f(x, x) is none for f(x, y)."""
    places = {id(tensor): place for place, tensor in enumerate(tensors)}
    return None if len(places) == len(tensors) else tuple([places[id(tensor)] for tensor in tensors])
