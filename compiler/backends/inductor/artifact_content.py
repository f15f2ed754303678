"""What the bytes of an artifact hold: what torch pickled (AOTCompiledArtifact, since torch 2.10)."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ...common.torch_compat import BytesReader, BytesWriter

_HEADER = b"AOTCompiledArtifact"
_DEEPEST = 4
"""How far inside of an artifact its graphs are looked for."""


@dataclass(frozen=True)
class ArtifactContent:
    """What was unpickled. Whoever changes its graphs makes other bytes of it."""

    version: bytes
    pickled: Any
    graphs: list[Any]
    """Each is a `torch._inductor.output_code.CompiledFxGraph`: forward, and backward where autograd was recorded."""

    @classmethod
    def read(cls, data: bytes) -> ArtifactContent | None:
        """Return what bytes hold, or None if they have another format. Raises what unpickling raises, and MissingName.

        This unpickles `data`, so callers pass only bytes that they trust.
        """
        reader = BytesReader.get()(data)
        header, version = reader.read_bytes(), reader.read_bytes()
        if header != _HEADER:
            return None
        pickled = pickle.loads(reader.read_bytes())
        return cls(version, pickled, list({id(graph): graph for graph in _graphs_in(pickled)}.values()))

    def timed_kernels(self) -> Iterator[Any]:
        """Yield the kernels that have several forms (CachingAutotuner)."""
        for graph in self.graphs:
            bundle = graph._triton_bundle
            for launcher in bundle.static_autotuners if bundle is not None else ():
                if len(launcher.kernel.compile_results) > 1:
                    yield launcher.kernel

    def to_bytes(self) -> bytes:
        writer = BytesWriter.get()()
        for part in (_HEADER, self.version, pickle.dumps(self.pickled)):
            writer.write_bytes(part)
        return writer.to_bytes()


def _graphs_in(pickled: Any, depth: int = 0) -> Iterator[Any]:
    if hasattr(pickled, "source_code") and hasattr(pickled, "device_idxs"):
        yield pickled
    elif depth < _DEEPEST:
        parts: Iterable[Any] = pickled if isinstance(pickled, tuple | list) else vars(pickled).values() \
            if hasattr(pickled, "__dict__") else ()  # fmt: skip
        for part in parts:
            yield from _graphs_in(part, depth + 1)
