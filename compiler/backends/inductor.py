"""Torch's Inductor, through the call that other projects ship on: `standalone_compile`.

It compiles one graph ahead of time and gives an artifact that can be saved, with no Dynamo guards and no
cache keyed on anything but what we pass in.
"""

from __future__ import annotations

import inspect
import os
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..graph import GraphSpec
from ..trace import ExportedRegion

OLDEST_TORCH = (2, 8)


class InductorExecutable:
    """A loaded or freshly compiled Inductor artifact."""

    def __init__(self, artifact: Any) -> None:
        self._artifact = artifact

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        return self._artifact(*tensors)

    def to_bytes(self) -> bytes:
        # Torch writes artifacts to paths only.
        with tempfile.TemporaryDirectory(prefix="compiled_graphs_") as folder:
            path = Path(folder, "artifact.bin")
            self._artifact.save(path=str(path), format="binary")
            return path.read_bytes()


class InductorBackend:
    """Satisfies `Backend`."""

    name = "inductor"

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
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        return fields | {"device": f"cpu {pick_vec_isa()}", "platform": sysconfig.get_platform()}

    def compile(self, exported: ExportedRegion) -> InductorExecutable:
        from torch._inductor import standalone_compile

        module = exported.program.graph_module
        for node in module.graph.nodes:
            # Inductor's cache keys on these; with real tensors in their place two widths got one key.
            if node.meta.get("val") is not None:
                node.meta["example_value"] = node.meta["val"]
        results = module.graph.output_node()
        results.args = (tuple(result for result in results.args[0] if result is not None),)
        module.recompile()
        examples = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
        # Without it (torch 2.8, 2.9) the artifact is a set of cache entries, with it one self-contained callable.
        ahead_of_time = {"aot": True} if "aot" in inspect.signature(standalone_compile).parameters else {}
        artifact = standalone_compile(module, examples, dynamic_shapes="from_graph", **ahead_of_time)
        return InductorExecutable(artifact)

    def load(self, data: bytes, spec: GraphSpec) -> InductorExecutable:
        from torch._inductor import CompiledArtifact

        with tempfile.TemporaryDirectory(prefix="compiled_graphs_") as folder:
            path = Path(folder, "artifact.bin")
            path.write_bytes(data)
            return InductorExecutable(CompiledArtifact.load(path=str(path), format="binary"))


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
        folder = cache_dir()
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"Inductor cannot write to its folder ({error.strerror}): set TORCHINDUCTOR_CACHE_DIR to one it can."
