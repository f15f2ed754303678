"""What a graph depends on besides its region and its call."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from compiled_graphs.compiler import environment as module
from compiled_graphs.compiler.backends.eager import EagerBackend

CPU = torch.device("cpu")


def test_it_is_the_backends_and_the_version_of_our_tracing():
    fields = module.environment(EagerBackend(), CPU)
    assert fields == EagerBackend().environment(CPU) | {"tracing": module.tracing_version()}


def test_of_the_code_that_changes_a_graph_before_it_is_compiled_only_its_own_backends_counts():
    def code(name):
        return module.environment(SimpleNamespace(name=name, environment=lambda device: {}), CPU).get("compiling")

    assert code("eager") is code("oneflow") is None
    assert code("inductor") != code("inductor_fp8")


def test_another_way_to_trace_is_another_version(monkeypatch, tmp_path):
    def version_of(source: str) -> str:
        for name in module._TRACING:
            (tmp_path / f"{name}.py").write_bytes(source.encode())
        monkeypatch.setattr(module, "__file__", str(tmp_path / "environment.py"))
        module._digest.cache_clear()
        return module.tracing_version()

    try:
        assert version_of("a = 1\n") != version_of("a = 2\n")
        assert version_of("a = 1\n") == version_of("a = 1\r\n")
    finally:
        module._digest.cache_clear()
