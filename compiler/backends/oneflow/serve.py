"""This code runs in a Python that has OneFlow. It serves graphs to a process that has torch.

Requests arrive on standard input and answers go to standard output, as JSON after its length. Both processes map the
memory of the tensors. This process ends when the other one does. This module imports no torch (see `operators`).
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
from typing import Any, BinaryIO

import numpy as np

from .instances import Instances, memory_limit
from .operators import flow

LENGTH = struct.Struct("<QQ")
"""Number of bytes of the message's JSON, and of the data after it."""
ALIGNMENT = 64


class Arena:
    """Memory behind a file descriptor that two processes map. Either of them may enlarge it.

    It starts with the weights of programs. Each program's weights stay at the same offset. The inputs and results of
    the running call come after all weights.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.map: mmap.mmap | None = None
        self.weights: dict[str, tuple[int, int]] = {}
        """Offsets at which each program's weights begin and end, in whole pages."""

    def reserve(self, size: int) -> mmap.mmap:
        """Return the memory, of at least this many bytes."""
        if os.fstat(self.descriptor).st_size < size:
            os.ftruncate(self.descriptor, size)
        if self.map is None or len(self.map) < size:
            self.map = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)  # views keep the old map alive
        return self.map

    def release(self, name: str) -> None:
        """Return the pages of a program's weights to the system, until the next write to them."""
        begin, end = self.weights.get(name, (0, 0))
        if end > begin:
            self.map.madvise(mmap.MADV_REMOVE, begin, end - begin)


def places(sizes: list[int], start: int = 0) -> tuple[list[int], int]:
    """Return an aligned offset for each size in bytes, and the offset after the last one."""
    offsets = []
    for size in sizes:
        offsets.append(start)
        start += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, start


def send(target: BinaryIO, message: dict[str, Any], data: bytes = b"") -> None:
    """Write one message."""
    text = json.dumps(message).encode()
    target.write(LENGTH.pack(len(text), len(data)) + text + data)
    target.flush()


def receive(source: BinaryIO) -> tuple[dict[str, Any], bytes]:
    """Read one message. Raises EOFError if the other side has gone."""
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    length, rest = LENGTH.unpack(head)
    text, data = source.read(length), source.read(rest)
    if len(text) < length or len(data) < rest:
        raise EOFError
    return json.loads(text), data


def main(device: str, descriptor: str) -> None:
    """Serve one device until standard input ends. `descriptor` is the arena's file descriptor, as text."""
    source, target = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # printed text must not get between messages
    arena = Arena(int(descriptor))
    instances = Instances(device, memory_limit(), on_unused=arena.release)
    while True:
        try:
            message, data = receive(source)
        except EOFError:
            return
        try:
            send(target, *_answer(message, data, arena, instances, device))
        except Exception as error:
            send(target, {"error": _one_line(error)})


def _answer(
    message: dict[str, Any], data: bytes, arena: Arena, instances: Instances, device: str
) -> tuple[dict[str, Any], bytes]:
    action, name = message["do"], message.get("program")
    if action == "add":
        instances.add(name, data)
        return {}, b""
    if action == "data":
        return {}, instances.data(name)
    if action == "report":
        return {"built": instances.built, "resets": instances.resets, "process": os.getpid()}, b""
    memory = arena.reserve(message["end"])
    arena.weights[name] = tuple(message["weights"])
    tensors = [_tensor(memory, *place).to(device) for place in message["tensors"]]
    results = [t.numpy() for t in instances.run(name, tensors, in_place=device == "cpu")]
    offsets, end = places([array.nbytes for array in results], message["end"])
    memory = arena.reserve(end)
    for array, offset in zip(results, offsets):
        np.frombuffer(memory, array.dtype, array.size, offset).reshape(array.shape)[...] = array
    ends = [[array.dtype.name, list(array.shape), offset] for array, offset in zip(results, offsets)]
    return {"results": ends, "end": end}, b""


def _tensor(memory: mmap.mmap, dtype: str, shape: list[int], offset: int) -> Any:
    count = int(np.prod(shape, dtype=np.int64))
    return flow.from_numpy(np.frombuffer(memory, dtype, count, offset).reshape(shape))


def _one_line(error: BaseException) -> str:
    """Return an error's class and the last line of its message: OneFlow's messages end with the cause."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__
