"""CUDA graphs: capture what a call does on the GPU, and replay it.

A capture freezes every address, and works in memory of its own. With PyTorch's own allocator that memory looks free
to others, so a capture lives no longer than one sampling. CUDA's asynchronous allocator, ComfyUI's default, lends the
memory only while a replay runs.
"""

from __future__ import annotations

import ctypes
import gc
import os
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import lru_cache
from typing import Any, Protocol

import torch

from ..common.devices import with_number
from ..common.torch_compat import can_see_syncs, clear_cublas_workspaces, end_allocate_to_pool, release_pool

_NON_BLOCKING = 1
"""`CU_STREAM_NON_BLOCKING`: what other threads launch on the default stream does not disturb a capture."""


class Replayable(Protocol):
    """A call that was captured."""

    def replay(self) -> None:
        """Do again, at the same addresses, what was captured."""
        ...


Capture = Callable[..., Replayable]
"""Captures a call that leaves nothing behind but what it writes, into a pool of memory: see `capture_on_gpu`."""


def can_capture(device: torch.device) -> bool:
    """Whether calls on a device can be captured as CUDA graphs."""
    return device.type == "cuda" and torch.version.hip is None and can_see_syncs()


def captures_borrow_memory(device: torch.device) -> bool:
    """Whether captures on a device hold memory only while they run."""
    return device.type == "cuda" and torch.cuda.get_allocator_backend() != "native"


def capture_on_gpu(call: Callable[[], None], pool: Any, runs_first: bool = False) -> Replayable:
    """Capture a call as a CUDA graph. Raises what the call raises, or what CUDA says of code that cannot be captured.

    With `runs_first`, the call has operators that keep memory for each stream. They allocate it in a run before the
    capture. No other call ever has that stream: one that needs more would free what the graph refers to.

    Everything that is allocated during the capture is freed during it: with CUDA's asynchronous allocator, ComfyUI's
    default, the rest can be freed only once the graph has run, and freeing it earlier ends the process.
    """
    graph, stream = torch.cuda.CUDAGraph(), _own_stream() if runs_first else _stream(torch.cuda.current_device())
    torch.cuda.synchronize()
    if runs_first:
        with torch.cuda.stream(stream):
            call()
        torch.cuda.synchronize()
    _clear_workspaces()
    torch.cuda.empty_cache()  # what lies idle elsewhere cannot be worked in
    collects = gc.isenabled()
    gc.disable()  # freeing other graphs is not allowed meanwhile
    try:
        with torch.cuda.stream(stream):
            # Other threads (previews, loading) may go on allocating.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                call()
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)
                raise
            finally:
                _clear_workspaces()
                graph.capture_end()
    except BaseException:
        _end_failed_capture(pool)
        raise
    finally:
        if collects:
            gc.enable()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def capture_within(context: Callable[[], AbstractContextManager[None]], capture: Capture = capture_on_gpu) -> Capture:
    """Return a way to capture that enters a context meanwhile, for the kernels of the network's blocks."""

    def capture_in_context(call: Callable[[], None], pool: Any, **options: bool) -> Replayable:
        with context():
            return capture(call, pool, **options)

    return capture_in_context


@lru_cache
def _stream(device: int) -> torch.cuda.Stream:
    """Return the stream that calls are captured on: cuBLAS keeps a workspace for every stream it has seen."""
    return torch.cuda.Stream(device)


def _own_stream() -> torch.cuda.Stream:
    """Return a new stream. It lasts as long as the process: kernels know it by its address.

    torch's own streams come from a pool, so two captures would have the same. Raises RuntimeError without the driver.
    """
    handle, driver = ctypes.c_void_p(), _driver()
    if driver is None or driver.cuStreamCreate(ctypes.byref(handle), _NON_BLOCKING):
        raise RuntimeError("the driver makes no stream")
    return torch.cuda.ExternalStream(handle.value)


def _clear_workspaces() -> None:
    """Have cuBLAS allocate its workspace (32 MiB on an H200) in the capture's memory, or give it back there."""
    clear_cublas_workspaces()


def _end_failed_capture(pool: Any) -> None:
    """Tell the allocator and the random number generator that a capture is over.

    `CUDAGraph.capture_end` leaves both in it where CUDA refuses to end the capture; the generator would then
    refuse to draw numbers. A capture that succeeds sets it right.
    """
    device = torch.cuda.current_device()
    with suppress(RuntimeError, AttributeError):  # the first says so if the capture did end
        end_allocate_to_pool(device, pool)
        release_pool(device, pool)
    number = torch.zeros(1, device="cuda")
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        number.add_(1)
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)


def return_lent_memory(device: torch.device) -> None:
    """Give back what CUDA keeps for the next replay where memory is lent."""
    torch.cuda.synchronize(device)
    if (driver := _driver()) is None:
        return
    with suppress(AttributeError):  # a driver that has no such call keeps none either
        handle = ctypes.c_int()
        driver.cuDeviceGet(ctypes.byref(handle), with_number(device).index)
        driver.cuDeviceGraphMemTrim(handle)


def _driver() -> Any:
    """Return CUDA's driver, or None."""
    with suppress(OSError):
        return ctypes.WinDLL("nvcuda.dll") if os.name == "nt" else ctypes.CDLL("libcuda.so.1")
    return None
