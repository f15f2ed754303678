from __future__ import annotations

import pytest
import torch
from compiled_graphs.compiler.registry import Registry


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
