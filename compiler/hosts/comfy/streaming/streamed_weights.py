"""The weights of a network that ComfyUI streams.

Under dynamic VRAM a layer's weights have a place in a range of GPU addresses (VBAR), whose pages are filled while there
is room and emptied when there is none. A page that is faulted is pinned until it is unpinned; the fault returns a
signature that changes when the page was emptied in between. The addresses never change. So:

- while a network runs, one fault holds all of its pages, if they are there, and one comparison tells whether they are
  filled;
- a region's graph takes the weights from there. CUDA graphs that have their addresses stay valid for good;
- if some pages are not filled, each region's weights come before its call, and the next region's while it runs: through
  a ring (`staging_ring`) where they find no room in their pages, and else by ComfyUI's own functions. What memory there
  is then holds a share of every region's weights (`kept_weights`).

Layers without a place, of the low-VRAM modes, are cast by ComfyUI's function as well, one region at a time.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ....common.host import Host
from ....common.reason import ReasonCode, Unsupported
from ....common.tensor_slots import owned_tensor_slots
from ....common.weight_source import RESIDENT
from .. import comfy_compat
from . import casts
from .channels_last import ChannelsLastInPlace
from .kept_tensors import KeptTensors
from .kept_weights import KeptWeights
from .pins import may_lose_pins
from .prefetcher import Prefetcher
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
    resident,
    resident_bytes,
    span_of,
    unpin,
    without_evictions,
)

FILL_BYTES = 256 * 2**20
"""Weights that are filled in at a time. Those whose dtype changes pass through a buffer of that size."""
TIMED_CALL = 2
"""The call of each sampling in which regions are timed."""

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
        self.channels_last = ChannelsLastInPlace(self.layers)
        self._network = weakref.ref(network)
        self._sources: weakref.WeakSet[StreamedSource] = weakref.WeakSet()
        self._layers: list[weakref.ref[nn.Module]] = []
        self._attributes: list[dict[str, Any]] = []
        """Of these layers, which have a place in the VBAR."""
        self._span: Place | None = None
        """The range of the VBAR in which they all lie."""
        self._signature: Any = None
        """Of that range, when all of them had arrived."""
        self._held: list[Any] = []
        """The signatures of these layers then."""
        self._small_tensors = KeptTensors()
        self._moves = 0
        """Changes of addresses so far."""
        self._forms: list[tuple] = []
        self._crowded: int | None = None
        """Calls of this size or more had too little memory beside the weights."""
        self._has_room: bool | None = None
        """Whether all regions of the running call found room for their weights; None if none has asked."""
        self._fits = False
        """The same of the call before. Pages that are missing then are those of layers that nobody has called."""
        self._calls = 0
        """Of this sampling so far."""
        self._running = 0
        self._size = 0
        """Of the running call."""
        self._lock = threading.RLock()
        self.ring = StagingRing(device)
        self.kept = KeptWeights()
        self.prefetcher = Prefetcher[StreamedSource]()

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
            self._small_tensors.follow(network, self.device)
        for source in list(self._sources):
            source.follow()
        self.ring.reserve(max((source.size for source in self._sources), default=0))

    def begin_sampling(self) -> None:
        """Keep weights, and memory that they pass through, until `end_sampling`."""
        self.follow()
        self._let_go()  # of a sampling without this node, too
        self.ring.open()
        self.kept.open()
        self.kept.plan_again(*self._regions())
        self._calls = 0

    def end_sampling(self) -> None:
        """Give that memory back."""
        self.prefetcher.drop()
        self.kept.close()
        self.ring.close()
        self._let_go()

    @property
    def is_held(self) -> bool:
        """Whether all streamed weights are on the device, and stay there during this call."""
        return self._running > 0

    @property
    def are_there(self) -> bool:
        """Whether the pages of all weights that calls have asked for so far are in the GPU's memory."""
        asked = [each[PLACE] for each in self._attributes if each.get(SIGNATURE) is not None]
        return not self._attributes or (bool(asked) and all(resident(asked)))

    @property
    def places(self) -> object | None:
        """A token for the addresses of all weights: `RESIDENT`, a number, or None where they do not last."""
        if not self._attributes:
            return RESIDENT
        return self._moves if self.is_held else None

    @contextmanager
    def running(self, size: int) -> Iterator[None]:
        """Hold the weights on the device during a call, if they are there; if not, each region has its own brought."""
        span = self._span
        is_held = span is not None and self.can_stream and self._hold(span, size)
        self._has_room = None
        self._calls += 1
        self._size = size
        try:
            if is_held:
                self.prefetcher.drop()
            else:
                self._begin_streaming()
            yield
        finally:
            try:
                self.prefetcher.drop()
                self.ring.end_call(self._plan_what_stays())
            finally:
                if is_held:
                    with self._lock:
                        self._running -= 1
                    unpin(span)
        if self._has_room is False:  # not after a call that failed, perhaps for lack of memory
            self.prefetcher.begin_next_call()

    def _begin_streaming(self) -> None:
        """A call begins in which each region has its weights brought."""
        to_cast = [layer for layer in self.layers() if self.kept.find(layer) is None]
        self.ring.keeps_pins = not self.finish_copies(to_cast)
        if None in self._signatures():  # a region may fill pages that the previous call still reads
            comfy_compat.hold_back_offload_streams(self.device)
        self.prefetcher.begin_first()

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

    def give_up_if_no_retry(self) -> bool:
        """Return whether a region that ran out of memory has no more to get if the call is made again.

        If so, free what was begun for later regions, and the ring.
        """
        if self._can_give_way(self._size):
            return False
        self.prefetcher.let_go()
        self.ring.close()
        return True

    def _let_go(self) -> None:
        """Unpin the weights of layers that have failed while theirs arrived. They would keep those for ever."""
        if left := [layer for layer in self.layers() if "_prefetch" in vars(layer)]:
            comfy_compat.join_offload_streams(self.device)
            casts.clean_up(left)
            casts.declare_outdated(left)

    def _hold(self, span: Place, size: int) -> bool:
        if self._crowded is not None and size >= self._crowded:
            return False
        # A fault that wants more pages than fit gives up those that are there. So regions ask for theirs first.
        if not self._fits and not is_resident(span):
            return False
        signature = fault(span)
        if signature is None:
            return False
        try:
            with self._lock:
                has_changed = not is_same(signature, self._signature) or not self._are_as_held()
                if has_changed:
                    self._signature = None
                    comfy_compat.hold_back_offload_streams(self.device)
                    if not self.fill(self._stale()):
                        unpin(span)
                        return False
                    self.channels_last.forget()
                # All three must be done: each returns whether it has changed something.
                if has_changed | self.channels_last.arrange() | self._small_tensors.restore():
                    self._note_addresses()
                self._signature, self._held = signature, self._signatures()
                self._running += 1
        except torch.cuda.OutOfMemoryError:
            unpin(span)
            self.give_way(size)
            return False
        except BaseException:
            unpin(span)
            raise
        return True

    def _signatures(self) -> list[Any]:
        """Return each layer's signature: None if it was declared outdated, or last came without room in its pages."""
        return [attributes.get(SIGNATURE) for attributes in self._attributes]

    def _are_as_held(self) -> bool:
        """Whether nobody has filled pages since they were held last. Each cast that does makes a new signature."""
        now = self._signatures()
        return len(now) == len(self._held) and all(map(operator.is_, now, self._held))

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
        sources = self.prefetcher.order()
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
        return [layer for layer in self.layers() if not casts.has_arrived(layer)]

    def fill(self, layers: Sequence[nn.Module]) -> bool:
        """Bring the weights of layers into their pages, which are pinned, and add LoRAs; return whether all got there.

        What this allocates may be taken from the VBAR's end. Pinned pages stay there, but the library refuses them to a
        cast, which brings the weights into a buffer instead. Then the pages keep what was in them before.
        """
        for some in self._cast_together(layers):
            with casts.cast(some, self.device) as stream:
                comfy_compat.wait_for_stream(self.device, stream)
                for layer in some:
                    casts.resolve(layer, self.host, self.device, returns=False)
            if any(vars(layer)[SIGNATURE] is None for layer in some):
                return False
        return True

    def _cast_together(self, layers: Sequence[nn.Module]) -> Iterator[list[nn.Module]]:
        """Yield the layers in portions. Those that may take each other's pinned memory are cast one at a time."""
        for some in _in_portions(layers):
            if not may_lose_pins(some, are_cast=True):
                yield some
                continue
            for layer in some:
                self.finish_copies([layer], are_cast=True)
                yield [layer]

    def finish_copies(self, layers: Sequence[nn.Module], are_cast: bool = False) -> bool:
        """If a cast of these layers may fill other layers' pinned memory, have the CPU wait for copies out of that.

        Return whether it may. `are_cast` says that all of them are cast now.
        """
        if not may_lose_pins(layers, are_cast):
            return False
        comfy_compat.finish_offload_streams(self.device)
        self.ring.finish_copies()
        return True

    def _note_addresses(self) -> None:
        """Count a change of addresses or forms."""
        arrived = [attributes.get(name) for attributes in self._attributes for name in ARRIVED.values()]
        tensors = [*self._small_tensors.tensors(), *(tensor for tensor in arrived if isinstance(tensor, torch.Tensor))]
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
        self._cast: casts.Cast | None = None
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
            if not self._weights.give_up_if_no_retry():
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
            self._weights.prefetcher.begin_after(self)

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
            weights = self._weights
            weights.finish_copies(self._staging.left, are_cast=True)
            cast = casts.Cast(self._staging.left, weights.device)
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
        self._weights.prefetcher.note(self)
        self.begin_bringing()
        self._weights.prefetcher.begin_later(self)
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
                moved[id(layer)] = casts.cast_one(layer, own, functions, device)
        slots = [(layer, name) for _, layer, (_, name) in owned_tensor_slots(region)]
        return [moved.get(id(layer), {}).get(name, t) for (layer, name), t in zip(slots, tensors, strict=True)]


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
