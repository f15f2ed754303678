"""Whether OneFlow can be used on this machine: in this Python, or in the one that the environment names."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from compiled_graphs.compiler.backends.oneflow import OneFlowBackend

REASON = OneFlowBackend().available(torch.device("cpu"))
needs_oneflow = pytest.mark.skipif(REASON is not None, reason=f"OneFlow: {REASON}")
in_worker = pytest.mark.skipif(importlib.util.find_spec("oneflow") is not None, reason="OneFlow: it is in this process")
