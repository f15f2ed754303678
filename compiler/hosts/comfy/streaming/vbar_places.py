"""A layer's place in a VBAR: the pages of GPU memory that hold its weights while there is room (comfy-aimdo)."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from ....common.reason import ReasonCode, Unsupported
from .. import comfy_compat

Place = tuple[Any, int, int]
"""A VBAR, an address and a number of bytes."""

PLACE, SIGNATURE = "_v", "_v_signature"
"""Attributes of a layer: its place in a VBAR, and the signature under which that was filled."""
ARRIVED = {"weight": "_v_weight", "bias": "_v_bias"}
"""Attributes of a layer that has arrived, for each of its tensors that is streamed."""
FUNCTIONS = ("weight_function", "bias_function")
LORA_FUNCTIONS = ("weight_lowvram_function", "bias_lowvram_function")

PAGE_BYTES, _IN_MEMORY = 32 * 2**20, 1
"""A VBAR's pages, and the flag of one that is in the GPU's memory (`ModelVBAR.get_residency`)."""


def fault(place: Place) -> Any:
    """Fill a place's pages with memory, and pin them; return their signature, or None if there is no room.

    The library raises where it finds no memory for another reason. ComfyUI's own cast then raises, too, where a layer
    needs the pages.
    """
    try:
        return comfy_compat.find(f"{comfy_compat.VBAR}.vbar_fault")(place)
    except RuntimeError:
        return None


def unpin(place: Place) -> None:
    """Take one fault of a place back."""
    comfy_compat.find(f"{comfy_compat.VBAR}.vbar_unpin")(place)


def is_same(signature: Any, other: Any) -> bool:
    """Whether a place's pages have not been emptied between two faults."""
    if signature is None or other is None or len(signature) != len(other):
        return False
    return comfy_compat.find(f"{comfy_compat.VBAR}.vbar_signature_compare")(signature, other)


def is_resident(place: Place) -> bool:
    """Whether all pages of a range are there, without asking for any."""
    return resident([place])[0]


def resident(places: Sequence[Place]) -> list[bool]:
    """Return which of these places have all of their pages there, without asking for any."""
    known: dict[int, list[int]] = {}
    return [_is_resident(place, known) for place in places]


def _is_resident(place: Place, known: dict[int, list[int]]) -> bool:
    """Look at the flags of a place's pages. `known` keeps those of each VBAR."""
    vbar, address, size = place
    if not hasattr(vbar, "get_residency"):
        return False
    flags = known[id(vbar)] if id(vbar) in known else known.setdefault(id(vbar), vbar.get_residency())
    first = address - vbar.base_addr
    start, end = first // PAGE_BYTES, -(-(first + size) // PAGE_BYTES)
    # A VBAR has no more pages than the GPU has memory, but gives addresses beyond them.
    return end <= len(flags) and all(flag & _IN_MEMORY for flag in flags[start:end])


def resident_bytes(places: Sequence[Place]) -> int:
    """Return the bytes of those places whose pages are all there."""
    return sum(size for (_, _, size), is_there in zip(places, resident(places), strict=True) if is_there)


def span_of(places: Iterable[Place]) -> Place | None:
    """Return the range of a VBAR that holds all of these places; None if there is none, or if they are of several."""
    places = list(places)
    if not places or len({id(vbar) for vbar, _, _ in places}) > 1 or any(len(place) != 3 for place in places):
        return None
    first = min(address for _, address, _ in places)
    return places[0][0], first, max(address + size for _, address, size in places) - first


@contextmanager
def without_evictions() -> Iterator[None]:
    """Keep the pages of all VBARs that there are where they are. Raises Unsupported if that is not possible.

    An allocation makes room for itself: it takes pages from VBARs, and waits for the GPU before and after (`vbars_free`
    of comfy-aimdo 0.4). A capture cannot wait. With CUDA's asynchronous allocator, a process does not survive a capture
    that fails by waiting.
    """
    if not comfy_compat.streams_weights():
        yield
        return
    with ExitStack() as stack:
        for vbar in _all_vbars():
            stack.callback(vbar.set_watermark_limit, 0)  # what ComfyUI sets after each node
            vbar.set_watermark_limit(vbar.max_size)
        yield


def _all_vbars() -> list[Any]:
    """Return all VBARs of this process, also those of models that ComfyUI has unloaded: nobody lists them.

    Not one that is being made or has been closed: its methods would write to an address that is not there.
    """
    cls = comfy_compat.find(f"{comfy_compat.VBAR}.ModelVBAR")
    if not hasattr(cls, "set_watermark_limit"):
        raise Unsupported(ReasonCode.ERROR, "this comfy-aimdo cannot keep pages where they are")
    found = [thing for thing in gc.get_objects() if type(thing) is cls]
    return [vbar for vbar in found if hasattr(vbar, "base_addr") and getattr(vbar, "_ptr", True)]


def is_evicted_soon(place: Place) -> bool:
    """Whether ComfyUI has given these pages up. Then a fault refuses them, and to unpin them waits for the GPU."""
    if fault(place) is None:
        return True
    unpin(place)
    return False
