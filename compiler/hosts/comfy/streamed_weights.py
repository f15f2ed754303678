"""Weights that ComfyUI brings to the device when a layer runs: dynamic VRAM (0.18 on), and its low-VRAM modes.

Under dynamic VRAM a layer's weights have a place in a range of GPU addresses (VBAR), whose pages are filled while there
is room and emptied when there is none. A page that is faulted is pinned until it is unpinned; the fault returns a
signature that changes when the page was emptied in between. The addresses never change. So:

- while a network runs, one fault holds all of its pages, if they are there, and one comparison tells whether they are
  filled;
- a region's graph takes the weights from there. CUDA graphs that have their addresses stay valid for good;
- if some are not, each region's weights come before its call, and the next region's while it runs: through a ring
  (`staging_ring`) where they find no room in their pages, and else by ComfyUI's own functions. What memory there is
  then holds a share of every region's weights (`kept_weights`).

Layers without a place, of the low-VRAM modes, are cast by ComfyUI's function as well, one region at a time.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from ...common.host import Host
from ...common.inner_tensors import TENSOR_TYPES
from ...common.reason import Reason, ReasonCode, Unsupported
from ...common.tensor_slots import Slot, owned_tensor_slots
from ...common.weight_source import RESIDENT
from ...identity.low_rank import is_factor
from ...identity.memory_format import has_layouts, stride_in
from . import comfy_compat
from .hidden_errors import memory_errors_raised
from .kept_weights import KeptWeights
from .staging_ring import Staging, StagingRing, Timing
from .vbar_places import (
    ARRIVED,
    FUNCTIONS,
    LORA_FUNCTIONS,
    PLACE,
    SIGNATURE,
    Place,
    fault,
    is_evicted_soon,
    is_resident,
    is_same,
    resident_bytes,
    span_of,
    unpin,
    without_evictions,
)

SMALL_BYTES = 16 * 2**10
"""Layers up to this size get no place: `ModelPatcherDynamic.load` moves their weights as they are."""
FILL_BYTES = 256 * 2**20
"""Weights that are filled in at a time. Those whose dtype changes pass through a buffer of that size."""
NO_BUFFER = ("VRAM grow failed", "VRAM reservation failed")
"""How comfy-aimdo's `VRAMBuffer` says that a buffer for casts finds no memory, with a plain RuntimeError."""
TIMED_CALL = 2
"""Of each sampling."""
MOST_AHEAD = 4
"""Regions whose weights are on their way at a time. Regions that have little to bring would all be begun at once."""


_known: weakref.WeakKeyDictionary[nn.Module, StreamedWeights] = weakref.WeakKeyDictionary()


def weights_of(network: nn.Module, device: torch.device, host: Host) -> StreamedWeights:
    """Return the weights of a network: one object for all clones of a patcher, which share the network's pages."""
    known = _known.get(network)
    if known is None or known.device != device:
        known = _known[network] = StreamedWeights(network, device, host)
    return known


class StreamedWeights:
    """The weights of one network. Refers to the network and its layers weakly."""

    def __init__(self, network: nn.Module, device: torch.device, host: Host) -> None:
        self.device = device
        self.host = host
        self.can_stream = True
        """Whether this ComfyUI has what streamed weights are brought by."""
        self.channels_last = ChannelsLastInPlace(self)
        self._network = weakref.ref(network)
        self._sources: weakref.WeakSet[StreamedSource] = weakref.WeakSet()
        self._layers: list[weakref.ref[nn.Module]] = []
        self._attributes: list[dict[str, Any]] = []
        """Of these layers, which have a place in the VBAR."""
        self._span: Place | None = None
        """The range of the VBAR in which they all lie."""
        self._signature: Any = None
        """Of that range, when all of them had arrived."""
        self._kept = KeptTensors()
        self._moves = 0
        """Changes of addresses so far."""
        self._forms: list[tuple] = []
        self._crowded: int | None = None
        """Calls of this size or more had too little memory beside the weights."""
        self._has_room: bool | None = None
        """Whether all regions of the running call found room for their weights; None if none has asked."""
        self._fits = False
        """The same of the call before: what is missing are the pages of layers that nobody has called."""
        self._calls = 0
        """Of this sampling so far."""
        self._running = 0
        self._size = 0
        """Of the running call."""
        self._lock = threading.RLock()
        self.ring = StagingRing(device)
        self.kept = KeptWeights()
        self.ahead = Ahead()

    def of(self, region: nn.Module) -> StreamedSource:
        """Return the source of one region's weights."""
        source = StreamedSource(self, region)
        self._sources.add(source)
        return source

    def follow(self) -> None:
        """See which layers have a place in a VBAR; a load before each sampling may change it."""
        network = self._network()
        if network is None:
            return
        layers = [layer for layer in network.modules() if PLACE in vars(layer)]
        before, self._attributes = self._attributes, [vars(layer) for layer in layers]
        places = [attributes[PLACE] for attributes in self._attributes]
        if list(map(id, before)) != list(map(id, self._attributes)) or span_of(places) != self._span:
            self._layers = [weakref.ref(layer) for layer in layers]
            self._span = span_of(places)
            self._signature = None
        self.can_stream = comfy_compat.can_stream()
        if layers:
            self._kept.follow(network, self.device)
        for source in list(self._sources):
            source.follow()
        self.ring.reserve(max((source.size for source in self._sources), default=0))

    def begin_sampling(self) -> None:
        """Keep weights, and memory that they pass through, until `end_sampling`."""
        self.ring.open()
        self.kept.open()
        self.kept.plan_again(*self._regions())
        self._calls = 0

    def end_sampling(self) -> None:
        """Give that memory back."""
        self.ahead.drop()
        self.kept.close()
        self.ring.close()
        self._let_go()

    @property
    def is_held(self) -> bool:
        """Whether all streamed weights are on the device, and stay there during this call."""
        return self._running > 0

    @property
    def places(self) -> object | None:
        """A token for the addresses of all weights: `RESIDENT`, a number, or None where they do not last."""
        if not self._attributes:
            return RESIDENT
        return self._moves if self.is_held else None

    @contextmanager
    def running(self, size: int) -> Iterator[None]:
        """Hold the weights on the device during a call, if they are there; if not, each region has its own brought."""
        is_held = self._span is not None and self.can_stream and self._hold(size)
        self._has_room = None
        self._calls += 1
        self._size = size
        if is_held:
            self.ahead.drop()
        else:
            if self._has_dirty():  # a region may fill pages that the previous call still reads
                comfy_compat.hold_back_offload_streams(self.device)
            self.ahead.begin_first()
        try:
            yield
        finally:
            try:
                self.ahead.drop()
                self.ring.end_call(self._plan_what_stays())
            finally:
                if is_held:
                    with self._lock:
                        self._running -= 1
                    unpin(self._span)
        if self._has_room is False:  # not after a call that failed, perhaps for lack of memory
            self.ahead.begin_next_call()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Keep all pages where they are, those of other models too: making room waits for the GPU."""
        with without_evictions():
            if self._span is not None and is_evicted_soon(self._span):
                raise Unsupported(ReasonCode.WEIGHTS_ELSEWHERE)
            yield

    def give_way(self, size: int) -> bool:
        """After a call has run out of memory, do not hold as many weights for calls of this size again."""
        self._let_go()
        if not self._can_give_way(size):
            return False
        if not self.kept.give_way():
            self._crowded = size
        return True

    def _can_give_way(self, size: int) -> bool:
        is_new = self._crowded is None or size < self._crowded
        return not self.kept.is_empty or (self._span is not None and is_new)

    def gives_up(self) -> bool:
        """After a region has run out of memory: whether the running call cannot be made again with more of it.

        If so, let go of what was begun for later regions, and of the ring.
        """
        if self._can_give_way(self._size):
            return False
        self.ahead.let_go()
        self.ring.close()
        return True

    def _let_go(self) -> None:
        """Unpin the weights of layers that have failed while theirs arrived. They would keep those for ever."""
        if left := [layer for layer in self.layers() if "_prefetch" in vars(layer)]:
            comfy_compat.join_offload_streams(self.device)
            _clean_up(left)
            _declare_outdated(left)

    def _hold(self, size: int) -> bool:
        if self._crowded is not None and size >= self._crowded:
            return False
        # A fault that wants more pages than fit gives up those that are there. So regions ask for theirs first.
        if not self._fits and not is_resident(self._span):
            return False
        signature = fault(self._span)
        if signature is None:
            return False
        try:
            with self._lock:
                has_changed = not is_same(signature, self._signature) or self._has_dirty()
                if has_changed:
                    self._signature = None
                    comfy_compat.hold_back_offload_streams(self.device)
                    self.fill(self._stale())
                    self._signature = signature
                    self.channels_last.forget()
                # All three must be done: each returns whether it has changed something.
                if has_changed | self.channels_last.arrange() | self._kept.restore():
                    self._note_addresses()
                self._running += 1
        except torch.cuda.OutOfMemoryError:
            unpin(self._span)
            self.give_way(size)
            return False
        except BaseException:
            unpin(self._span)
            raise
        return True

    def _has_dirty(self) -> bool:
        """Whether ComfyUI has declared what has arrived outdated: another LoRA."""
        return None in [attributes.get(SIGNATURE) for attributes in self._attributes]

    def note_room(self, has_room: bool) -> None:
        """Note whether a region's weights found room in their pages."""
        self._has_room = has_room and self._has_room is not False

    def _plan_what_stays(self) -> int | None:
        """Leave all weights to their pages if they fit there, or spread what room there is over all regions.

        Return how many bytes the next call's regions have to bring at most, if that is known.
        """
        self._fits = self._has_room is True and self.kept.is_empty
        if self._fits or self._has_room is None:
            return None
        regions, seconds = self._regions()
        places = [vars(layer)[PLACE] for layers in regions for layer in layers if self.kept.find(layer) is None]
        there = resident_bytes(places)
        # A region may have found room that was taken from one before it.
        if self._has_room and there == sum(size for _, _, size in places):
            self._fits = self.kept.leave_to_pages()
            return None
        self.kept.plan(regions, there, seconds)
        return self.kept.rest(regions)

    def _regions(self) -> tuple[list[list[nn.Module]], list[float]]:
        """Return the layers of each region and how long it runs; 1 for each until all have been timed."""
        sources = self.ahead.order()
        seconds = [source.seconds for source in sources]
        return [source.layers() for source in sources], seconds if all(seconds) else [1.0] * len(seconds)

    @property
    def is_timed(self) -> bool:
        """Whether regions are timed in this call. The first call of a sampling may check graphs, too."""
        return self._calls == TIMED_CALL

    def layers(self) -> list[nn.Module]:
        """Return the layers that have a place in the VBAR."""
        return [layer for reference in self._layers if (layer := reference()) is not None]

    def _stale(self) -> list[nn.Module]:
        """Return the layers that have not arrived, or are outdated."""
        return [layer for layer in self.layers() if not has_arrived(layer)]

    def fill(self, layers: Sequence[nn.Module]) -> None:
        """Bring the weights of layers, whose pages are pinned, and apply their LoRAs."""
        for some in _in_portions(layers):
            with cast(some, self.device) as stream:
                comfy_compat.wait_for_stream(self.device, stream)
                for layer in some:
                    resolve(layer, self.host, self.device, returns=False)

    def _note_addresses(self) -> None:
        """Count a change of addresses or forms."""
        arrived = [attributes.get(name) for attributes in self._attributes for name in ARRIVED.values()]
        tensors = [*self._kept.tensors(), *(tensor for tensor in arrived if isinstance(tensor, torch.Tensor))]
        forms = [(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
        if forms != self._forms:
            self._forms = forms
            self._moves += 1


class StreamedSource:
    """The weights of one region."""

    def __init__(self, weights: StreamedWeights, region: nn.Module) -> None:
        self._weights = weights
        self._region = weakref.ref(region)
        self._layers: list[weakref.ref[nn.Module]] = []
        self._reads: list[tuple[dict[str, Any], str] | None] = []
        """For each of the region's tensors the place where it arrives, or None if the module holds it."""
        self._staging: Staging | None = None
        self._cast: Cast | None = None
        self._timing: Timing | None = None
        self.follow()

    def follow(self) -> None:
        """See which layers have a place in a VBAR."""
        region, reads, layers = self._region(), [], {}
        for _, layer, (_, name) in owned_tensor_slots(region) if region is not None else ():
            is_streamed = PLACE in vars(layer) and name in ARRIVED
            reads.append((vars(layer), ARRIVED[name]) if is_streamed else None)
            if is_streamed:
                layers[id(layer)] = layer
        self._reads = reads
        self._layers = [weakref.ref(layer) for layer in layers.values()]
        self._attributes = [vars(layer) for layer in layers.values()]

    def acquire(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the weights on the device: from the VBAR, cast by ComfyUI, or these."""
        if not self._attributes:
            return self._moved(tensors)
        if self._weights.is_held and not any(a.get(name) for a in self._attributes for name in FUNCTIONS):
            return [t if read is None else read[0][read[1]] for t, read in zip(tensors, self._reads, strict=True)]
        try:
            return self._streamed(tensors)
        except torch.cuda.OutOfMemoryError:
            self.end_bringing()
            if not self._weights.gives_up():
                raise
        raise Unsupported(ReasonCode.WEIGHT_MEMORY)

    def layers(self) -> list[nn.Module]:
        """Return the region's layers that have a place in the VBAR."""
        return [layer for reference in self._layers if (layer := reference()) is not None]

    @property
    def size(self) -> int:
        """The bytes of the region's streamed weights."""
        return sum(attributes[PLACE][2] for attributes in self._attributes)

    @property
    def seconds(self) -> float | None:
        """How long the region ran on the GPU when it was timed last, or None."""
        return None if self._timing is None else self._timing.seconds()

    def release(self) -> None:
        """Let the region's weights go, and begin with those of the next region."""
        if self._staging is not None:
            self.end_bringing()
            self._weights.ahead.begin_after(self)

    def begin_staging(self, is_next: bool = False) -> bool:
        """Begin to bring the weights that have no room in their pages; return whether all of them are on their way."""
        if self._staging is None:
            self._staging = Staging(self.layers(), self._weights.device)
        return self._weights.ring.stage(self._staging, self._weights.host, self._weights.kept, is_next)

    def is_staged_for_now(self) -> bool:
        """Whether weights that an earlier call has staged are still what the region gets."""
        staging, weights = self._staging, self._weights
        return staging is not None and staging.holds(self.layers(), weights.host, weights.kept)

    def begin_bringing(self) -> None:
        """Begin to bring all weights."""
        self.begin_staging(is_next=True)
        if self._cast is None:
            weights, cast = self._weights, Cast(self._staging.left, self._weights.device)
            cast.resolve(weights.host, partial(weights.ring.take, self._staging))
            self._cast = cast

    def end_bringing(self) -> None:
        """Let go of the weights, used or not."""
        staging, cast, self._staging, self._cast = self._staging, self._cast, None, None
        if cast is not None:
            cast.end()
        if staging is not None:
            staging.end()
            self._timing = staging.timing or self._timing

    def _streamed(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if not self._weights.can_stream:
            raise Unsupported(ReasonCode.WEIGHT_DEVICE, f"their way to {self._weights.device}, layer by layer")
        self._weights.ahead.note(self)
        self.begin_bringing()
        self._weights.ahead.begin_later(self)
        self._weights.note_room(not self._staging.lacks_room and self._cast.has_room)
        found, kept = dict(self._staging.weights), self._weights.kept
        self._staging.wait()
        for layer in self._staging.to_keep:
            kept.keep(layer, found[id(vars(layer))], is_own=True)
        for layer, arrived in self._cast.arrived():
            found[id(vars(layer))] = kept.keep(layer, arrived)
        if self._weights.is_timed:
            self._staging.begin_timing()
        return [
            t if read is None else found[id(read[0])][read[1]] for t, read in zip(tensors, self._reads, strict=True)
        ]

    def _moved(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return weights that lie elsewhere, or have functions, as ComfyUI's layers would get them."""
        device, region, moved = self._weights.device, self._region(), {}
        if region is None or (
            all(t.device == device for t in tensors)
            and not any(vars(layer).get(name) for layer in region.modules() for name in (*FUNCTIONS, *LORA_FUNCTIONS))
        ):
            return tensors
        for layer in region.modules():
            own = {name: t for name, t in layer._parameters.items() if t is not None and name in ARRIVED}
            functions = {name: vars(layer).get(f"{name}_function") for name in own}
            if any(functions.values()) or any(t.device != device for t in own.values()):
                moved[id(layer)] = _cast_one(layer, own, functions, device)
        slots = [(layer, name) for _, layer, (_, name) in owned_tensor_slots(region)]
        return [moved.get(id(layer), {}).get(name, t) for (layer, name), t in zip(slots, tensors, strict=True)]


class Cast:
    """The weights of some layers on their way, by ComfyUI's own cast. Their pages stay pinned until `end`.

    What has no room in its pages comes into a buffer of a stream, and the next cast over that stream overwrites it. So
    such weights move on at once: code that casts layers later, between blocks or within one, does not reach them.
    """

    def __init__(self, layers: Sequence[nn.Module], device: torch.device) -> None:
        self.has_room = True
        """Whether all weights found room in their pages."""
        # Some networks bring a block's weights themselves (`comfy.model_prefetch`), and let them go themselves.
        self._theirs = [layer for layer in layers if "_prefetch" in vars(layer)]
        self._own = [layer for layer in layers if "_prefetch" not in vars(layer)]
        self._device = device
        self._weights: list[tuple[nn.Module, dict[str, Any]]] = []
        self._host: Host | None = None
        self._refused: Reason | None = None
        self._is_done = self._has_waited = False
        self.stream = None
        with self.ended_if_it_fails():
            if self._own:
                self.stream = comfy_compat.find("comfy.ops.cast_modules_with_vbar")(self._own, None, device, None, True)

    def resolve(self, host: Host, take: Callable[[torch.Tensor, Any], torch.Tensor]) -> None:
        """Have the weights made of what comes, over the same stream.

        `take` moves bytes out of a stream's buffer and returns where they are. Raises torch.cuda.OutOfMemoryError; then
        nothing stays pinned.
        """
        self._host = host
        brought = {id(layer): vars(layer)["_prefetch"] for layer in (*self._own, *self._theirs)}
        self.has_room = all(prefetch["signature"] is not None for prefetch in brought.values())
        with self.ended_if_it_fails():
            for layer in self._own:
                prefetch = brought[id(layer)]
                buffer = prefetch.get("xfer_dest") if prefetch["signature"] is None else None
                # Weights that change their dtype are converted out of the buffer below.
                if buffer is not None and self.stream is not None and not prefetch.get("needs_cast"):
                    prefetch["xfer_dest"] = take(buffer, self.stream)
            self._resolve_own()
        # Eager code that runs a layer without room meanwhile brings the weights for itself.
        _clean_up([layer for layer in self._own if brought[id(layer)]["signature"] is None])
        self._own = [layer for layer in self._own if brought[id(layer)]["signature"] is not None]

    def _resolve_own(self) -> None:
        has_functions = any(vars(layer).get(name) for layer in self._own for name in FUNCTIONS)
        if has_functions and self.stream is not None:  # they may read what was launched before
            self.stream.wait_stream(comfy_compat.current_stream(self._device))
        try:
            with comfy_compat.on_stream(self.stream):
                for layer in self._own:
                    self._weights.append((layer, _resolved(layer, self._host, self._device)))
        except Unsupported as error:  # `arrived` says so: this may be ahead of the region's call
            self._refused = error.reason

    def arrived(self) -> list[tuple[nn.Module, dict[str, Any]]]:
        """Return each layer's weights, for which what is launched from now on waits. Raises Unsupported."""
        self._wait()
        if self._refused is not None:
            raise Unsupported.of(self._refused)
        return [*self._weights, *((layer, self._resolved_theirs(layer)) for layer in self._theirs)]

    def _resolved_theirs(self, layer: nn.Module) -> dict[str, Any]:
        """Return weights that the network has brought. Others find them as they were brought, without LoRAs."""
        prefetch = vars(layer)["_prefetch"]
        brought = prefetch.get("xfer_dest")
        if brought is None or prefetch["signature"] is not None or not any(map(vars(layer).get, LORA_FUNCTIONS)):
            return _resolved(layer, self._host, self._device)
        prefetch["xfer_dest"] = brought.clone()  # LoRAs are added in place
        try:
            return _resolved(layer, self._host, self._device)
        finally:
            prefetch["xfer_dest"] = brought

    def end(self) -> None:
        """Unpin the pages. Other weights are gone once the GPU has passed this point."""
        if not self._is_done:
            self._is_done = True
            self._wait()  # pages that nobody has asked for count as filled, too
            _clean_up(self._own)
            if self.stream is not None:
                self.stream.wait_stream(comfy_compat.current_stream(self._device))

    def _wait(self) -> None:
        if not self._has_waited:
            self._has_waited = True
            comfy_compat.wait_for_stream(self._device, self.stream)

    @contextmanager
    def ended_if_it_fails(self) -> Iterator[None]:
        """Unpin the pages after an error. Raises torch.cuda.OutOfMemoryError where ComfyUI's buffer cannot grow."""
        try:
            yield
        except BaseException as error:
            comfy_compat.join_offload_streams(self._device)  # the same pages may be filled again over another stream
            self.end()
            if isinstance(error, RuntimeError) and str(error).startswith(NO_BUFFER):
                raise torch.cuda.OutOfMemoryError(str(error)) from error
            raise


def _resolved(layer: nn.Module, host: Host, device: torch.device) -> dict[str, Any]:
    weight, bias = resolve(layer, host, device)
    return {ARRIVED["weight"]: weight, ARRIVED["bias"]: bias}


def _clean_up(layers: Sequence[nn.Module]) -> None:
    """Unpin what ComfyUI has brought for these layers, and forget that it did."""
    comfy_compat.find("comfy.model_prefetch.cleanup_prefetched_modules")(None, layers)


def _declare_outdated(layers: Iterable[nn.Module]) -> None:
    """Have the weights of layers brought again, whatever is in their pages.

    ComfyUI notes that a layer's weights have arrived before it adds LoRAs to them, which can fail for lack of memory.
    """
    for layer in layers:
        vars(layer)[SIGNATURE] = None


@contextmanager
def cast(layers: Sequence[nn.Module], device: torch.device) -> Iterator[Any]:
    """Bring the weights of layers; yield the stream over which they come."""
    made = Cast(layers, device)
    with made.ended_if_it_fails():
        yield made.stream
    made.end()


class Ahead:
    """The order in which regions ask for weights, by which those of the next regions are brought ahead."""

    def __init__(self) -> None:
        self._next: dict[int, weakref.ref[StreamedSource]] = {}
        self._first: weakref.ref[StreamedSource] | None = None
        self._last: StreamedSource | None = None
        self._begun: deque[StreamedSource] = deque()
        """Regions whose weights are on their way, in the order of their calls."""

    def order(self) -> list[StreamedSource]:
        """Return the regions in the order in which they asked first."""
        found, source = [], _alive(self._first)
        while source is not None and source not in found:
            found.append(source)
            source = self._after(source)
        return found

    def note(self, source: StreamedSource) -> None:
        """A region asks for its weights."""
        if self._last is None:
            self._first = weakref.ref(source)
        else:
            self._next[id(self._last)] = weakref.ref(source)
        self._last = source
        while self._begun and (begun := self._begun.popleft()) is not source:
            begun.end_bringing()

    def begin_next_call(self) -> None:
        """A call is over: bring what the first regions need next time, while the sampler computes."""
        if comfy_compat.can_bring_ahead():
            self._fill_ring(_alive(self._first))

    def begin_first(self) -> None:
        """A call begins: bring what the first region needs, unless that was begun before and still is what it gets.

        Only through the ring, and no more: the layers before it wait for ComfyUI's own copies, which come after ours.
        """
        if not all(source.is_staged_for_now() for source in self._begun):
            self.drop()
        first = _alive(self._first)
        if first is not None and not self._begun and comfy_compat.can_bring_ahead():
            self._begun.append(first)
            first.begin_staging()

    def begin_later(self, source: StreamedSource) -> None:
        """A region has its weights: bring those of later regions, as far as the ring has room."""
        if comfy_compat.can_bring_ahead():
            self._fill_ring(self._begun[-1] if self._begun else self._after(source))

    def begin_after(self, source: StreamedSource) -> None:
        """A region's graph has been launched: bring what the next ones need, if there is another stream for it."""
        following = self._after(source)
        if following is None or following is source or not comfy_compat.can_bring_ahead():
            return
        if following not in self._begun:
            self._begun.append(following)
        try:
            following.begin_bringing()
        except Exception:  # its own call has more room, or says what is wrong
            following.end_bringing()
            return
        with suppress(torch.cuda.OutOfMemoryError):
            self._fill_ring(self._begun[-1])

    def drop(self) -> None:
        """The call of the network is over."""
        self._last = None
        self.let_go()

    def let_go(self) -> None:
        """Let go of what was begun."""
        while self._begun:
            self._begun.popleft().end_bringing()

    def _fill_ring(self, source: StreamedSource | None) -> None:
        """Bring the weights of a region and of those after it, as far as the ring has room."""
        while source is not None and source is not self._last:
            if source not in self._begun:
                if len(self._begun) >= MOST_AHEAD:
                    return
                self._begun.append(source)
            if not source.begin_staging():
                return
            source = self._after(source)
            if source in self._begun:
                return

    def _after(self, source: StreamedSource) -> StreamedSource | None:
        return _alive(self._next.get(id(source)))


def _alive(reference: weakref.ref[StreamedSource] | None) -> StreamedSource | None:
    return None if reference is None else reference()


class KeptTensors:
    """Small weights and buffers, which each load moves. They are copied to where they were before, and stay there."""

    def __init__(self) -> None:
        self._slots: list[Slot] = []
        self._kept: dict[tuple[int, str], torch.Tensor] = {}
        self._seen: list[int] = []

    def follow(self, network: nn.Module, device: torch.device) -> None:
        """See which tensors the modules hold themselves."""
        self._slots = [
            (group, name)
            for _, layer, (group, name) in owned_tensor_slots(network)
            if group[name].device == device and not (PLACE in vars(layer) and name in ARRIVED)
        ]
        keys = {(id(group), name) for group, name in self._slots}
        self._kept = {key: tensor for key, tensor in self._kept.items() if key in keys}
        self._seen = []

    def tensors(self) -> list[torch.Tensor]:
        """Return all of them."""
        return [group[name] for group, name in self._slots]

    def restore(self) -> bool:
        """Copy tensors that have moved to where they were; return whether there were any."""
        if list(map(id, self.tensors())) == self._seen:
            return False
        self._seen = [id(self._restored(group, name)) for group, name in self._slots]
        return True

    def _restored(self, group: dict[str, Any], name: str) -> torch.Tensor:
        tensor = group[name]
        if is_factor(name):  # stays in place by itself, and its memory is given back with the model's
            return tensor
        kept = self._kept.setdefault((id(group), name), tensor)
        if kept is tensor:
            return tensor
        if (kept.shape, kept.dtype, kept.device, type(kept)) != (
            tensor.shape,
            tensor.dtype,
            tensor.device,
            type(tensor),
        ):
            self._kept[id(group), name] = tensor
            return tensor
        with torch.inference_mode():  # only this mode can write to both inference tensors and normal ones
            kept.copy_(tensor)
        group[name] = kept
        return kept


class ChannelsLastInPlace:
    """Keeps convolutions' weights in channels_last within their pages while a network samples.

    ComfyUI fills pages with contiguous weights, and eager runs of the network get them back so.
    """

    def __init__(self, weights: StreamedWeights) -> None:
        self._weights = weights
        self._is_wanted = False
        self._arranged: list[tuple[weakref.ref[nn.Module], torch.Tensor]] = []
        self._is_arranged = False

    def begin(self) -> None:
        """A sampling begins."""
        self._is_wanted, self._is_arranged = True, False

    def end(self) -> None:
        """Bring back into order, at the end of a sampling, what has not been emptied since."""
        arranged, self._arranged = self._arranged, []
        self._is_wanted = self._is_arranged = False
        for reference, weight in arranged:
            layer = reference()
            attributes = vars(layer) if layer is not None else {}
            if attributes.get(ARRIVED["weight"]) is not weight or PLACE not in attributes:
                continue
            if has_arrived(layer, keep=True):
                attributes[ARRIVED["weight"]] = _lay_out(weight, torch.contiguous_format)
                unpin(attributes[PLACE])

    def forget(self) -> None:
        """Pages have been filled: look at all weights again."""
        self._is_arranged = False

    def arrange(self) -> bool:
        """Bring the weights of convolutions, whose pages are pinned, into channels_last, unless that was done."""
        if not self._is_wanted or self._is_arranged:
            return False
        kept = [(ref, weight) for ref, weight in self._arranged if (layer := ref()) is not None
                and vars(layer).get(ARRIVED["weight"]) is weight]  # fmt: skip
        for layer in self._weights.layers():
            weight = vars(layer).get(ARRIVED["weight"])
            if type(weight) is torch.Tensor and has_layouts(weight) and weight.is_contiguous():
                weight = vars(layer)[ARRIVED["weight"]] = _lay_out(weight, torch.channels_last)
                kept.append((weakref.ref(layer), weight))
        self._arranged, self._is_arranged = kept, True
        return True


def _lay_out(weight: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """Reorder a weight's values within its memory; return the tensor that reads them so."""
    with torch.inference_mode():
        laid = weight.as_strided(weight.shape, stride_in(weight, memory_format))
        laid.copy_(weight.clone())
    return laid


def has_arrived(layer: nn.Module, keep: bool = False) -> bool:
    """Whether a layer's weights are in its pages. With `keep`, these are then left pinned."""
    attributes = vars(layer)
    signature = fault(attributes[PLACE])
    is_there = is_same(signature, attributes.get(SIGNATURE))
    if signature is not None and not (keep and is_there):
        unpin(attributes[PLACE])
    return is_there


def resolve(layer: nn.Module, host: Host, device: torch.device, returns: bool = True) -> tuple[Any, Any]:
    """Have ComfyUI make the weights of a layer of what it has brought, in the dtypes that the layer's code gets."""
    attributes, tensors = vars(layer), layer._parameters
    dtypes = [None if tensors.get(name) is None else host.weight_dtype(layer, name, tensors[name]) for name in ARRIVED]
    function = comfy_compat.find("comfy.ops.resolve_cast_module_with_vbar")
    has_loras = any(attributes.get(name) for name in LORA_FUNCTIONS)
    try:
        with memory_errors_raised() if has_loras else nullcontext():
            made = function(layer, dtypes[0], device, dtypes[1], None, True, return_weights=returns)
    except BaseException:
        _declare_outdated([layer])
        raise
    if not returns:
        return None, None
    is_in_page = attributes["_prefetch"]["signature"] is not None
    if not is_in_page and attributes.get("_full_precision_mm") and attributes.get(LORA_FUNCTIONS[0]):
        if type(tensors["weight"]) not in TENSOR_TYPES:  # the layer itself would not round the weight again
            raise Unsupported(ReasonCode.WEIGHT_FUNCTION, "a LoRA on a quantised weight that is not on the GPU")
    if is_in_page and not any(attributes.get(name) for name in FUNCTIONS):
        return attributes[ARRIVED["weight"]], attributes[ARRIVED["bias"]]
    return made


def _cast_one(
    layer: nn.Module, own: dict[str, torch.Tensor], functions: dict[str, Any], device: torch.device
) -> dict[str, torch.Tensor]:
    """Return a layer's weights as ComfyUI's `cast_bias_weight` brings them, in their own dtypes."""
    function = comfy_compat.find("comfy.ops.cast_bias_weight")
    if function is None or not hasattr(layer, "comfy_cast_weights") or "weight" not in own:
        for name in own:
            if functions[name]:
                raise Unsupported(ReasonCode.WEIGHT_FUNCTION, f"{name}_function")
        where = next(tensor.device for tensor in own.values() if tensor.device != device)
        raise Unsupported(ReasonCode.WEIGHT_DEVICE, f"{where} while the model runs on {device}")
    for name, tensor in own.items():
        if functions[name] and (not tensor.is_floating_point() or tensor.dtype.itemsize < 2):
            raise Unsupported(ReasonCode.WEIGHT_FUNCTION, f"{name}_function")
    like = torch.empty(0, dtype=own["weight"].dtype, device=device)
    with memory_errors_raised() if any(functions.values()) else nullcontext():
        weight, bias = function(layer, like)[:2]
    made = {"weight": weight, "bias": bias}
    return {name: made[name].to(tensor.dtype) for name, tensor in own.items()}


def dtype_of(layer: nn.Module, name: str, tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a weight reaches its layer: the model's, or the file's for small layers of ComfyUI."""
    attributes = vars(layer)
    dtype = attributes.get(f"{name}_comfy_model_dtype")
    if not isinstance(dtype, torch.dtype):
        return tensor.dtype
    if not hasattr(layer, "comfy_cast_weights") or PLACE in attributes:
        return dtype
    is_loaded = SIGNATURE in attributes
    groups = layer._parameters, layer._buffers
    own = [t for group in groups for name, t in group.items() if t is not None and not is_factor(name)]
    return dtype if not is_loaded and sum(t.nbytes for t in own) > SMALL_BYTES else tensor.dtype


def _in_portions(layers: Sequence[nn.Module]) -> Iterator[list[nn.Module]]:
    portion, size = [], 0
    for layer in layers:
        if portion and size + vars(layer)[PLACE][2] > FILL_BYTES:
            yield portion
            portion, size = [], 0
        portion.append(layer)
        size += vars(layer)[PLACE][2]
    if portion:
        yield portion
