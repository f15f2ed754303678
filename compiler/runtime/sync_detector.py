"""Detects whether a call syncs with the GPU (waits for it), which a CUDA graph cannot do.

It also notes operators that the host does not know to be safe in a capture. Those of other libraries may allocate or
wait where it cannot be seen.

The detector watches an ordinary call before the capture of a similar one. If CUDA itself met the sync, it would abort
the capture, and with CUDA's asynchronous allocator that ends the process: memory that was allocated in an aborted
capture can be freed neither in it nor after it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..common.host import Host
from ..common.tensors import tensors_in
from ..common.torch_compat import DisableTorchFunctionSubclass, TorchDispatchMode, is_gone, to_copy

_COPIES = frozenset({to_copy, torch.ops.aten.copy_})
_SYNC_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
"""torch's tags for operators that sync: their caller needs a value, or the number of values, before it can go on."""
_INDEXING = frozenset({torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_})


class SyncDetector(TorchDispatchMode):
    """Sync detector. While entered, it records the first operator of this thread that waits for `device`."""

    def __init__(self, device: torch.device, host: Host | None = None) -> None:
        super().__init__()
        self._device = device
        self._host = host or Host()
        self.found = ""
        """The operator's name; empty if no operator waited."""
        self.unsafe = ""
        """The first operator that must not be captured for another reason."""
        self.runs_first = False
        """Whether the call must run once on the stream that captures it."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # As without this mode, results are of plain type here: their classes are given to them outside of it.
        with _plain_results():
            result = function(*args, **(kwargs or {}))
        name = str(getattr(function, "overloadpacket", function))
        if not self.found and _syncs(function, tensors_in((args, kwargs)), tensors_in(result), self._device):
            self.found = name
        if not self.unsafe and not self._host.can_be_captured(name):
            self.unsafe = name
        self.runs_first = self.runs_first or self._host.keeps_memory_for_streams(name)
        return result


def _plain_results() -> AbstractContextManager[Any]:
    return nullcontext() if is_gone(DisableTorchFunctionSubclass) else DisableTorchFunctionSubclass()


def _syncs(function: Callable, inputs: list[torch.Tensor], results: list[torch.Tensor], device: torch.device) -> bool:
    if not any(tensor.device == device for tensor in (*inputs, *results)):
        return False
    packet = getattr(function, "overloadpacket", None)
    if packet in _COPIES:
        return any(tensor.device != device for tensor in (*inputs, *results))
    if packet in _INDEXING:  # the entries of a mask must be counted
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in inputs[1:])
    return not _SYNC_TAGS.isdisjoint(getattr(function, "tags", ()))
