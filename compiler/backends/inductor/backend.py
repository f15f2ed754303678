"""Torch's Inductor: `standalone_compile` compiles for GPUs, and AOTInductor for CPUs.

Both compile one graph ahead of time, without Dynamo guards, and their caches depend only on what we pass in.
`standalone_compile` makes an artifact that contains its GPU kernels, and other projects use it in production. For a
CPU, the same artifact contains only sources, so a new process would run the C++ compiler again. AOTInductor makes a
shared library, which loads in milliseconds, but its packages for GPUs crash on some Linux distributions.
"""

from __future__ import annotations

import os
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from ...common.torch_compat import (
    FOR_CPUS,
    FOR_GPUS,
    INDUCTOR_WARM_UP,
    CachingAutotuner,
    InvalidCxxCompiler,
    MissingName,
    cache_dir,
    get_cpp_compiler,
    missing,
    torch_key,
    triton_key,
)
from ...common.words import say
from ...identity.graph_spec import Executable, GraphSpec
from ...tracing.export import ExportedRegion
from ..base import GiveWay, at_once
from .artifacts import AotiPackage, Artifact
from .choices import kept_by_nobody
from .one_size import refuse_one_size
from .other_gpu import can_move
from .stride_order import comparing_strides

OLDEST_TORCH = (2, 8)
_hashing = threading.Lock()
_LAUNCHES = threading.Lock()


@contextmanager
def launching_by_address() -> Iterator[None]:
    """Pass addresses instead of tensors to the kernels that this thread launches.

    A launcher that gets a tensor asks CUDA whose memory it is. During a capture, CUDA's asynchronous allocator hands
    out addresses that have no memory yet, and that question ends the capture ("invalid argument").
    Raises MissingName if this torch has no such launcher. Then nothing may be captured.
    """
    launcher, thread = CachingAutotuner.get(), threading.get_ident()

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            args = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args]
        return original(kernel, *args, **kwargs)

    with _LAUNCHES:
        original = launcher.run
        launcher.run = run
        try:
            yield
        finally:
            launcher.run = original


class InductorBackend:
    """Satisfies `Backend`."""

    name = "inductor"
    capture_context = staticmethod(launching_by_address)
    trial_context = staticmethod(kept_by_nobody)
    rounds = False

    def available(self, device: torch.device) -> str | None:
        if reason := self.loads(device):
            return reason
        return _missing_for_cpu() if device.type == "cpu" else _unwritable_cache()

    def loads(self, device: torch.device) -> str | None:
        if torch.torch_version.TorchVersion(torch.__version__) < OLDEST_TORCH:
            wanted = ".".join(map(str, OLDEST_TORCH))
            return say(
                "Inductor graphs need torch {wanted} or newer; this is {found}: update torch.",
                wanted=wanted,
                found=torch.__version__,
            )
        if device.type == "cuda":
            return missing(*FOR_GPUS) or _missing_for_cuda(device)
        if device.type == "cpu":
            return missing(*FOR_CPUS)
        return say("Inductor graphs run on cuda and cpu devices, not on {device}.", device=device.type)

    def environment(self, device: torch.device) -> dict[str, str]:
        fields = {"backend": self.name, "torch": torch.__version__, "inductor": _inductor_version()}
        if device.type == "cuda":
            import triton

            capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
            runtime = torch.version.hip or torch.version.cuda or ""
            fields |= {"device": f"cuda {capability}", "runtime": runtime, "triton": triton.__version__}
            return fields | ({"gpu": str(device.index)} if device.index and not can_move() else {})
        capability = torch.backends.cpu.get_cpu_capability()
        return fields | {"device": f"cpu {capability}", "platform": sysconfig.get_platform()}

    def warm_up(self, give_way: GiveWay = at_once) -> None:
        threads = []
        for name in INDUCTOR_WARM_UP:
            give_way()
            with suppress(MissingName):
                name.get()
                if (hash_files := _HASHES.get(name)) is not None:
                    threads.append(threading.Thread(target=hash_files, daemon=True))
                    threads[-1].start()
        for thread in threads:
            thread.join()

    def compile(self, exported: ExportedRegion) -> Executable:
        refuse_one_size(exported.program.graph_module)
        with comparing_strides():
            return _kind_for(torch.device(exported.spec.device)).compile(exported)

    def load(self, data: bytes, spec: GraphSpec) -> Executable:
        device = torch.device(spec.device)
        return _kind_for(device).load(data, device)


def _hash_triton() -> None:
    with suppress(Exception):  # whoever needs the hash meets the error, too
        triton_key.get()()


def _kind_for(device: torch.device) -> type[AotiPackage] | type[Artifact]:
    return AotiPackage if device.type == "cpu" else Artifact


def _inductor_version() -> str:
    """Return a version that changes whenever Inductor's code does."""
    try:
        with _hashing:  # whoever comes second finds the hash, instead of hashing the same files again
            return torch_key.get()().hex()[:16]
    except MissingName:
        return str(torch.version.git_version)


_HASHES = {triton_key: _hash_triton, torch_key: _inductor_version}
"""Triton and torch hash their own files: a second of reading, which leaves Python's lock to the imports."""


def _missing_for_cuda(device: torch.device) -> str | None:
    if not _has_triton():
        package = "triton-windows" if os.name == "nt" else "triton"
        gpu = torch.cuda.get_device_name(device)
        return say("Compiling for {gpu} needs Triton: pip install {package}.", gpu=gpu, package=package)
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (7, 0):
        gpu = torch.cuda.get_device_name(device)
        return say("{gpu} is older than what Triton supports (compute capability 7.0).", gpu=gpu)
    return None


def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def find_cpp_compiler() -> str | None:
    """Return the C++ compiler that Inductor uses, None if there is none, or "" if this torch does not say."""
    try:
        find, none_found = get_cpp_compiler.get(), InvalidCxxCompiler.get()
    except MissingName:
        return ""
    try:
        return find()
    except (none_found, RuntimeError, OSError):
        return None


def _missing_for_cpu() -> str | None:
    if find_cpp_compiler() is None:
        package = "Visual Studio Build Tools" if os.name == "nt" else say("g++ or clang")
        return say(
            "Compiling for the CPU needs a C++ compiler, and none was found: install {package}, or set CXX to one.",
            package=package,
        )
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        return say("Compiling for the CPU needs Python's C headers: install the python3-dev package of this Python.")
    return _unwritable_cache()


def _unwritable_cache() -> str | None:
    try:
        with tempfile.TemporaryFile(dir=cache_dir.get()()):
            return None
    except MissingName:
        return None
    except OSError as error:
        return say(
            "Inductor cannot write to its folder ({error}): set TORCHINDUCTOR_CACHE_DIR to one it can.",
            error=error.strerror,
        )
