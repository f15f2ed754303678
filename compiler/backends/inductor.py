"""Torch's Inductor: through `standalone_compile` for GPUs, through AOTInductor for CPUs.

Both compile one graph ahead of time, with no Dynamo guards and no cache keyed on anything but what we pass in.
`standalone_compile` gives an artifact that carries its GPU kernels, and other projects ship on it. For a CPU the
same artifact carries only sources, so that a new process would run the C++ compiler again; AOTInductor gives a
shared library, which loads in milliseconds. (On GPUs its packages crash on some Linux distributions.)
"""

from __future__ import annotations

import importlib
import inspect
import io
import logging
import os
import platform
import sysconfig
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ..graph import Executable, GraphSpec
from ..trace import ExportedRegion
from .repeats import folded, tracing_once

log = logging.getLogger(__name__)

OLDEST_TORCH = (2, 8)
LONGEST_ROW = 4096
"""Values of a row that is reduced in registers."""
LONGEST_HEAD = 256
"""Those of one that is reduced so wherever it lies, such as one head of a query."""


class OtherProcessor(Exception):
    """Machine code for a CPU with instructions that this one lacks."""


class Artifact:
    """What `standalone_compile` makes, fresh or loaded."""

    def __init__(self, artifact: Any) -> None:
        self._artifact = artifact

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        return self._artifact(*tensors)

    def to_bytes(self) -> bytes:
        # Torch writes artifacts to paths only.
        with tempfile.TemporaryDirectory(prefix="compiled_graphs_") as folder:
            path = Path(folder, "artifact")
            self._artifact.save(path=str(path), format="binary")
            return path.read_bytes()

    @classmethod
    def compile(cls, exported: ExportedRegion) -> Artifact:
        module = exported.program.graph_module
        results = module.graph.output_node()
        results.args = (tuple(result for result in results.args[0] if result is not None),)
        module.recompile()
        if (shorter := folded(module)) is not None:
            try:
                with tracing_once():
                    return cls(_compiled(shorter))
            except Exception as error:  # not every torch takes every subgraph
                log.info("A graph is compiled in one piece: %s: %s", type(error).__name__, error)
        return cls(_compiled(module))

    @classmethod
    def load(cls, data: bytes) -> Artifact:
        from torch._inductor import CompiledArtifact

        with tempfile.TemporaryDirectory(prefix="compiled_graphs_") as folder:
            path = Path(folder, "artifact")
            path.write_bytes(data)
            return cls(CompiledArtifact.load(path=str(path), format="binary"))


def _compiled(module: torch.fx.GraphModule) -> Any:
    from torch._inductor import standalone_compile

    for node in chain.from_iterable(m.graph.nodes for m in module.modules() if isinstance(m, torch.fx.GraphModule)):
        # Inductor's cache keys on these; with real tensors in their place two widths got one key.
        if node.meta.get("val") is not None:
            node.meta["example_value"] = node.meta["val"]
    examples = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    # Without it (torch 2.8, 2.9) the artifact is a set of cache entries, with it one self-contained callable.
    ahead_of_time = {"aot": True} if "aot" in inspect.signature(standalone_compile).parameters else {}
    with _preferences():
        return standalone_compile(module, examples, dynamic_shapes="from_graph", **ahead_of_time)


@contextmanager
def _preferences() -> Iterator[None]:
    """While a graph is compiled, choose otherwise than Inductor does by itself.

    It keeps rows of up to 1,024 values in registers while it normalises them, and reads longer ones twice. Those of
    transformers have up to 4,096, and take 5.9 us where they took 10.1 (2,048 rows of 1,280 in fp16 on an H200). Of
    heads, whose rows do not follow each other, it keeps 64 values, and they have 128.

    It times two forms of each kernel that goes value by value, at a graph's example sizes, which are small, and while
    other graphs are compiled on the same GPU. The form that reads neighbours at once is the faster one at real sizes;
    the other was taken by chance now and then, and took up to 2.5 times as long. Only a kernel that reads what are
    no neighbours, as rotary embeddings do, can be twice as fast in that one, and is still timed.
    """
    from torch._inductor import config
    from torch._inductor.choices import InductorChoices
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    class Choices(InductorChoices):
        @staticmethod
        def should_use_persistent_reduction(features: Any, *args: Any) -> bool:
            if InductorChoices.should_use_persistent_reduction(features, *args):
                return True
            values, hint = features.reduction_numel, features.get_reduction_hint()
            longest = {ReductionHint.INNER: LONGEST_ROW, ReductionHint.DEFAULT: LONGEST_HEAD}.get(hint, 0)
            return values.is_Integer and bool(values <= longest)

        def triton_kernel_kwargs(self, kernel: type, features: Any, *args: Any) -> dict[str, Any]:
            config.triton.autotune_pointwise = _gathers(features)  # this kernel's code is written next
            return super().triton_kernel_kwargs(kernel, features, *args)

    with V.set_choices_handler(Choices()), config.patch({"triton.autotune_pointwise": True}):
        yield


def _gathers(features: Any) -> bool:
    """Whether a kernel reads something of which values that follow each other lie apart."""
    reads = chain.from_iterable(node.read_writes.reads for node in features.scheduler_nodes())
    return any(not read.stride1_for_last_dim() for read in reads if hasattr(read, "stride1_for_last_dim"))


class Library:
    """What AOTInductor makes: a package (.pt2) around a shared library.

    The library is built for the processor it is built on ("-march=native"), so its bytes name that one's
    instruction sets.
    """

    _PACKAGE, _FEATURES = "graph.pt2", "cpu_features"

    def __init__(self, data: bytes, runner: Any) -> None:
        self._data = data
        self._runner = runner

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        return [output for output in self._runner.loader.run(list(tensors)) if output is not None]

    def to_bytes(self) -> bytes:
        return self._data

    @classmethod
    def compile(cls, exported: ExportedRegion) -> Library:
        from torch._inductor import aoti_compile_and_package, config

        # AOTInductor writes into this setting; a dictionary of this compile's own takes it.
        with (
            config.patch({"aot_inductor.metadata": {}}),
            tempfile.TemporaryDirectory(prefix="compiled_graphs_") as folder,
        ):
            path = Path(folder, cls._PACKAGE)
            aoti_compile_and_package(exported.program, package_path=str(path))
            buffer = io.BytesIO()
            with zipfile.ZipFile(buffer, "w") as archive:
                archive.write(path, cls._PACKAGE)
                archive.writestr(cls._FEATURES, " ".join(sorted(_cpu_features())))
        return cls.load(buffer.getvalue())

    @classmethod
    def load(cls, data: bytes) -> Library:
        """Raises OtherProcessor if this one cannot run it."""
        from torch._inductor import aoti_load_package

        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if missing := set(archive.read(cls._FEATURES).decode().split()) - _cpu_features():
                raise OtherProcessor(f"built for a CPU with {min(missing)}, which this one lacks")
            with tempfile.TemporaryDirectory(prefix="compiled_graphs_") as folder:
                return cls(data, aoti_load_package(archive.extract(cls._PACKAGE, folder)))


_LAUNCHES = threading.Lock()


@contextmanager
def launching_by_address() -> Iterator[None]:
    """Have kernels that this thread launches given the addresses of tensors, which are not looked up then.

    Given a tensor, a launcher asks CUDA whose memory it is. While a call is recorded, CUDA's asynchronous allocator
    hands out addresses that have no memory yet, and the question ends the recording ("invalid argument").
    """
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    thread = threading.get_ident()

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            args = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args]
        return original(kernel, *args, **kwargs)

    with _LAUNCHES:
        original = CachingAutotuner.run
        CachingAutotuner.run = run
        try:
            yield
        finally:
            CachingAutotuner.run = original


class InductorBackend:
    """Satisfies `Backend`."""

    name = "inductor"
    recording = staticmethod(launching_by_address)
    grows = False

    def available(self, device: torch.device) -> str | None:
        if torch.torch_version.TorchVersion(torch.__version__) < OLDEST_TORCH:
            wanted = ".".join(map(str, OLDEST_TORCH))
            return f"Inductor graphs need torch {wanted} or newer; this is {torch.__version__}: update torch."
        if device.type == "cuda":
            return _missing_for_cuda(device)
        if device.type == "cpu":
            return _missing_for_cpu()
        return f"Inductor graphs run on cuda and cpu devices, not on {device.type}."

    def environment(self, device: torch.device) -> dict[str, str]:
        from torch._inductor.codecache import torch_key

        fields = {"backend": self.name, "torch": torch.__version__, "inductor": torch_key().hex()[:16]}
        if device.type == "cuda":
            import triton

            capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
            runtime = torch.version.hip or torch.version.cuda or ""
            return fields | {"device": f"cuda {capability}", "runtime": runtime, "triton": triton.__version__}
        capability = torch.backends.cpu.get_cpu_capability()
        return fields | {"device": f"cpu {capability}", "platform": sysconfig.get_platform()}

    def warm_up(self) -> None:
        for name in ("compile_fx", "select_algorithm", "async_compile", "standalone_compile"):
            importlib.import_module(f"torch._inductor.{name}")
        from torch._inductor.codecache import CacheBase, torch_key

        torch_key()
        CacheBase.get_system()

    def compile(self, exported: ExportedRegion) -> Executable:
        return (Library if exported.spec.device == "cpu" else Artifact).compile(exported)

    def load(self, data: bytes, spec: GraphSpec) -> Executable:
        return (Library if spec.device == "cpu" else Artifact).load(data)


@lru_cache(maxsize=1)
def _cpu_features() -> frozenset[str]:
    """Return the instruction sets that the operating system names, or the processor's name as the only one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line.split(":", 1)[1].split() for line in lines if line.startswith(("flags", "Features"))), None)
    return frozenset(features or [platform.processor().replace(" ", "_")])


def _missing_for_cuda(device: torch.device) -> str | None:
    from torch.utils._triton import has_triton_package

    if not has_triton_package():
        package = "triton-windows" if os.name == "nt" else "triton"
        return f"Compiling for {torch.cuda.get_device_name(device)} needs Triton: pip install {package}."
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (7, 0):
        return f"{torch.cuda.get_device_name(device)} is older than what Triton supports (compute capability 7.0)."
    return _unwritable_cache()


def _missing_for_cpu() -> str | None:
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, RuntimeError, OSError):
        remedy = "install Visual Studio Build Tools" if os.name == "nt" else "install g++ or clang"
        return f"Compiling for the CPU needs a C++ compiler, and none was found: {remedy}, or set CXX to one."
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        return "Compiling for the CPU needs Python's C headers: install the python3-dev package of this Python."
    return _unwritable_cache()


def _unwritable_cache() -> str | None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    try:
        with tempfile.TemporaryFile(dir=cache_dir()):
            return None
    except OSError as error:
        return f"Inductor cannot write to its folder ({error.strerror}): set TORCHINDUCTOR_CACHE_DIR to one it can."
