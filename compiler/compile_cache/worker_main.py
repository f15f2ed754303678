"""This code runs in a worker process: it receives regions without weights and returns compiled graphs.

Compiling needs its own process because tracing and compiling hold Python's lock and torch's global state. In one
process they would disturb a model that runs, and only one region could be compiled at a time.
"""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import struct
import sys
import warnings
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import torch
from torch import nn

from ..backends import BACKENDS
from ..backends.base import Backend
from ..backends.cuda_warmup import Example
from ..common.errors import one_line
from ..common.host import Host
from ..common.torch_compat import FakeTensorMode, ShapeEnv
from ..identity.call_signature import parse
from ..identity.fingerprint import fingerprint
from ..identity.graph_spec import GraphSpec
from ..tracing import attention_op as attention
from ..tracing import patch_ops as patches
from ..tracing.export import ExportedRegion, Variant, export_region

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Setup:
    """The settings that make a new process work like the one that starts it."""

    sys_path: tuple[str, ...]
    begin: str = ""
    """`module:function` in `compiler`: imports what the host needs and returns the host. Empty for a plain Host."""
    arguments: bytes = b""
    """Arguments for `begin`, pickled: their classes may be importable only with `sys_path` in place."""
    backend: str = ""
    device: str = "cpu"


@dataclass(frozen=True)
class Order:
    """A request for one graph. `Order.of` makes it, because a module that is sent must have no weights."""

    variant: Variant
    structure: str
    backend: str

    @classmethod
    def of(cls, variant: Variant, skeleton: nn.Module, backend: str) -> Order:
        """Return an order with `skeleton` in place of the variant's module. The structure is sent as text."""
        bare = replace(variant, module=skeleton, structure=None)
        return cls(bare, variant.structure.text, backend)


@dataclass(frozen=True)
class Made:
    """The answer to one order: a graph or an error."""

    spec: GraphSpec | None = None
    executable: bytes = b""
    error: str = ""


def main() -> None:
    """Answer orders from standard input until it ends. It ends when the process at its other end does."""
    source, target = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # printed text must not get between messages
    logging.disable(logging.WARNING)  # the process that started this one has logged it
    warnings.simplefilter("ignore")
    host, setup = Host(), receive(source)
    try:
        # Empty and relative entries depend on the current directory.
        sys.path[:] = filter(os.path.isabs, setup.sys_path)
        if setup.begin:
            module, _, function = setup.begin.partition(":")
            host = getattr(importlib.import_module(f"..{module}", __package__), function)(pickle.loads(setup.arguments))
        _warm_up(BACKENDS[setup.backend], torch.device(setup.device))
        send(target, Made())
    except BaseException as error:  # the other side sees nothing but the answer
        send(target, Made(error=one_line(error)))
        return
    while (order := _next(source, target)) is not None:
        try:
            made = _make(order, host)
        except BaseException as error:
            made = Made(error=one_line(error))
        send(target, made)


def receive(source: BinaryIO) -> Any:
    """Read one message. Raises EOFError if the other side has gone, and what unpickling raises."""
    head = source.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    length = _LENGTH.unpack(head)[0]
    data = source.read(length)
    if len(data) < length:
        raise EOFError
    return pickle.loads(data)


def send(target: BinaryIO, message: Any) -> None:
    """Write one message."""
    data = pickle.dumps(message)
    target.write(_LENGTH.pack(len(data)) + data)
    target.flush()


def _next(source: BinaryIO, target: BinaryIO) -> Order | None:
    """Return the next order, or None at the end. Answers orders whose module cannot be imported here."""
    while True:
        try:
            return receive(source)
        except EOFError:
            return None
        except Exception as error:
            send(target, Made(error=f"code that another process cannot import ({one_line(error)})"))


def _make(order: Order, host: Host) -> Made:
    backend = BACKENDS[order.backend]
    variant = replace(order.variant, structure=parse(order.structure)[0])
    if fingerprint(variant.module, host) != variant.fingerprint:
        return Made(error="code that differs in a worker process")
    exported = export_region(variant, host)
    return Made(exported.spec, backend.compile(exported).to_bytes())


def _warm_up(backend: Backend, device: torch.device) -> None:
    """Compile a small example: the first compile of a process costs 7 to 10 s of imports, and nobody waits yet."""
    attention.register_operator()
    patches.register_operators()
    backend.warm_up()
    with FakeTensorMode(shape_env=ShapeEnv()), torch.no_grad():
        # On a CPU the example would start a C++ compiler, which takes longer than the warm-up saves.
        block = nn.SiLU() if device.type == "cpu" else Example(device)
        example = torch.empty(2, 8, 6, 10, device=device, dtype=torch.float16)
        sizes = dict.fromkeys((0, 2, 3), torch.export.Dim.AUTO)
        program = torch.export.export(block, (example,), dynamic_shapes=(sizes,), strict=False)
    backend.compile(ExportedRegion(program, GraphSpec("", str(device), (), (), (), (), (), ""))).to_bytes()
