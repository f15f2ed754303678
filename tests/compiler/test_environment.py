"""What a graph depends on besides its region and its call."""

from __future__ import annotations

import torch
from compiled_graphs.compiler import environment as module
from compiled_graphs.compiler.backends.eager import EagerBackend

CPU = torch.device("cpu")


def test_it_is_the_backends_and_the_version_of_our_tracing():
    fields = module.environment(EagerBackend(), CPU)
    assert fields == EagerBackend().environment(CPU) | {"tracing": module.tracing_version()}


def test_another_way_to_trace_is_another_version(monkeypatch, tmp_path):
    def version_of(source: str) -> str:
        for name in module._TRACING:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / f"{name}.py").write_bytes(source.encode())
        monkeypatch.setattr(module, "__file__", str(tmp_path / "environment.py"))
        module.tracing_version.cache_clear()
        return module.tracing_version()

    try:
        assert version_of("a = 1\n") != version_of("a = 2\n")
        assert version_of("a = 1\n") == version_of("a = 1\r\n")
    finally:
        module.tracing_version.cache_clear()
