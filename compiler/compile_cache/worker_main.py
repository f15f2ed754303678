"""This code runs in a worker process: it receives regions without weights and returns compiled graphs.

Compiling needs its own process because tracing and compiling hold Python's lock and torch's global state. In one
process they would disturb a model that runs, and only one region could be compiled at a time.
"""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import queue
import struct
import sys
import threading
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import torch
from torch import nn

from ..backends import BACKENDS
from ..backends.base import Backend
from ..common.devices import current
from ..common.errors import one_line
from ..common.host import Host
from ..common.reason import Reason, ReasonCode, reason_of
from ..common.torch_compat import FakeTensorMode, ShapeEnv
from ..identity.call_signature import parse
from ..identity.fingerprint import fingerprint
from ..identity.graph_spec import GraphSpec
from ..tracing.export import ExportedRegion, export_region
from ..tracing.graph_request import GraphRequest
from ..tracing.operators import register_operators
from .worker_channel import give_way

MOMENT = 0.1
"""Seconds in which an order that was sent before is read."""

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Setup:
    """The settings that make a new process work like the one that starts it."""

    sys_path: tuple[str, ...]
    host_factory: str = ""
    """`module:function` in `compiler`: imports what the host needs and returns the host. Empty for a plain Host."""
    arguments: bytes = b""
    """Arguments for `host_factory`, pickled: their classes may be importable only with `sys_path` in place."""
    backend: str = ""
    device: str = "cpu"
    preloaded: tuple[str, ...] = ()
    """Modules of other packages that the host needs. A template process imports them once for all workers."""


@dataclass(frozen=True)
class CompileRequest:
    """A request for one graph. `CompileRequest.of` makes it, because a module that is sent must have no weights."""

    request: GraphRequest
    signature: str
    backend: str

    @classmethod
    def of(cls, request: GraphRequest, weightless_copy: nn.Module, backend: str) -> CompileRequest:
        """Return the request with `weightless_copy` in place of the request's module. The signature is sent as text."""
        bare = replace(request, module=weightless_copy, signature=None)
        return cls(bare, request.signature.text, backend)


@dataclass(frozen=True)
class CompileResult:
    """The answer to one request: a graph, or the reason why there is none."""

    spec: GraphSpec | None = None
    executable: bytes = b""
    reason: Reason | None = None


def main() -> None:
    """Answer requests from standard input until it ends. It ends when the process at its other end does."""
    give_way()
    source, target = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # printed text must not get between messages
    # On Windows a compiler that inherits a pipe that a thread reads from can wait for that thread as it starts.
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    serve(source, target)


def serve(source: BinaryIO, target: BinaryIO) -> None:
    """Receive the setup, then answer requests until `source` ends."""
    logging.disable(logging.WARNING)  # the process that started this one has logged it
    warnings.simplefilter("ignore")
    host, setup = Host(), receive(source)
    try:
        sys.path[:] = absolute_entries(setup.sys_path)
        if setup.host_factory:
            module, _, function = setup.host_factory.partition(":")
            host = getattr(importlib.import_module(f"..{module}", __package__), function)(pickle.loads(setup.arguments))
        if torch.device(setup.device).type == "cuda":
            torch.cuda.init()  # fails in a process that was forked from one that had begun to use a GPU
        register_operators()
        BACKENDS[setup.backend].warm_up()
        send(target, CompileResult())
    except BaseException as error:  # the other side sees nothing but the answer
        send(target, CompileResult(reason=reason_of(error)))
        return
    inbox = _Inbox(source)
    if not inbox.has_message():
        _compile_example(BACKENDS[setup.backend], torch.device(setup.device))
    while (order := _next(inbox, target)) is not None:
        try:
            made = _make(order, host)
        except BaseException as error:
            made = CompileResult(reason=reason_of(error))
        send(target, made)


def absolute_entries(sys_path: Iterable[str]) -> list[str]:
    """Return the entries that mean the same in every process: empty and relative ones depend on the current folder."""
    return [entry for entry in sys_path if os.path.isabs(entry)]


class _Inbox:
    """Messages that a thread reads ahead, so that a process sees whether one waits. A pipe cannot say so everywhere."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._looked_at: list[bytes | None] = []
        threading.Thread(target=self._read, name="orders", daemon=True).start()

    def has_message(self) -> bool:
        """Whether a message or the end is there, or comes in a moment."""
        with suppress(queue.Empty):
            self._looked_at.append(self._messages.get(timeout=MOMENT))
        return bool(self._looked_at)

    def take(self) -> Any:
        """Wait for the next message. Raises EOFError if the other side has gone, and what unpickling raises."""
        data = self._looked_at.pop() if self._looked_at else self._messages.get()
        if data is None:
            raise EOFError
        return pickle.loads(data)

    def _read(self) -> None:
        try:
            with suppress(EOFError, OSError, ValueError):  # the last one if this process closes the pipe itself
                while True:
                    self._messages.put(_receive_bytes(self._source))
        finally:
            self._messages.put(None)


def receive(source: BinaryIO) -> Any:
    """Read one message. Raises EOFError if the other side has gone, and what unpickling raises."""
    return pickle.loads(_receive_bytes(source))


def _receive_bytes(source: BinaryIO) -> bytes:
    head = source.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    length = _LENGTH.unpack(head)[0]
    data = source.read(length)
    if len(data) < length:
        raise EOFError
    return data


def send(target: BinaryIO, message: Any) -> None:
    """Write one message."""
    send_bytes(target, pickle.dumps(message))


def send_bytes(target: BinaryIO, data: bytes) -> None:
    """Write one message that has been pickled."""
    target.write(_LENGTH.pack(len(data)) + data)
    target.flush()


def _next(inbox: _Inbox, target: BinaryIO) -> CompileRequest | None:
    """Return the next request, or None at the end. Answers requests whose module cannot be imported here."""
    while True:
        try:
            return inbox.take()
        except EOFError:
            return None
        except Exception as error:
            send(target, CompileResult(reason=Reason(ReasonCode.NOT_IMPORTED, one_line(error))))


def _make(order: CompileRequest, host: Host) -> CompileResult:
    backend = BACKENDS[order.backend]
    request = replace(order.request, signature=parse(order.signature)[0])
    if fingerprint(request.module, host) != request.fingerprint:
        return CompileResult(reason=Reason(ReasonCode.CODE_DIFFERS))
    with current(request.device):
        exported = export_region(request, host)
        data = backend.compile(exported).to_bytes()
        return CompileResult(exported.spec_now(), data)


def _compile_example(backend: Backend, device: torch.device) -> None:
    """Compile a small example, where nobody waits: a process takes longer for its first graph. Failing is no matter.

    The example is as small as can be. An order that comes meanwhile has to wait for it.
    """
    with suppress(Exception):
        _compile_activation(backend, device)


def _compile_activation(backend: Backend, device: torch.device) -> None:
    with FakeTensorMode(shape_env=ShapeEnv()), torch.no_grad():
        example = torch.empty(2, 8, 6, 10, device=device, dtype=torch.float16)
        sizes = dict.fromkeys((0, 2, 3), torch.export.Dim.AUTO)
        program = torch.export.export(nn.SiLU(), (example,), dynamic_shapes=(sizes,), strict=False)
    backend.compile(ExportedRegion(program, GraphSpec("", str(device), (), (), (), (), (), ""))).to_bytes()
