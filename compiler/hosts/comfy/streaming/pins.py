"""Pinned memory in which ComfyUI keeps the bytes of layers, so that copies to the GPU need no CPU.

Where RAM is short, ComfyUI hands one layer's pinned memory to another while it casts that one
(`comfy.pinned_memory.pin_memory`). It fills the memory at once, although a copy out of it may still wait for its turn
on the GPU. So nothing is copied ahead in a call in which that may happen.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ....common.host import Host
from .. import comfy_compat
from .casts import has_arrived
from .vbar_places import ARRIVED, FUNCTIONS, LORA_FUNCTIONS, PLACE, resident

SUBSETS = ("weights", "weights-loaded")
"""What ComfyUI calls the parts of its pinned memory that hold weights: of layers without and with room in pages."""


def weights_in_pins(layer: nn.Module, host: Host) -> torch.Tensor | None:
    """Return a layer's bytes in pinned memory if they are the weights as the layer's code gets them."""
    attributes, tensors = vars(layer), layer._parameters
    if "_prefetch" in attributes or any(attributes.get(name) for name in (*FUNCTIONS, *LORA_FUNCTIONS)):
        return None
    own = [(name, tensors[name]) for name in ARRIVED if tensors.get(name) is not None]
    if any(tensor.dtype != host.weight_dtype(layer, name, tensor) for name, tensor in own):
        return None
    return comfy_compat.pinned_bytes(layer, SUBSETS)


def may_lose_pins(layers: Iterable[nn.Module], are_cast: bool = False) -> bool:
    """Whether one of these layers may take another layer's pinned memory when it is cast next.

    Layers that have arrived are not cast. Layers that were never cast count only if that happens now (`are_cast`): most
    of them belong to a part of the network that is not used.
    """
    takers = [layer for layer in layers if may_take_pin(layer, are_cast)]
    if not takers or comfy_compat.has_ram_to_pin(sum(vars(layer)[PLACE][2] for layer in takers)):
        return False
    are_there = resident([vars(layer)[PLACE] for layer in takers])
    # A page may be there and not be filled, since a fault of more pages than this layer's.
    return any(not is_there or not has_arrived(layer) for layer, is_there in zip(takers, are_there, strict=True))


def may_take_pin(layer: nn.Module, is_cast: bool = False) -> bool:
    """Whether ComfyUI may give this layer the pinned memory of another one, if it has to cast it.

    Each layer gets a priority with its first cast. It takes from a layer of equal size and lower priority. `is_cast`
    says that a layer without a priority gets one now, which may be any.
    """
    pins, states = vars(layer).get("_pins") or {}, vars(layer).get("_pin_state") or {}
    priorities = [pins.get(subset, {}).get("balancer_priority") for subset in SUBSETS]
    is_new = priorities == [None] * len(SUBSETS)
    if not states or _has_pin(layer) or (is_new and not is_cast):
        return False
    if not any(_buckets(states.get(subset)) for subset in SUBSETS):
        return False
    size = _size(layer)
    lowest = [_lowest(states.get(subset), size) for subset in SUBSETS]
    return any(low is not None and (own is None or own > low) for own, low in zip(priorities, lowest, strict=True))


def _has_pin(layer: nn.Module) -> bool:
    pins = vars(layer).get("_pins") or {}
    return any("pin" in pins.get(subset, {}) for subset in SUBSETS)


def _size(layer: nn.Module) -> int | None:
    """Return the bytes of a layer's pinned memory, or None if this ComfyUI does not say."""
    function = comfy_compat.find(f"{comfy_compat.MEMORY}.vram_aligned_size")
    return None if function is None else function([layer._parameters.get(name) for name in ARRIVED])


def _buckets(state: Any) -> dict[int, list]:
    """Return the layers that have pinned memory, by its size."""
    buckets = state[-1] if isinstance(state, (tuple, list)) and state else None
    return buckets if isinstance(buckets, dict) else {}


def _lowest(state: Any, size: int | None) -> int | None:
    """Return the lowest priority of layers of this size that have pinned memory; of all sizes, if it is not known."""
    found = [bucket for each, bucket in _buckets(state).items() if size in (None, each)]
    # Each is sorted, the lowest priority last. Entries without a layer are of memory that has been given up.
    last = [next((entry for entry in reversed(bucket) if entry[-1] is not None), None) for bucket in found]
    return min((-entry[0] for entry in last if entry is not None), default=None)
