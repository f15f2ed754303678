"""Pinned memory in which ComfyUI keeps the bytes of layers, so that copies to the GPU need no CPU.

When RAM is short, ComfyUI hands one layer's pinned memory to another while it casts that one
(`comfy.pinned_memory.pin_memory`). It fills the memory at once, although a copy out of it may still wait for its turn
on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ....common.host import Host
from .. import comfy_compat
from .vbar_places import ARRIVED, FUNCTIONS, LORA_FUNCTIONS

SUBSETS = ("weights", "weights-loaded")
"""What ComfyUI calls the parts of its pinned memory that hold weights."""


def pinned_bytes(layer: nn.Module, host: Host) -> torch.Tensor | None:
    """Return a layer's bytes in pinned memory if they are the weights as the layer's code gets them."""
    attributes, tensors = vars(layer), layer._parameters
    if "_prefetch" in attributes or any(attributes.get(name) for name in (*FUNCTIONS, *LORA_FUNCTIONS)):
        return None
    own = [(name, tensors[name]) for name in ARRIVED if tensors.get(name) is not None]
    if any(tensor.dtype != host.weight_dtype(layer, name, tensor) for name, tensor in own):
        return None
    return comfy_compat.pinned_bytes(layer, SUBSETS)


def may_take_pin(layer: nn.Module) -> bool:
    """Whether a cast of this layer may take the pinned memory of another layer.

    ComfyUI gives each layer a priority with its first cast. A layer takes from one of equal size and lower priority.
    """
    pins, states = vars(layer).get("_pins") or {}, vars(layer).get("_pin_state") or {}
    if any("pin" in pins.get(subset, {}) for subset in SUBSETS):
        return False
    for subset in SUBSETS:
        priority = pins.get(subset, {}).get("balancer_priority")
        others = list(_priorities(states.get(subset), _size(layer)))
        if others and (priority is None or priority > min(others)):
            return True
    return False


def _size(layer: nn.Module) -> int | None:
    """Return the bytes of a layer's pinned memory, or None if this ComfyUI does not say."""
    function = comfy_compat.find(f"{comfy_compat.MEMORY}.vram_aligned_size")
    return None if function is None else function([layer._parameters.get(name) for name in ARRIVED])


def _priorities(state: Any, size: int | None) -> Iterator[int]:
    """Yield the priorities of layers of this size that have pinned memory; of all sizes, if it is not known."""
    buckets = state[-1] if isinstance(state, (tuple, list)) and state else None
    for each, bucket in buckets.items() if isinstance(buckets, dict) else ():
        if size in (None, each):
            yield from (-entry[0] for entry in bucket if entry[-1] is not None)
