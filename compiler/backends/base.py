"""The interface of a backend.

A backend turns an exported region into an executable, and an executable into bytes. It knows nothing about hosts,
workflows, files or registries, so a new backend is a page of code and changes nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from ..identity.graph_spec import Executable, GraphSpec
from ..tracing.export import ExportedRegion

GiveWay = Callable[[], None]


def at_once() -> None:
    """Give way to nobody."""


class Backend(Protocol):
    """A compiler for exported regions."""

    name: str
    capture_context: Callable[[], AbstractContextManager[None]] | None
    """The context to enter while a CUDA graph captures its executables. None if they cannot be captured."""
    trial_context: Callable[[], AbstractContextManager[None]]
    """The context to enter around calls at sizes that nobody uses. What it finds out by timing there is not kept."""
    rounds: bool
    """Whether it rounds the products of large layers itself, which adds nothing where weights are quantised."""

    def available(self, device: torch.device) -> str | None:
        """Return None, or one sentence that says what this device lacks and how to get it."""
        ...

    def loads(self, device: torch.device) -> str | None:
        """Return None if graphs that were compiled before can run here, or else one sentence that says why not.

        Loading may need less than compiling, such as no compiler.
        """
        ...

    def environment(self, device: torch.device) -> dict[str, str]:
        """Return everything that the executable's bytes depend on: versions, device, instruction set.

        The fields are part of a graph's key. They hold no more than correctness needs, because every change of a field
        costs a compile.
        """
        ...

    def warm_up(self, give_way: GiveWay = at_once) -> None:
        """Import what the first compile or load of a process needs, which takes seconds. Runs on any thread.

        It does not begin to use a GPU, so that a process that is warm can be forked. It calls `give_way` between pieces
        of work, and goes on when that returns.
        """
        ...

    def compile(self, exported: ExportedRegion) -> Executable:
        """Compile a region. Raises the compiler's own errors. May take minutes. Runs on any thread."""
        ...

    def load(self, data: bytes, spec: GraphSpec) -> Executable:
        """Make an executable, without compiling, from bytes that were made in an equal environment.

        It is for the device that `spec` names. The bytes may have been made on another one of the same machine.
        This can run native code from `data`, so callers pass only bytes that they trust.
        """
        ...
