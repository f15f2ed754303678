"""ComfyUI in a worker process: its blocks can be imported and traced, and no model is loaded."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from ...common.host import Host
from ...compile_cache.worker_main import Setup
from . import comfy_compat

PRELOADED = ("PIL.Image", "einops", "safetensors.torch")
"""ComfyUI's blocks import these packages. Importing them does not begin to use a GPU. Its own modules do."""

LAYERS = "comfy.ops.cast_bias_weight"
"""A function of the module that has the layers of all blocks. To import it takes a second, and begins to use a GPU."""


def setup(backend: str, device: torch.device) -> Setup:
    """Return what a worker process needs to be like this ComfyUI: its modules, and the options it was started with."""
    options = {name: value for name, value in comfy_compat.start_options().items() if _travels(value)}
    given = pickle.dumps(Given(options, packages_of_extensions()))
    preloaded = tuple(name for name in PRELOADED if name in sys.modules)
    return Setup(tuple(sys.path), "hosts.comfy.worker_setup:make_host", given, backend, str(device), preloaded)


@dataclass(frozen=True)
class Given:
    """What a worker process is told about this ComfyUI."""

    options: dict[str, Any]
    """Those it was started with: they decide which functions its blocks call."""
    packages: dict[str, list[str]]
    """By name: the folders of extensions' packages."""


def make_host(given: Given) -> Host:
    """Import ComfyUI, and have extensions' modules found."""
    comfy_compat.set_start_options(given.options)
    adopt(given.packages)
    comfy_compat.find(LAYERS)  # the first order would wait for it
    from .rules.host import HOST

    return HOST


def packages_of_extensions() -> dict[str, list[str]]:
    """Return the packages that ComfyUI has loaded under their path as a name: no import finds those by it."""
    packages = [(name, module) for name, module in list(sys.modules.items()) if os.sep in name and "." not in name]
    return {name: list(module.__path__) for name, module in packages if hasattr(module, "__path__")}


def adopt(packages: Mapping[str, list[str]]) -> None:
    """Have modules of packages found by their names. What a package itself does when it is loaded is not done."""
    for name, folders in packages.items():
        package = ModuleType(name)
        package.__path__ = folders
        sys.modules.setdefault(name, package)


def _travels(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True
