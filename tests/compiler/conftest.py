from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from compiled_graphs.compiler.common import torch_compat
from compiled_graphs.compiler.compile_cache import graph_cache as graph_cache_module
from compiled_graphs.compiler.registry.registry import Registry


@pytest.fixture(autouse=True)
def _inference():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def _own_key(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("COMPILED_GRAPHS_TRUST", str(tmp_path_factory.mktemp("trust")))


@pytest.fixture
def registry():
    return Registry()


@pytest.fixture(scope="module")
def _traced():
    return {}


@pytest.fixture
def traced_once(_traced, monkeypatch):
    """Trace blocks with the same key once in a file: torch.export takes 0.3 to 3 s.

    Tests of what happens to graphs use it. Tests of tracing, and of blocks that notice a trace, do not.
    """
    trace = graph_cache_module.export_region

    def export_region(variant, host):
        key = (variant.fingerprint, variant.signature, variant.device, variant.dtypes, variant.hints, variant.symbolic)
        key = (*key, type(host), trace)
        if key not in _traced:
            _traced[key] = trace(variant, host)
        exported = _traced[key]
        return dataclasses.replace(exported, program=copy.deepcopy(exported.program))

    monkeypatch.setattr(graph_cache_module, "export_region", export_region)


@pytest.fixture
def take_away(monkeypatch):
    """Take names of torch's own away from what is looked up from now on."""

    def take_away(*gone, look_up=torch_compat._look_up):
        def without(path):
            if path in gone:
                raise torch_compat.MissingName(path)
            return look_up(path)

        monkeypatch.setattr(torch_compat, "_look_up", without)

    return take_away
