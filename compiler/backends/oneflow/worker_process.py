"""OneFlow in another Python: it has packages for Python 3.7 to 3.10 only, and hosts run on newer ones."""

from __future__ import annotations

import mmap
import os
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ...common import boot
from ...common.jobs import CompileTimeout, compile_limit
from ...common.reason import ReasonCode
from .serve import Arena, places, receive, send

PATIENCE = 30.0
"""A call with known sizes may take at least this many seconds before OneFlow's process counts as hanging."""
PACKAGE = "oneflow_side"
"""OneFlow's Python imports this folder under this name, because its parent packages import torch."""


class OneFlowError(RuntimeError):
    """OneFlow raised an error, or its process ended."""


class WorkerProcess:
    """The one process that serves a device. It is started when it is needed, and again if it dies."""

    def __init__(self, python: str, device: torch.device) -> None:
        self._python = python
        self._device = device
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._arena = Arena(os.memfd_create("compiled_graphs"))
        self._programs: dict[str, bytes] = {}
        """All programs by name, for a process that replaces this one."""
        self._weight_counts: dict[str, int] = {}
        """The number of weights among each program's tensors."""
        self._weights_end = 0
        """Offset in the arena at which all programs' weights end."""
        self._limits: dict[tuple, float] = {}
        """Seconds after which a call counts as hanging, by program and sizes. Only answered calls have a limit here."""
        self.starts = 0

    def add(self, name: str, data: bytes, weights: int) -> None:
        """Send a program. Its first tensors are weights, and `weights` is their number."""
        with self._lock:
            if name not in self._programs:
                self._programs[name], self._weight_counts[name] = data, weights
                self._ask({"do": "add", "program": name}, data)

    def data(self, name: str) -> bytes:
        """Return a program with the jobs compiled for it so far."""
        with self._lock:
            self._programs[name] = self._ask({"do": "data", "program": name})[1]
            return self._programs[name]

    def report(self) -> dict[str, int]:
        """Return how many graphs OneFlow built, how often it was reset, and the process's number."""
        with self._lock:
            return self._ask({"do": "report"})[0]

    def run(self, name: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the results on this object's device. The tensors may be on any.

        Raises OneFlowError and CompileTimeout.
        """
        with self._lock:
            sizes = [t.numel() * t.element_size() for t in tensors]
            begin, end = self._place_of_weights(name, sizes)
            count = self._weight_counts[name]
            weights, _ = places(sizes[:count], begin)
            inputs, end_of_inputs = places(sizes[count:], self._weights_end)
            memory = self._arena.reserve(max(end_of_inputs, 1))
            described = []
            for tensor, offset in zip(tensors, [*weights, *inputs], strict=True):
                _view(memory, tensor.dtype, tensor.shape, offset).copy_(tensor)
                described.append([str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset])
            message = {"tensors": described, "weights": [begin, end], "end": end_of_inputs}
            key = name, tuple(t.shape for t in tensors[count:])
            start = time.monotonic()
            answer, _ = self._ask({"do": "run", "program": name, **message}, limit=self._limits.get(key))
            self._limits[key] = max(PATIENCE, 20 * (time.monotonic() - start), self._limits.get(key, 0.0))
            memory = self._arena.reserve(max(answer["end"], 1))
            views = [_view(memory, getattr(torch, d), shape, offset) for d, shape, offset in answer["results"]]
            return [view.to(self._device, copy=True) for view in views]

    def _place_of_weights(self, name: str, sizes: list[int]) -> tuple[int, int]:
        """Return the offsets at which a program's weights begin and end in the arena. They never change."""
        if name not in self._arena.weights:
            _, end = places(sizes[: self._weight_counts[name]], self._weights_end)
            end = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
            self._arena.weights[name] = self._weights_end, end
            self._weights_end = end
        return self._arena.weights[name]

    def _ask(
        self, message: dict[str, Any], data: bytes = b"", limit: float | None = None
    ) -> tuple[dict[str, Any], bytes]:
        """Return the answer. A process that has died, or gives no answer within `limit` seconds, is replaced once."""
        for last_try in (False, True):
            try:
                if self._process is None:
                    self._start()
                answer, rest = self._exchange(message, data, None if last_try else limit)
                break
            except (EOFError, OSError) as error:
                self._end()
                if last_try:
                    raise OneFlowError(f"OneFlow's process ended ({error or 'without a message'})") from None
        if "error" in answer:
            raise OneFlowError(answer["error"])
        return answer, rest

    def _exchange(
        self, message: dict[str, Any], data: bytes = b"", known_limit: float | None = None
    ) -> tuple[dict[str, Any], bytes]:
        limit = known_limit or compile_limit()
        expired = threading.Event()
        timer = threading.Timer(limit, lambda: (expired.set(), self._process.kill()))
        timer.daemon = True
        timer.start()
        try:
            send(self._process.stdin, message, data)
            return receive(self._process.stdout)
        except (EOFError, OSError):
            if expired.is_set() and known_limit is None:
                self._end()
                raise CompileTimeout(ReasonCode.TIMEOUT, f"{limit:g} s in OneFlow") from None
            raise
        finally:
            timer.cancel()

    def _start(self) -> None:
        environment = boot.environment(GLOG_minloglevel="3", PYTHONPATH="")
        folder, descriptor = Path(__file__).resolve().parent, self._arena.descriptor
        command = boot.command(self._python, PACKAGE, folder, "serve", str(self._device), str(descriptor))
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, pass_fds=[descriptor]
        )
        self.starts += 1
        for name, data in self._programs.items():
            self._exchange({"do": "add", "program": name}, data)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):  # unsent bytes cannot be flushed any more
                    pipe.close()


def _view(memory: Any, dtype: torch.dtype, shape: Sequence[int], offset: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(tuple(shape))
