"""Classes of layers that a function of ComfyUI makes: no other process can import them by their name.

`comfy.ops.mixed_precision_ops` makes the layers of a quantised model, with its arguments as attributes of the class
around them. A worker process calls the function again with the same arguments.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Mapping
from typing import Any

from . import comfy_compat

Recipe = tuple[Any, tuple[str, Mapping[str, Any], str]]

_made: dict[bytes, type] = {}


def recipe(cls: type) -> Recipe | None:
    """Return how to make a class again, as pickling wants it: a function and its arguments. None if nobody knows."""
    factory, found, path = cls.__qualname__.partition(".<locals>.")
    outer, _, name = path.partition(".")
    attributes = comfy_compat.CLASS_FACTORIES.get(f"{cls.__module__}.{factory}")
    around = _closed_over(cls, outer) if found and name and attributes else None
    if around is None or not all(hasattr(around, attribute) for attribute in attributes.values()):
        return None
    arguments = {parameter: getattr(around, attribute) for parameter, attribute in attributes.items()}
    return make, (f"{cls.__module__}.{factory}", arguments, name)


def make(factory: str, arguments: Mapping[str, Any], name: str) -> type:
    """Make the class again; the same one for the same arguments."""
    key = pickle.dumps((factory, arguments))
    if key not in _made:
        _made[key] = comfy_compat.find(factory)(**arguments)
    return getattr(_made[key], name)


def _closed_over(cls: type, name: str) -> type | None:
    """Return the class of this name that the methods of a class refer to."""
    for function in filter(inspect.isfunction, vars(cls).values()):
        found = inspect.getclosurevars(function).nonlocals.get(name)
        if isinstance(found, type):
            return found
    return None
