"""A template process imports what worker processes need, and forks them: the imports take longer than most compiles.

It starts with ComfyUI's server, or at the latest with the first worker. It holds no GPU memory: a process that has
begun to use CUDA cannot be forked. Linux only. Elsewhere each worker imports for itself.

Torch's own compile workers are forked in the same way (`torch._inductor.compile_worker`).
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress

import torch

from ..backends import BACKENDS
from ..backends.cuda_warmup import Example
from ..common import boot
from ..tracing.operators import register_operators
from .worker_channel import END_LIMIT, ENVIRONMENT, Channel, command, give_way
from .worker_main import Setup, absolute_entries, receive, send, serve

_READY, _FORK, _END = b"r", b"f", b"e"
_MESSAGE = struct.Struct("<cq")
"""A command, and the number of a process."""
FORK_LIMIT = 30.0
"""Seconds that a fork may take. The pool's other threads wait for it."""


class Template:
    """The process that forks others, as the process that started it sees it. Not for several threads at once."""

    def __init__(self, setup: Setup) -> None:
        """Start the process. Raises OSError."""
        self._control, theirs = socket.socketpair()
        # Without this, torch.cuda.is_available() initialises CUDA, and such a process cannot be forked.
        environment = boot.environment(**ENVIRONMENT, PYTORCH_NVML_BASED_CUDA_CHECK="1")
        with theirs:
            fd = theirs.fileno()
            line = command("worker_template", str(fd))
            self._process = subprocess.Popen(line, stdin=subprocess.PIPE, env=environment, pass_fds=(fd,))
        self._is_ready = False
        send(self._process.stdin, setup)

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def has_imported(self) -> bool:
        """Whether it has said that it is ready."""
        return self._is_ready

    def is_ready(self, seconds: float = 0.0) -> bool:
        """Whether it has imported everything. Waits for that at most this long. Raises OSError if it has ended."""
        if not self._is_ready and select.select([self._control], [], [], seconds)[0]:
            if self._control.recv(1) != _READY:
                raise ConnectionError("the template process has ended")
            self._is_ready = True
        return self._is_ready

    def fork(self) -> Channel:
        """Return a new worker process. Raises OSError if the template has ended or does not answer."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [_MESSAGE.pack(_FORK, 0)], [theirs.fileno()])
            if not select.select([self._control], [], [], FORK_LIMIT)[0]:
                ours.close()
                raise TimeoutError(f"the template process has not answered for {FORK_LIMIT:g} s")
            answer = self._control.recv(_MESSAGE.size, socket.MSG_WAITALL)
        with ours:
            if len(answer) < _MESSAGE.size:
                raise ConnectionError("the template process has ended")
            pid = _MESSAGE.unpack(answer)[1]
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
    """Whether processes can be forked here. On macOS, system libraries do not bear it."""
    return sys.platform == "linux"


def main(fd: str) -> None:
    """Import what workers need, then fork one for each request. Ends when the other side closes its socket."""
    control, setup = socket.socket(fileno=int(fd)), receive(sys.stdin.buffer)
    os.dup2(2, 1)
    give_way()
    _import_what_workers_need(setup)
    if torch.cuda.is_initialized():
        return  # something that was imported has begun to use a GPU: workers import for themselves
    gc.freeze()  # a collection in a forked process would copy the pages of all objects that the two share
    with suppress(ConnectionError):  # the other side has ended
        control.sendall(_READY)
        _fork_when_asked(control)


def _fork_when_asked(control: socket.socket) -> None:
    while True:
        message, fds, _, _ = socket.recv_fds(control, _MESSAGE.size, 1, socket.MSG_WAITALL)
        if len(message) < _MESSAGE.size:
            return
        asked, pid = _MESSAGE.unpack(message)
        if asked == _END:
            _end(pid)
            continue
        connection = socket.socket(fileno=fds[0])
        pid = os.fork()
        if pid == 0:
            control.close()
            _work(connection)
        connection.close()
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
    """End a worker, but do not wait long for one that is stuck in a driver: the next fork waits for this."""
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)
        limit = time.monotonic() + END_LIMIT
        while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < limit:
            time.sleep(0.005)
