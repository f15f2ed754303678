from __future__ import annotations

import pytest
import torch
from compiled_graphs.compiler.registry import Registry


@pytest.fixture(autouse=True)
def _inference():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture
def registry():
    return Registry()
