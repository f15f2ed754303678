"""Whether a call waits for the GPU somewhere, which a CUDA graph cannot do.

Looked at in a call that is made anyway, before one like it is recorded. To let CUDA find out breaks off a
recording, and with CUDA's asynchronous allocator that is the end of the process: what was allocated in a broken
recording can be freed neither in it nor after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .torch_compat import TorchDispatchMode, pytree, to_copy

_COPIES = frozenset({to_copy, torch.ops.aten.copy_})
_READS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
"""What torch says of operators whose caller needs a value, or a number of values, before it can go on."""
_INDEXING = frozenset({torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_})


class WaitWatch(TorchDispatchMode):
    """While it is entered, notes the first operator of this thread that waits for a device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.found = ""
        """The operator's name; empty if there was none."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if not self.found and _waits(function, [*_tensors((args, kwargs))], [*_tensors(result)], self._device):
            self.found = str(getattr(function, "overloadpacket", function))
        return result


def _waits(function: Callable, inputs: list[torch.Tensor], results: list[torch.Tensor], device: torch.device) -> bool:
    if not any(tensor.device == device for tensor in (*inputs, *results)):
        return False
    packet = getattr(function, "overloadpacket", None)
    if packet in _COPIES:
        return any(tensor.device != device for tensor in (*inputs, *results))
    if packet in _INDEXING:  # by masks, whose entries have to be counted
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in inputs[1:])
    return not _READS.isdisjoint(getattr(function, "tags", ()))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor))
