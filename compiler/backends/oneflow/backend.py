"""OneFlow as a backend, on the side of the process that has torch."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import torch

from ...common import boot
from ...common.reason import ReasonCode
from ...common.words import join, say
from ...identity.graph_spec import GraphSpec
from ...tracing.attention_op import OVERRIDE
from ...tracing.export import ExportedRegion
from ...tracing.patch_ops import PatchFailed, WrongOutput, acts
from ..base import GiveWay, at_once
from .instances import Instances, memory_limit, pack
from .program import portable
from .worker_process import PACKAGE, WorkerProcess

PYTHON = "COMPILED_GRAPHS_ONEFLOW_PYTHON"
"""Environment variable with the path of a Python that has OneFlow, if this Python has none."""
NEWEST_MAJOR_OF_0_9 = 8
"""Newest major compute capability that OneFlow 0.9.0's packages have code for. They contain no PTX for newer GPUs."""


class Engine(Protocol):
    """The process in which OneFlow runs: this one or another."""

    def add(self, name: str, data: bytes, weights: int) -> None: ...

    def data(self, name: str) -> bytes: ...

    def run(self, name: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]: ...

    def report(self) -> dict[str, int]: ...


class InProcess:
    """OneFlow in this process. It shares tensors' memory with torch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.RLock()
        self._instances = Instances(str(device), memory_limit())

    def add(self, name: str, data: bytes, weights: int) -> None:
        with self._lock:
            if not self._instances.knows(name):
                self._instances.add(name, data)

    def data(self, name: str) -> bytes:
        with self._lock:
            return self._instances.data(name)

    def report(self) -> dict[str, int]:
        return {"built": self._instances.built, "resets": self._instances.resets, "process": os.getpid()}

    def run(self, name: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # OneFlow uses its own streams
        with self._lock:
            results = self._instances.run(name, [_to_oneflow(tensor) for tensor in tensors])
            return [_to_torch(result) for result in results]


def _to_oneflow(tensor: torch.Tensor) -> Any:
    """Share a tensor's memory. It is detached, because DLPack does not export tensors that require gradients."""
    import oneflow

    plain = tensor.detach().contiguous()
    if tensor.dtype is torch.bool:  # OneFlow 0.9.0 does not import bool through DLPack
        return oneflow.from_dlpack(torch.utils.dlpack.to_dlpack(plain.view(torch.uint8))).to(oneflow.bool)
    return oneflow.from_dlpack(torch.utils.dlpack.to_dlpack(plain))


def _to_torch(result: Any) -> torch.Tensor:
    import oneflow

    if result.dtype == oneflow.bool:
        numbers = result.to(oneflow.uint8)
        oneflow._oneflow_internal.eager.Sync()
        return torch.from_dlpack(oneflow.to_dlpack(numbers)).view(torch.bool)
    return torch.from_dlpack(oneflow.to_dlpack(result))


class OneFlowExecutable:
    """An exported program and the jobs that OneFlow has compiled from it so far."""

    def __init__(self, data: bytes, device: torch.device) -> None:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            text = archive.read("program.json")
        fields = json.loads(text)
        self._outputs: list[dict[str, int]] = fields["outputs"]
        self._writes: list[list[int]] = fields["writes"]
        self._weights: int = len(fields["weights"])
        self._name = hashlib.sha256(text).hexdigest()
        self._data = data
        self._device = device
        self._engine: Engine | None = None

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        if acts(OVERRIDE):  # OneFlow computes attention itself
            raise PatchFailed(WrongOutput(ReasonCode.OPTION, OVERRIDE))
        if self._engine is None:
            self._engine = engine(self._device)
            self._engine.add(self._name, self._data, self._weights)
        results = self._engine.run(self._name, tensors)
        for place, result in self._writes:
            tensors[place].copy_(results[result])
        return [tensors[out["input"]] if "input" in out else results[out["result"]] for out in self._outputs]

    def to_bytes(self) -> bytes:
        return self._data if self._engine is None else self._engine.data(self._name)

    def has_grown(self, data: bytes | None = None) -> bool:
        """Return whether these bytes, by default those it was made of, lack jobs. Each new size adds one."""
        return self.to_bytes() != (self._data if data is None else data)


class OneFlowBackend:
    """Satisfies `Backend`."""

    name = "oneflow"
    trial_context = nullcontext
    capture_context = None
    """None: OneFlow uses its own streams and waits for them."""
    rounds = False

    def available(self, device: torch.device) -> str | None:
        reason = _missing(device)
        if reason is None:
            return None
        return join([reason, onediff_text()], " ")

    def loads(self, device: torch.device) -> str | None:
        return self.available(device)

    def environment(self, device: torch.device) -> dict[str, str]:
        capability = ".".join(map(str, torch.cuda.get_device_capability(device))) if device.type == "cuda" else ""
        named = f"{device.type} {capability}".strip()
        return {
            "backend": self.name,
            "oneflow": probe(_python()).version,
            "device": named,
        }

    def warm_up(self, give_way: GiveWay = at_once) -> None:
        torch.export.default_decompositions()

    def compile(self, exported: ExportedRegion) -> OneFlowExecutable:
        """Translate a region. OneFlow compiles it when it is called, for the sizes of that call.

        Raises Unsupported if OneFlow cannot compute it.
        """
        return OneFlowExecutable(pack(portable(exported)), torch.device(exported.spec.device))

    def load(self, data: bytes, spec: GraphSpec) -> OneFlowExecutable:
        return OneFlowExecutable(data, torch.device(spec.device))


def engine(device: torch.device) -> Engine:
    """Return the engine of a device. Each device has one for as long as this process lives."""
    with _lock:
        key = str(device), _python()
        if key not in _engines:
            _engines[key] = InProcess(device) if _is_here() else WorkerProcess(_python(), device)
        return _engines[key]


_engines: dict[tuple[str, str], Engine] = {}
_lock = threading.Lock()


def onediff_text() -> str:
    """Return a sentence on what an installed onediff lacks, or "" if none is installed. onediff is not imported.

    Its `oneflow_compile` translates the same blocks in another way, with a OneFlow that no package index has.
    """
    try:
        version = metadata.version("onediff")
    except metadata.PackageNotFoundError:
        return ""
    if _is_here() and Path(importlib.util.find_spec("oneflow").origin).parent.joinpath(*_ARGS_TREE).is_file():
        return say(
            "onediff {version} is installed with a OneFlow that is new enough for it, but it is not needed here.",
            version=version,
        )
    if not _is_here():
        return say(
            "onediff {version} is installed, but this Python has no OneFlow with oneflow.framework.args_tree, "
            "which it needs. It is not used.",
            version=version,
        )
    return say(
        "onediff {version} is installed, but OneFlow {older} lacks oneflow.framework.args_tree, which it needs. "
        "It is not used.",
        version=version,
        older=metadata.version("oneflow"),
    )


_ARGS_TREE = ("framework", "args_tree.py")


def _is_here() -> bool:
    """Whether OneFlow can be imported in this process."""
    return not os.environ.get(PYTHON) and importlib.util.find_spec("oneflow") is not None


def _python() -> str:
    return os.environ.get(PYTHON) or sys.executable


def _missing(device: torch.device) -> str | None:
    if not sys.platform.startswith("linux"):
        return say("OneFlow has packages for Linux only: choose inductor.")
    if device.type not in ("cpu", "cuda"):
        return say("OneFlow graphs run on cuda and cpu devices, not on {device}.", device=device.type)
    if not _is_here() and not os.environ.get(PYTHON):
        here = ".".join(map(str, sys.version_info[:2]))
        return say(
            "OneFlow is not installed in this Python ({here}; it has packages for 3.7 to 3.10): "
            "scripts/oneflow.sh makes a Python that has it. Set {variable} to its path.",
            here=here,
            variable=PYTHON,
        )
    found = probe(_python())
    if found.error:
        return say("OneFlow cannot be used from {python}: {error}.", python=_python(), error=found.error)
    if device.type == "cpu":
        return None
    if found.capability is None:
        return say(
            "OneFlow {version} sees no GPU: it needs NVIDIA's driver and CUDA 11 libraries.", version=found.version
        )
    major, minor = torch.cuda.get_device_capability(device)
    if found.version.startswith("0.9.0") and major > NEWEST_MAJOR_OF_0_9:
        return say(
            "OneFlow {version} has no code for {gpu} (compute capability {capability}): choose inductor.",
            version=found.version,
            gpu=torch.cuda.get_device_name(device),
            capability=f"{major}.{minor}",
        )
    return None


@dataclass(frozen=True)
class Found:
    """The OneFlow that a Python has."""

    version: str = ""
    capability: tuple[int, int] | None = None
    """Compute capability of the GPU that OneFlow sees, or None."""
    error: str = ""
    """Why OneFlow cannot be used. Empty if it can."""


@lru_cache
def probe(python: str) -> Found:
    """Ask a Python about its OneFlow. The answer is cached, because asking takes a second."""
    own = {} if python == sys.executable else {"PYTHONPATH": ""}
    environment = boot.environment(GLOG_minloglevel="2", **own)
    command = boot.command(python, PACKAGE, Path(__file__).resolve().parent, "version")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return Found(error=getattr(error, "strerror", None) or "it does not answer")
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return Found(error=lines[-1] if lines else f"it ended with {done.returncode}")
    version, capability = json.loads(done.stdout.strip().splitlines()[-1])
    return Found(version, None if capability is None else tuple(capability))


def report(device: Any) -> dict[str, int]:
    """Return how many graphs OneFlow has built for a device, how often it was reset, and in which process."""
    return engine(torch.device(device)).report()
