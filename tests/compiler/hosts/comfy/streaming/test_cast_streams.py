"""Streams that bring weights wait for whoever reads what they overwrite: the GPU part of `test_cast_buffers`."""

from __future__ import annotations

import pytest
import torch
from compiled_graphs.compiler.hosts.comfy import comfy_compat
from compiled_graphs.compiler.hosts.comfy.streaming.staging_ring import Staging, StagingRing

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

BYTES = 2**20
CYCLES = 10**7
"""Some milliseconds of a GPU: whoever does not wait is early by that."""


@pytest.mark.parametrize("is_open", [True, False], ids=["ring", "own memory"])
def test_no_one_is_early(is_open):
    """Bytes come late, a cast overwrites their buffer at once, graphs read them late, and the ring is used anew."""
    device, seen = torch.device("cuda"), []
    ring, streams = StagingRing(device), [torch.cuda.Stream() for _ in range(2)]
    buffers = [torch.zeros(BYTES, dtype=torch.uint8, device=device) for _ in streams]
    ring.reserve(BYTES)
    if is_open:
        ring.open()
    torch.cuda.synchronize()
    for value in range(1, 9):
        stream, buffer, staging = streams[value % 2], buffers[value % 2], Staging([], device)
        stream.as_context = torch.cuda.stream  # as ComfyUI's streams have it
        with torch.cuda.stream(stream):
            torch.cuda._sleep(CYCLES)
            buffer.fill_(value)
        memory = ring.take(staging, buffer, stream)
        with torch.cuda.stream(stream):
            buffer.fill_(0)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda._sleep(CYCLES)
        seen.append(memory.clone())
        staging.end()
        stream.wait_stream(torch.cuda.current_stream())  # as `Cast.end` does
    assert [copy.unique().tolist() for copy in seen] == [[value] for value in range(1, 9)]


def test_new_memory_is_still_read():
    """The ring gets memory that a kernel still reads: no stream may fill it earlier, not even a second one."""
    device, ring = torch.device("cuda"), StagingRing(torch.device("cuda"))
    streams = [torch.cuda.Stream() for _ in range(2)]
    buffer = torch.zeros(BYTES, dtype=torch.uint8, device=device)
    ring.reserve(BYTES)
    ring.open()
    read = torch.ones(2 * BYTES, dtype=torch.uint8, device=device)
    address = read.data_ptr()
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    seen = read.clone()
    del read
    taken = []
    for stream in streams:
        stream.as_context = torch.cuda.stream
        taken.append(ring.take(Staging([], device), buffer, stream))
    assert [memory.data_ptr() - address for memory in taken] == [0, BYTES]
    assert seen.unique().tolist() == [1]


def test_what_is_left_of_overwritten_weights_is_still_read():
    """One stream overwrites the first half of what a graph reads. Another, which fills the rest, waits for it, too."""
    device, ring = torch.device("cuda"), StagingRing(torch.device("cuda"))
    streams = [torch.cuda.Stream() for _ in range(2)]
    for stream in streams:
        stream.as_context = torch.cuda.stream
    ring.reserve(BYTES)
    ring.open()
    both = Staging([], device)
    ones, zeros = (
        torch.ones(2 * BYTES, dtype=torch.uint8, device=device),
        torch.zeros(BYTES, dtype=torch.uint8, device=device),
    )
    torch.cuda.synchronize()
    read = ring.take(both, ones, streams[0])
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    seen = read.clone()
    both.end()
    taken = [ring.take(Staging([], device), zeros, stream) for stream in streams]
    assert [memory.data_ptr() - read.data_ptr() for memory in taken] == [0, BYTES]
    assert seen.unique().tolist() == [1]


def test_offload_streams_are_held_back(monkeypatch):
    """What is launched over them afterwards waits for what the current stream runs."""
    device, streams = torch.device("cuda", 0), [torch.cuda.Stream(0) for _ in range(2)]
    monkeypatch.setattr(comfy_compat, "find", {f"{comfy_compat.MANAGEMENT}.STREAMS": {device: streams}}.get)
    read = torch.ones(BYTES, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    seen = read.clone()
    comfy_compat.hold_back_offload_streams(device)
    for stream in streams:
        with torch.cuda.stream(stream):
            read.fill_(0)
    torch.cuda.synchronize()
    assert seen.unique().tolist() == [1]
