"""The executables that Inductor makes, and their bytes: an artifact for a GPU, a package for a CPU."""

from __future__ import annotations

import copy
import inspect
import io
import logging
import platform
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ...common.torch_compat import CompiledArtifact, aoti_compile_and_package, aoti_load_package, standalone_compile
from ...tracing.export import ExportedRegion
from . import choices
from .channels_last import keep_channels_last
from .other_folder import in_this_folder
from .other_gpu import can_move, moved
from .repeated_subgraphs import folded, tracing_once
from .split_products import can_split, split_linears
from .triton_library import TritonLibrary, built_library
from .tuning import preferences, settings

log = logging.getLogger(__name__)

CPU = torch.device("cpu")


class OtherProcessor(Exception):
    """The machine code needs CPU instructions that this CPU lacks."""


class Artifact:
    """An artifact of `standalone_compile`, just compiled or loaded.

    With it go the library that Triton needs to run it, and the choices that its kernels have made.
    """

    _ARTIFACT, _LIBRARY, _CHOICES = "artifact", "triton/", "choices"

    def __init__(
        self, artifact: Any, library: TritonLibrary | None = None, brought: choices.Choices = MappingProxyType({})
    ) -> None:
        """`brought` are the choices that were loaded with it."""
        self._artifact = artifact
        self._library = library
        self._brought = brought

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        return self._artifact(*tensors)

    def to_bytes(self) -> bytes:
        """Return the artifact's bytes. They name no time: an artifact that was loaded is saved as the same bytes."""
        library, made = self._library or built_library(), self._choices()
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr(zipfile.ZipInfo(self._ARTIFACT), self._saved())
            if library is not None:
                name = zipfile.ZipInfo(f"{self._LIBRARY}{library.source}/{library.name}")
                archive.writestr(name, library.data, zipfile.ZIP_DEFLATED)
            if made:
                archive.writestr(zipfile.ZipInfo(self._CHOICES), choices.to_bytes(made))
        return buffer.getvalue()

    def has_grown(self, data: bytes | None = None) -> bool:
        """Return whether kernels have made choices that these bytes lack, by default those that were loaded."""
        if data is None:
            known = self._brought
        else:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                known = self._choices_in(archive)
        return not self._choices().keys() <= known.keys()

    def _choices(self) -> dict[str, str]:
        """Return the choices of its kernels. Those that it brought stay, or machines would replace each other's."""
        return {**choices.made_here(self._kernels), **self._brought}

    @cached_property
    def _kernels(self) -> tuple[str, ...]:
        """The names of the choices that its kernels may make."""
        return choices.names_of(self._saved())

    def _saved(self) -> bytes:
        # torch can save an artifact only to a path.
        with tempfile.TemporaryDirectory(prefix="compiled_graphs_") as folder:
            path = Path(folder, self._ARTIFACT)
            self._artifact.save(path=str(path), format="binary")
            return path.read_bytes()

    @classmethod
    def compile(cls, exported: ExportedRegion) -> Artifact:
        module = exported.program.graph_module
        results = module.graph.output_node()
        results.args = (tuple(result for result in results.args[0] if result is not None),)
        module.recompile()
        rewrites = [split_linears] if can_split(torch.device(exported.spec.device)) else []
        for some in ([keep_channels_last, *rewrites], rewrites):
            try:
                if (rewritten := _rewritten(module, some)) is not None:
                    return cls(_compiled_in_parts(rewritten))
            except Exception as error:  # some torch versions refuse some operators
                log.info("A graph is compiled with fewer changes: %s: %s", type(error).__name__, error)
        return cls(_compiled_in_parts(module))

    @classmethod
    def load(cls, data: bytes, device: torch.device) -> Artifact:
        """Load an artifact for a GPU. Raises CannotMove if it is for another one and cannot be moved."""
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            artifact, library = archive.read(cls._ARTIFACT), cls._library_in(archive)
            brought = cls._choices_in(archive)
        if device.index is not None and can_move():
            artifact = moved(artifact, device.index)
        if library is not None:
            library.put()
        choices.put(brought)
        # With more threads than one, Inductor starts processes that could compile kernels. No kernel is missing here.
        with (
            settings({"compile_threads": 1}),
            tempfile.TemporaryDirectory(prefix="compiled_graphs_") as folder,
        ):
            path = Path(folder, cls._ARTIFACT)
            path.write_bytes(in_this_folder(artifact))
            return cls(CompiledArtifact.get().load(path=str(path), format="binary"), library, brought)

    @classmethod
    def _library_in(cls, archive: zipfile.ZipFile) -> TritonLibrary | None:
        for name in archive.namelist():
            if name.startswith(cls._LIBRARY):
                source, _, file = name.removeprefix(cls._LIBRARY).partition("/")
                return TritonLibrary(source, file, archive.read(name))
        return None

    @classmethod
    def _choices_in(cls, archive: zipfile.ZipFile) -> dict[str, str]:
        is_there = cls._CHOICES in archive.namelist() and archive.getinfo(cls._CHOICES).file_size <= choices.MAX_BYTES
        return choices.from_bytes(archive.read(cls._CHOICES)) if is_there else {}


def _rewritten(
    module: torch.fx.GraphModule, rewrites: Sequence[Callable[[torch.fx.GraphModule], int]]
) -> torch.fx.GraphModule | None:
    """Return a copy of a graph that was changed to be faster, or None if nothing was changed."""
    rewritten = copy.deepcopy(module)
    return rewritten if sum(rewrite(rewritten) for rewrite in rewrites) else None


def _compiled_in_parts(module: torch.fx.GraphModule) -> Any:
    """Compile a graph, and what is repeated in it once, if this torch can."""
    try:
        if (shorter := folded(module)) is not None:
            with tracing_once():
                return _compiled(shorter)
    except Exception as error:  # some torch versions refuse some subgraphs, or lack a name that finding them needs
        log.info("A graph is compiled in one piece: %s: %s", type(error).__name__, error)
    return _compiled(module)


def _compiled(module: torch.fx.GraphModule) -> Any:
    for node in chain.from_iterable(m.graph.nodes for m in module.modules() if isinstance(m, torch.fx.GraphModule)):
        # Inductor's cache key includes these values. With real tensors instead, two widths got the same key.
        if node.meta.get("val") is not None:
            node.meta["example_value"] = node.meta["val"]
    examples = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    # With `aot`, the artifact is one self-contained callable; without it (torch 2.8, 2.9), a set of cache entries.
    compiler = standalone_compile.get()
    ahead_of_time = {"aot": True} if "aot" in inspect.signature(compiler).parameters else {}
    with preferences():
        return compiler(module, examples, dynamic_shapes="from_graph", **ahead_of_time)


class AotiPackage:
    """A package (.pt2) of AOTInductor, which holds a shared library.

    The compiler builds the library for the processor that it runs on ("-march=native"), so the bytes name that
    processor's instruction sets.
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
    def compile(cls, exported: ExportedRegion) -> AotiPackage:
        # AOTInductor writes into this setting, so each compile gets a dictionary of its own.
        with (
            settings({"aot_inductor.metadata": {}}),
            tempfile.TemporaryDirectory(prefix="compiled_graphs_") as folder,
        ):
            path = Path(folder, cls._PACKAGE)
            aoti_compile_and_package.get()(exported.program, package_path=str(path))
            buffer = io.BytesIO()
            with zipfile.ZipFile(buffer, "w") as archive:
                archive.writestr(zipfile.ZipInfo(cls._PACKAGE), path.read_bytes())
                archive.writestr(zipfile.ZipInfo(cls._FEATURES), " ".join(sorted(_cpu_features())))
        return cls.load(buffer.getvalue())

    @classmethod
    def load(cls, data: bytes, device: torch.device = CPU) -> AotiPackage:
        """Load a package. Raises OtherProcessor if this processor cannot run it."""
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if missing := set(archive.read(cls._FEATURES).decode().split()) - _cpu_features():
                raise OtherProcessor(f"built for a CPU with {min(missing)}, which this one lacks")
            with tempfile.TemporaryDirectory(prefix="compiled_graphs_") as folder:
                return cls(data, aoti_load_package.get()(archive.extract(cls._PACKAGE, folder)))


@lru_cache(maxsize=1)
def _cpu_features() -> frozenset[str]:
    """Return the instruction sets that the operating system names, or else only the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line.split(":", 1)[1].split() for line in lines if line.startswith(("flags", "Features"))), None)
    return frozenset(features or [platform.processor().replace(" ", "_")])
