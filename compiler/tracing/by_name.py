"""Functions and constants that a graph holds as text: an operator finds them again when it runs."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch


def function_now(name: str) -> Callable:
    """Return the function that stands under `module:name` at this moment. Raises ImportError or AttributeError."""
    module, _, attribute = name.partition(":")
    return getattr(sys.modules.get(module) or importlib.import_module(module), attribute)


def can_find(name: str) -> bool:
    """Whether there is a function of this name."""
    try:
        return callable(function_now(name))
    except (ImportError, AttributeError):
        return False


def is_called_by(name: str, function: Callable) -> bool:
    """Whether a function stands under `module:name`, by itself or wrapped. A wrapper has the name of what it wraps."""
    found = function_now(name) if can_find(name) else None
    while found is not None and found is not function:
        found = getattr(found, "__wrapped__", None)
    return found is function


def encode(constants: Mapping[str, Any], sizes: list[torch.SymInt] | None = None) -> str:
    """Return plain values and dtypes, and lists and tuples of those, as text.

    Sizes that differ between the calls of a graph are put into `sizes`, and the text has their places there.
    """
    return json.dumps({name: _encode(value, sizes) for name, value in constants.items()})


@lru_cache(maxsize=1024)
def decode(constants: str, sizes: tuple[int, ...] = ()) -> dict[str, Any]:
    """Return what `encode` was given, with these sizes. Callers must not change it."""
    return {name: _decode(value, sizes) for name, value in json.loads(constants).items()}


def _encode(value: Any, sizes: list[torch.SymInt] | None) -> Any:
    if isinstance(value, torch.SymInt) and sizes is not None:
        sizes.append(value)
        return {"size": len(sizes) - 1}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value)}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_encode(item, sizes) for item in value]}
    return value


def _decode(value: Any, sizes: tuple[int, ...]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "size":
        return sizes[content]
    if kind == "dtype":
        return getattr(torch, content.removeprefix("torch."))
    items = (_decode(item, sizes) for item in content)
    return [*items] if kind == "list" else tuple(items)
