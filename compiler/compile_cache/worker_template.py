"""A template process imports what worker processes need, and forks them: the imports take longer than most compiles.

It starts with ComfyUI's server, so it is ready when the first prompt is queued. It holds no GPU memory: a process that
has begun to use CUDA cannot be forked. Linux only. Elsewhere each worker imports for itself.

Torch's own compile workers are forked in the same way (`torch._inductor.compile_worker`).
"""

from __future__ import annotations

import array
import importlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from ..backends import BACKENDS
from ..backends.cuda_warmup import Example
from ..common import boot
from ..tracing.operators import register_operators
from .worker_main import Setup, absolute_entries, receive, send, serve

_PACKAGE = __name__.partition(".compiler.")[0]
_FOLDER = Path(__file__).resolve().parents[2]
_READY, _FORK, _END = b"r", b"f", b"e"
_MESSAGE = struct.Struct("<cq")
"""A command, and the number of a process."""


@dataclass(frozen=True)
class Channel:
    """A worker process, as the process that started it sees it."""

    pid: int
    source: BinaryIO
    target: BinaryIO
    kill: Callable[[], None]
    """Kill it, and leave the pipes open: whoever reads from them sees their end."""
    wait: Callable[[], object]
    """Have it forgotten by the system, once it has ended."""
    is_forked: bool = False


class Template:
    """The process that forks others, as the process that started it sees it. Not for several threads at once."""

    def __init__(self, setup: Setup) -> None:
        """Start the process. Raises OSError."""
        self._control, theirs = socket.socketpair()
        environment = boot.environment(
            TORCHINDUCTOR_COMPILE_THREADS="1",
            OMP_NUM_THREADS="1",
            PYTORCH_NVML_BASED_CUDA_CHECK="1",  # the other way to see whether there is a GPU begins to use it
        )
        with theirs:
            fd = theirs.fileno()
            command = boot.command(sys.executable, _PACKAGE, _FOLDER, "compiler.compile_cache.worker_template", str(fd))
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, pass_fds=(fd,))
        self._is_ready = False
        send(self._process.stdin, setup)

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def is_ready(self, seconds: float = 0.0) -> bool:
        """Whether it has imported everything. Waits for that at most this long. Raises OSError if it has ended."""
        if not self._is_ready and select.select([self._control], [], [], seconds)[0]:
            if self._control.recv(1) != _READY:
                raise ConnectionError("the template process has ended")
            self._is_ready = True
        return self._is_ready

    def fork(self) -> Channel:
        """Return a new worker process. Raises OSError if the template has ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            fds = array.array("i", [theirs.fileno()])
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
            self._control.sendmsg([_MESSAGE.pack(_FORK, 0)], ancillary)
            answer = _received(self._control)
        if answer is None:
            raise ConnectionError("the template process has ended")
        pid = _MESSAGE.unpack(answer)[1]
        with ours:
            pipes = ours.makefile("rb"), ours.makefile("wb")

        def end() -> None:
            try:
                self._control.sendall(_MESSAGE.pack(_END, pid))
            except OSError:  # the template has ended
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

        return Channel(pid, *pipes, kill=end, wait=lambda: None, is_forked=True)

    def stop(self) -> None:
        """End it. Workers that it has forked go on until they are ended."""
        self._control.close()
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()


def is_supported() -> bool:
    """Whether processes can be forked here."""
    return sys.platform == "linux" and hasattr(socket, "SCM_RIGHTS")


def main(fd: str) -> None:
    """Import what workers need, then fork one for each request. Ends when the other side closes its socket."""
    control, setup = socket.socket(fileno=int(fd)), receive(sys.stdin.buffer)
    os.dup2(2, 1)
    _import_what_workers_need(setup)
    control.sendall(_READY)
    while (received := _received_with_socket(control)) is not None:
        (command, pid), theirs = received
        if command == _END:
            _end(pid)
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            _work(theirs)
        theirs.close()
        control.sendall(_MESSAGE.pack(_FORK, pid))


def _import_what_workers_need(setup: Setup) -> None:
    sys.path[:] = absolute_entries(setup.sys_path)
    register_operators()
    BACKENDS[setup.backend].warm_up()
    for name in setup.preloaded:
        with suppress(Exception):  # the worker says what it cannot import
            importlib.import_module(name)
    block, example = Example(torch.device("cpu"), torch.float32), torch.empty(2, 8, 6, 10)
    with torch.no_grad():
        sizes = dict.fromkeys((0, 2, 3), torch.export.Dim.AUTO)
        torch.export.export(block, (example,), dynamic_shapes=(sizes,), strict=False)


def _work(connection: socket.socket) -> None:
    """Be a worker, in the forked process."""
    status = 1
    try:
        with connection:
            source, target = connection.makefile("rb"), connection.makefile("wb")
        serve(source, target)
        status = 0
    finally:
        os._exit(status)  # what the template would do at its end is not ours to do


def _end(pid: int) -> None:
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _received(control: socket.socket) -> bytes | None:
    """Return one whole message, or None at the end."""
    data = b""
    while len(data) < _MESSAGE.size:
        part = control.recv(_MESSAGE.size - len(data))
        if not part:
            return None
        data += part
    return data


def _received_with_socket(control: socket.socket) -> tuple[tuple[bytes, int], socket.socket | None] | None:
    """Return one message and the socket that came with it, or None at the end."""
    data, ancillary, _, _ = control.recvmsg(_MESSAGE.size, socket.CMSG_SPACE(array.array("i").itemsize))
    if data and len(data) < _MESSAGE.size:
        rest = control.recv(_MESSAGE.size - len(data), socket.MSG_WAITALL)
        data += rest
    if len(data) < _MESSAGE.size:
        return None
    fds = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return _MESSAGE.unpack(data), socket.socket(fileno=fds[0]) if fds else None
