"""Finding out where OneFlow is on this machine."""

from __future__ import annotations

import importlib.util

import pytest

in_worker = pytest.mark.skipif(importlib.util.find_spec("oneflow") is not None, reason="OneFlow is in this process")
