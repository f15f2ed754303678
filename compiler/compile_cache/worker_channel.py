"""A worker process as the process that started it sees it, and how one is started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..common import boot

# Each worker compiles on one core: there are several of them. Most of a compile is sympy, which keeps 1,000 results of
# each of its functions by default. With more, compiling a block of SDXL took a tenth less.
ENVIRONMENT = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1", "SYMPY_CACHE_SIZE": "100000"}
NICENESS = 5
"""Workers lower their priority by this much. The main process makes images, and prepares the next orders."""
END_LIMIT = 5.0
"""Seconds to wait for a process that was killed. One that is stuck in a GPU's driver may not end for long."""

_PACKAGE = __name__.partition(".compiler.")[0]
"""This package's name. In ComfyUI that is the name of its folder."""
_FOLDER = Path(__file__).resolve().parents[2]
_FLAGS = getattr(subprocess, "CREATE_NO_WINDOW", 0) | getattr(subprocess, "BELOW_NORMAL_PRIORITY_CLASS", 0)
"""Of Windows. Elsewhere there are none, and a process lowers its own priority."""


@dataclass(frozen=True)
class Channel:
    """A worker process, as the process that started it sees it."""

    pid: int
    source: BinaryIO
    target: BinaryIO
    kill: Callable[[], None]
    """Kill it, and leave the pipes open: whoever reads from them sees their end."""
    wait: Callable[[], object]
    """Have the system forget it, if it ends within `END_LIMIT`."""
    is_forked: bool = False


def spawned() -> Channel:
    """Return a new worker process that imports everything itself."""
    process = subprocess.Popen(
        command("worker_main"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=boot.environment(**ENVIRONMENT),
        creationflags=_FLAGS,
    )

    def wait() -> None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_LIMIT)

    return Channel(process.pid, process.stdout, process.stdin, kill=process.kill, wait=wait)


def give_way() -> None:
    """Lower this process's priority, so that the process that makes images runs first."""
    with suppress(AttributeError, OSError):  # Windows has no `nice`, and a sandbox may forbid it
        os.nice(NICENESS)


def command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module of this folder."""
    return boot.command(sys.executable, _PACKAGE, _FOLDER, f"compiler.compile_cache.{module}", *arguments)
