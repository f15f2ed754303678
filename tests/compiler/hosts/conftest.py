"""What tests in ComfyUI and in diffusers share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

# A package: in the root of this repository there is a module of that name.
_diffusers = find_spec("diffusers")
collect_ignore = [] if _diffusers and _diffusers.submodule_search_locations else ["diffusers"]

os.environ.update(OTEL_SDK_DISABLED="true", HF_HUB_OFFLINE="1")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Where cores are busy, threads of one small convolution mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
