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


def encode(constants: Mapping[str, Any]) -> str:
    """Return plain values and dtypes as text."""
    return json.dumps({n: {"dtype": str(v)} if isinstance(v, torch.dtype) else v for n, v in constants.items()})


@lru_cache(maxsize=1024)
def decode(constants: str) -> dict[str, Any]:
    """Return what `encode` was given. Callers must not change it."""
    values = json.loads(constants)
    return {n: getattr(torch, v["dtype"].removeprefix("torch.")) if type(v) is dict else v for n, v in values.items()}
