"""What the compiler asks of a backend.

A backend turns an exported region into an executable and an executable into bytes. It knows nothing of
hosts, workflows, files or registries, so that a new one is a page of code and the rest does not change.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from ..identity.graph_spec import Executable, GraphSpec
from ..tracing.export import ExportedRegion


class Backend(Protocol):
    """A compiler for exported regions."""

    name: str
    capture_context: Callable[[], AbstractContextManager[None]] | None
    """What is entered while its executables become part of a CUDA graph; None if they cannot."""
    grows: bool
    """Whether an executable's bytes come to hold more while it is used, so that what was written of it gets old."""

    def available(self, device: torch.device) -> str | None:
        """Return None, or one sentence saying what is missing for this device and how to get it."""
        ...

    def environment(self, device: torch.device) -> dict[str, str]:
        """Return everything the executable's bytes depend on: versions, device, instruction set.

        Part of a graph's key. No more than correctness needs: each field that changes without need costs
        somebody a compile.
        """
        ...

    def warm_up(self) -> None:
        """Do ahead, on any thread, what the first compile or load of a process costs: imports, for seconds."""
        ...

    def compile(self, exported: ExportedRegion) -> Executable:
        """Compile a region. Raises the compiler's own errors. May take minutes, runs on any thread."""
        ...

    def load(self, data: bytes, spec: GraphSpec) -> Executable:
        """Make an executable from bytes of an equal environment, without compiling.

        This can run native code from `data`: callers pass only bytes they have reason to trust.
        """
        ...
