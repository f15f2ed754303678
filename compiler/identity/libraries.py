"""Code that no description follows: libraries, and what a host is besides its models."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from ..common.host import Host

LIBRARIES = frozenset(
    {"torch", "torchvision", "numpy", "einops", "triton", "comfy_kitchen", "gguf"}
    | {"PIL", "accelerate", "httpx", "huggingface_hub", "packaging", "requests", "safetensors", "tokenizers", "tqdm"}
)
"""Packages whose code a description does not follow. Those of the second set compute nothing in a region."""


def is_outside(module: str, host: Host) -> bool:
    """Whether a Python module belongs to a library or to the host's infrastructure."""
    root = module.partition(".")[0]
    return root in LIBRARIES or root in sys.stdlib_module_names or is_in(module, host.infrastructure)


def is_bookkeeping(module: types.ModuleType, host: Host) -> bool:
    """Whether a module's data changes while programs run: every import changes Python's, and the host its own."""
    return module is sys or is_in(module.__name__, host.infrastructure)


def is_in(module: str, prefixes: Iterable[str]) -> bool:
    """Whether a module is one of these, or below one of them."""
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


def home_of(item: Any) -> str:
    """Return the module in which an item looks up its names. A wrapper's `__module__` is that of what it wraps."""
    home = item.__globals__.get("__name__") if isinstance(item, types.FunctionType) else item.__module__
    return home or "builtins"


def enclosed_functions(function: types.FunctionType) -> Iterator[types.FunctionType]:
    """Yield the functions in closure cells: a decorated function keeps the one that it wraps there."""
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:
            continue
        if isinstance(content, types.FunctionType):
            yield content
