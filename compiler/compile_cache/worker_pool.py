"""Worker processes compile several regions at once, and keep compiling out of the process that makes images.

They start when graphs are missing, or earlier, while a host loads its checkpoint. A template process that has imported
what they need makes that quick (`worker_template`). They end after some idle time. They also end with this process,
because that closes what they read from.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import nn

from ..common.host import Host
from ..common.jobs import CompileTimeout, compile_limit
from ..common.reason import ReasonCode, ReasonedError
from ..common.tensors import empty_like
from ..identity.graph_spec import GraphSpec
from ..tracing.graph_request import GraphRequest
from ..tracing.weightless_copy import weightless_copy
from .worker_channel import Channel, spawned
from .worker_main import CompileRequest, CompileResult, Setup, receive, send, send_bytes
from .worker_template import Template, is_supported

log = logging.getLogger(__name__)

MAX_PROCESSES = 16
"""Processes at a time."""
WORTH_BEGINNING = 5
"""Processes are started for this many missing graphs: a start takes as long as compiling three or four graphs."""
IDLE = 60.0
"""Processes end after this many seconds without an order."""
PLENTY = 16 * 2**30
"""With this many bytes to spare on a GPU, idle processes may stay. Each takes 0.7 GiB of it."""
MEMORY = 2 * 2**30
"""Bytes of main memory that one process may need. It may need as much of a GPU's memory."""
TEMPLATE_IDLE = 900.0
"""The template process ends after this many seconds in which it forked nothing."""
TEMPLATE_MEMORY = 12 * 2**30
"""With fewer free bytes of main memory there is no template process. It took 0.45 GiB with a torch for CPUs."""
START_LIMIT = 120.0
"""Seconds that a forked process may take for its start and its first graph. Then workers are started anew."""


class _Doubtful(Exception):
    """A forked process has failed at its first order. Perhaps some library does not bear to be forked."""


class WorkerError(ReasonedError):
    """No worker process could compile the region. This process may still be able to."""


class _Process:
    """One worker process. Only one thread uses it at a time."""

    def __init__(self, setup: Setup, channel: Channel) -> None:
        self._channel = channel
        self._has_started = self._has_answered = False
        send(channel.target, setup)

    @property
    def is_doubtful(self) -> bool:
        """Whether it was forked and has compiled nothing yet: some library may not bear to be forked."""
        return self._channel.is_forked and not self._has_answered

    def ask(self, order: bytes, limit: float) -> CompileResult:
        """Return the answer to a pickled CompileRequest. Raises WorkerError if the process ends by itself.

        After `limit` seconds this kills the process and raises CompileTimeout.
        """
        expired = threading.Event()
        # The timer leaves the pipes open: this thread reads them, and their end wakes it.
        timer = threading.Timer(limit, lambda: (expired.set(), self._channel.kill()))
        timer.daemon = True
        timer.start()
        try:
            self._send(order)
            if not self._has_started:
                if reason := receive(self._channel.source).reason:
                    raise WorkerError(ReasonCode.WORKER, f"could not start: {reason}")
                self._has_started = True
            answer = receive(self._channel.source)
            self._has_answered = True
            return answer
        except (EOFError, OSError) as error:
            if expired.is_set():
                raise CompileTimeout(ReasonCode.TIMEOUT, f"{limit:g} s") from None
            raise WorkerError(ReasonCode.WORKER, f"ended ({error or 'without a message'})") from None
        finally:
            timer.cancel()

    def _send(self, order: bytes) -> None:
        """Send an order, also to a process that starts: it then compiles this instead of an example."""
        try:
            send_bytes(self._channel.target, order)
        except OSError:
            if self._has_started:
                raise
            # A process that could not start has said why.

    def end(self) -> None:
        """Kill the process, whatever it is doing."""
        self._channel.kill()
        self._channel.wait()
        for pipe in (self._channel.target, self._channel.source):
            with suppress(OSError):  # unsent bytes cannot be flushed any more
                pipe.close()


class Workers:
    """A pool of a bounded number of processes. A thread that wants a graph takes one of them."""

    def __init__(self, setup: Callable[[str, torch.device], Setup], host: Host, count: int | None = None) -> None:
        """`setup` is called whenever a process starts. Without a `count`, `worker_count` decides."""
        self._setup = setup
        self._host = host
        self._count = count
        self._idle: list[_Process] = []
        self._running = 0
        self._change = threading.Condition()
        self._starting = 0
        self._timer: threading.Timer | None = None
        self._template: Template | None = None
        self._template_turn = threading.Lock()
        self._has_failed = False
        self.has_begun = threading.Event()
        """Set when graphs begin to be compiled, here or by a process of the pool."""
        self._template_timer: threading.Timer | None = None

    @property
    def count(self) -> int:
        """How many processes there may be at a time."""
        return worker_count() if self._count is None else self._count

    @property
    def have_processes(self) -> bool:
        """Whether a process has been started already, or is about to be."""
        return self._running + self._starting > 0

    def are_worth_starting(self, missing: int) -> bool:
        """Whether worker processes, which take a while to start, would compile this many graphs sooner."""
        return self.count > 1 and missing >= (2 if self.have_processes else WORTH_BEGINNING)

    def start_template(self, backend: str, device: torch.device) -> None:
        """Begin to import, in a process of its own, what workers need. Does nothing where that cannot be shared."""
        if self.count < 2 or not is_supported() or not _has_memory_for_template():
            return
        with self._change:
            if self._template is not None or self._has_failed:
                return
            try:
                self._template = Template(self._setup(backend, device))
            except OSError:
                self._has_failed = True
            else:
                self._end_template_when_idle()

    def stop_template(self) -> None:
        """End the template process, if there is one."""
        with self._change:
            template, self._template = self._template, None
            if self._template_timer is not None:
                self._template_timer.cancel()
        if template is not None:
            template.stop()

    def start(self, backend: str, device: torch.device, wanted: int = MAX_PROCESSES) -> None:
        """Start at most `wanted` processes before the first order comes. Raises WorkerError if one does not start."""
        with self._change:
            self._starting += 1
        try:
            self._await_template(backend, device)
            with self._change:
                try:
                    for _ in range(min(self.count, wanted) - self._running):
                        process = self._start_process(backend, device)  # which may replace the list of idle ones
                        self._idle.append(process)
                finally:
                    self._end_when_idle()
        finally:
            with self._change:
                self._starting -= 1

    def compile(self, request: GraphRequest, backend: str) -> tuple[GraphSpec, bytes]:
        """Have a region compiled. Return the graph's contract and the bytes that the backend loads.

        Raises WorkerError if no worker can compile it, and CompileTimeout.
        """
        weightless = weightless_copy(request.module, self._host, without_data)
        try:
            order = pickled(CompileRequest.of(request, weightless, backend), self._host)
        except Exception as error:  # a block can hold any object
            raise WorkerError(ReasonCode.NOT_SENT, type(error).__name__) from None
        while True:
            try:
                made = self._ask(order, backend, request.device)
                break
            except _Doubtful as error:
                self._do_without_template(error.__cause__)
        if made.reason:
            raise WorkerError.of(made.reason)
        return made.spec, made.executable

    def _ask(self, order: bytes, backend: str, device: torch.device) -> CompileResult:
        """Have a process answer. Raises _Doubtful if one that was forked did not answer its first order."""
        process = self._take(backend, device)
        limit = min(START_LIMIT, compile_limit()) if process.is_doubtful else compile_limit()
        self.has_begun.set()
        try:
            made = process.ask(order, limit)
        except BaseException as error:
            self._give_back(None)
            process.end()
            if process.is_doubtful and isinstance(error, WorkerError | CompileTimeout):
                raise _Doubtful from error
            raise
        self._give_back(process)
        return made

    def stop_if_memory_is_scarce(self, device: torch.device) -> None:
        """Tell the pool that no orders follow for now. It stops if GPU memory is scarce: the model needs all of it."""
        if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] - self._host.memory_left_free() < PLENTY:
            self.stop()

    def stop(self) -> None:
        """End the idle processes."""
        with self._change:
            processes, self._idle = self._idle, []
            self._running -= len(processes)
        for process in processes:
            process.end()

    def _take(self, backend: str, device: torch.device) -> _Process:
        if not self._idle:
            self._await_template(backend, device)
        with self._change:
            self._stop_timer()
            while not self._idle and self._running >= max(1, self.count):
                self._change.wait()
            return self._idle.pop() if self._idle else self._start_process(backend, device)

    def _give_back(self, process: _Process | None) -> None:
        with self._change:
            if process is None:
                self._running -= 1
            else:
                self._idle.append(process)
            self._end_when_idle()
            self._change.notify()

    def _start_process(self, backend: str, device: torch.device) -> _Process:
        """Raises WorkerError where the machine has no process or memory left, or the new process ends at once."""
        with ExitStack() as after_an_error:
            try:
                channel = self._forked() or spawned()
                after_an_error.callback(channel.kill)
                process = _Process(self._setup(backend, device), channel)
            except OSError as error:
                raise WorkerError(ReasonCode.WORKER, f"could not start: {error}") from error
            after_an_error.pop_all()
        self._running += 1
        return process

    def _await_template(self, backend: str, device: torch.device) -> None:
        """Wait for the template to import everything, without the lock that orders need. Begin one for a GPU.

        A new process would have to import it all as well. Compiling for a CPU needs fewer imports.
        """
        if device.type == "cuda":
            self.start_template(backend, device)
        with self._template_turn:
            template = self._template
            try:
                if template is not None and not template.is_ready(START_LIMIT):
                    raise TimeoutError("it is not ready in time")
            except (OSError, ValueError) as error:  # the second one if another thread has closed its socket
                self._do_without_template(error)

    def _forked(self) -> Channel | None:
        """Return a worker process that the template has forked, or None if there is no template."""
        if self._template is None or not self._template.has_imported:
            return None
        try:
            channel = self._template.fork()
        except OSError as error:
            self._do_without_template(error)
            return None
        self._end_template_when_idle()
        return channel

    def _do_without_template(self, why: object) -> None:
        """Have workers import what they need themselves, and end those that were forked and have shown nothing yet."""
        log.info("Workers import what they need themselves: the template process cannot be used (%r).", why)
        self._has_failed = True
        self.stop_template()
        with self._change:
            doubtful = [process for process in self._idle if process.is_doubtful]
            self._idle = [process for process in self._idle if not process.is_doubtful]
            self._running -= len(doubtful)
        for process in doubtful:
            process.end()

    def _end_template_when_idle(self) -> None:
        if self._template_timer is not None:
            self._template_timer.cancel()
        self._template_timer = threading.Timer(TEMPLATE_IDLE, self.stop_template)
        self._template_timer.daemon = True
        self._template_timer.start()

    def _end_when_idle(self) -> None:
        self._stop_timer()
        if len(self._idle) == self._running:
            self._timer = threading.Timer(IDLE, self.stop)
            self._timer.daemon = True
            self._timer.start()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def worker_count() -> int:
    """Return how many processes this machine can run: some cores stay free, and memory must do.

    The environment variable COMPILED_GRAPHS_WORKERS sets another number. With 0, this process compiles.
    """
    try:
        return max(0, int(os.environ["COMPILED_GRAPHS_WORKERS"]))
    except (KeyError, ValueError):
        pass
    cores = _cores()
    limits = [MAX_PROCESSES, max(cores * 3 // 4, cores - 2)]
    try:
        import psutil

        limits.append(psutil.virtual_memory().available // MEMORY)
    except ImportError:
        pass
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        limits.append(torch.cuda.mem_get_info()[0] // MEMORY)
    return min(limits)


def _has_memory_for_template() -> bool:
    try:
        import psutil
    except ImportError:
        return False
    return psutil.virtual_memory().available >= TEMPLATE_MEMORY


def _cores() -> int:
    """Return how many cores this process may use. A container or a batch system can limit them."""
    if hasattr(os, "sched_getaffinity"):  # not on Windows and macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def pickled(value: Any, host: Host) -> bytes:
    """Return a value for another process. The host says how to make classes that cannot be imported by their name."""
    file = io.BytesIO()
    _Pickler(file, host).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, host: Host) -> None:
        super().__init__(file)
        self._host = host

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, type) or "<locals>" not in value.__qualname__:
            return NotImplemented
        return self._host.class_recipe(value) or NotImplemented


def without_data(tensor: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor of the same form."""
    meta = empty_like(tensor, torch.device("meta"))
    return nn.Parameter(meta, requires_grad=False) if isinstance(tensor, nn.Parameter) else meta
