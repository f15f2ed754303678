"""Values as JSON that depends on their content only, whatever process, device or hash seed they are read in."""

from __future__ import annotations

import array
import collections
import enum
import functools
import hashlib
import json
import numbers
import re
import types
import weakref
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

import torch
from torch import nn

from ..common.host import Host
from ..common.reason import Reason, ReasonCode
from ..common.torch_compat import OpOverload, OpOverloadPacket
from .libraries import enclosed_functions, home_of, is_outside
from .source import qualified_name, read_source
from .watch import PLAIN, Watch

MAX_VALUES = 50_000
"""Limit of values for one region. An object that leads to more is somebody's whole program."""
MAX_TABLE = 256
"""Values of a tensor that is taken for a table, such as the levels of a quantised format."""
_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque, array.array, bytearray, str, int, float, bytes)
_INERT = frozenset({"logging", "_thread", "threading", "contextlib", "contextvars", "_contextvars", "_io", "torch"})
"""Modules whose objects (loggers, locks, files, generators) do not decide what a block computes."""


class Values:
    """Turns values into JSON that depends on their content only, and collects the code that they lead to."""

    def __init__(self, host: Host, watch: Watch, paths: Mapping[int, str]) -> None:
        self.paths = paths
        """The paths of the region's own modules, by the modules' identity."""
        self.code: set[Any] = set()
        self.obscure: Reason | None = None
        self._host = host
        self._watch = watch
        self._done: dict[int, Any] = {}
        self._alive: list[Any] = []
        self._count = 0

    def describe(self, value: Any, where: str) -> Any:
        """Return a value as JSON. `where` names its place in reasons that people read."""
        kind = type(value)
        if kind in PLAIN:
            return value if kind not in (float, complex, bytes) else [kind.__name__, repr(value)]
        if id(value) in self._done:
            return self._done[id(value)]
        self._count += 1
        if self._count > MAX_VALUES:
            self.mark_obscure(ReasonCode.MANY_VALUES, f"{MAX_VALUES} values ({where})")
            return None
        self._alive.append(value)  # otherwise another object could get its identity
        self._done[id(value)] = ["again", kind.__name__]
        try:
            result = self._describe(value, kind, where)
        except Exception as error:  # an object can refuse to be looked at in any way
            self.mark_obscure(ReasonCode.OPAQUE_OBJECT, f"{where}: {type(error).__name__}")
            result = kind.__name__
        self._done[id(value)] = result = _short(result)
        return result

    def _describe(self, value: Any, kind: type, where: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, where)
        if isinstance(value, nn.Module):
            return self._module(value, where)
        if isinstance(value, enum.Enum):
            return ["enum", qualified_name(kind), value.name]
        if isinstance(value, torch.device):
            return "device"  # where a module lives is not what it computes
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format | re.Pattern | range | slice | PurePath):
            return [kind.__name__, repr(value)]
        if isinstance(value, type):
            self.code.add(value)
            return ["class", qualified_name(value)]
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        if function := self._function(value, where):
            return function
        if isinstance(value, _CONTAINERS) or kind is types.MappingProxyType:
            return self._container(value, kind, where)
        if isinstance(value, weakref.ref):
            self._watch.reference(value)
            return ["weakref", self.describe(value(), where)]
        if kind.__module__ == "numpy" and hasattr(value, "tobytes"):
            return self._array(value, where)
        return self._object(value, kind, where)

    def mark_obscure(self, code: ReasonCode, detail: str) -> None:
        """Note the first reason why the values cannot be described."""
        self.obscure = self.obscure or Reason(code, detail)

    def _module(self, module: nn.Module, where: str) -> Any:
        """Describe a module of the region by its path; any other by its content, which may hold no weights."""
        if id(module) in self.paths:
            return ["own", self.paths[id(module)]]
        if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
            self.mark_obscure(ReasonCode.STRAY_LAYER, where)
        found = self._watch.module(module)
        self.code.add(type(module))
        settings = {name: self.describe(v, f"{where}.{name}") for name, v in found.items()}
        children = [[name, self.describe(child, f"{where}.{name}")] for name, child in module.named_children()]
        return ["layer", qualified_name(type(module)), settings, children]

    def _function(self, value: Any, where: str) -> Any:
        """Return the description of a callable, or None if the value is no function."""
        if isinstance(value, types.FunctionType):
            self.code.add(value)
            if is_outside(home_of(value), self._host):
                enclosed = [self.describe(function, where) for function in enclosed_functions(value)]
                return ["function", qualified_name(value), enclosed]
            return ["function", qualified_name(value), read_source(value).digest, self.enclosed(value, where)]
        if isinstance(value, types.MethodType):
            return ["method", self.describe(value.__func__, where), self.describe(value.__self__, where)]
        if isinstance(value, functools.partial):
            return ["partial", *(self.describe(v, where) for v in (value.func, value.args, value.keywords))]
        if isinstance(value, functools._lru_cache_wrapper | staticmethod | classmethod):
            return [type(value).__name__, self.describe(value.__wrapped__, where)]
        if isinstance(value, property):
            return ["property", *(self.describe(f, where) for f in (value.fget, value.fset, value.fdel))]
        if isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
            owner = value.__self__
            own = None if owner is None or isinstance(owner, types.ModuleType) else self.describe(owner, where)
            return ["builtin", value.__qualname__, own]
        if isinstance(value, OpOverload | OpOverloadPacket):
            return ["operator", str(value)]
        return None

    def enclosed(self, function: types.FunctionType, where: str) -> list:
        """Describe the values that a function carries: its defaults and closure cells."""
        self._watch.function(function)
        return [*self._defaults(function, where), *(self._cell(cell, where) for cell in function.__closure__ or ())]

    def _defaults(self, function: types.FunctionType, where: str) -> Iterator[Any]:
        code, defaults = function.__code__, function.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        for name, value in [*zip(names, defaults), *sorted((function.__kwdefaults__ or {}).items())]:
            if name in self._host.context_arguments:  # such a dictionary collects whatever calls leave in it
                continue
            # An argument of `forward` is an input of the graph, whether a call passes it or not.
            is_input = function.__name__ == "forward" and isinstance(value, torch.Tensor)
            yield [name, "input" if is_input else self.describe(value, f"{where}, a default of {function.__name__}")]

    def _cell(self, cell: types.CellType, where: str) -> Any:
        try:
            content = cell.cell_contents
        except ValueError:
            return "empty"
        if isinstance(content, type):
            self.code.add(content)
            return ["class", qualified_name(content)]
        return self.describe(content, where)

    def _container(self, value: Any, kind: type, where: str) -> Any:
        own = [] if self._is_outside(kind) else [self._attributes(value, where)]
        name = kind.__name__ if self._is_outside(kind) else qualified_name(kind)
        if own:
            self.code.add(kind)
        if isinstance(value, dict | types.MappingProxyType):
            self._watch.mapping(value)
            items = list(dict.items(value)) if isinstance(value, dict) else list(value.items())
            return [name, *own, [[self.describe(k, where), self.describe(v, _entry(where, k))] for k, v in items]]
        if isinstance(value, set | frozenset):
            self._watch.sequence(value)
            return [name, *own, sorted((self.describe(item, where) for item in value), key=repr)]
        if isinstance(value, str | int | float | bytes | bytearray | array.array):
            if isinstance(value, bytearray | array.array):
                self._watch.sequence(value)
            base = next(base for base in _CONTAINERS if isinstance(value, base))
            return [name, *own, base.__repr__(value)]
        if not isinstance(value, tuple):
            self._watch.sequence(value)
        return [name, *own, [self.describe(item, where) for item in value]]

    def _tensor(self, value: torch.Tensor, where: str) -> Any:
        """Describe, by its content, a small table that code reads. No other tensor may decide what a graph is."""
        is_table = type(value) is torch.Tensor and value.device.type == "cpu" and value.numel() <= MAX_TABLE
        if self.paths or not is_table or value.requires_grad or not value.ndim or value.is_conj() or value.is_neg():
            self.mark_obscure(ReasonCode.STRAY_TENSOR, where)
            return "tensor"
        content = self._array(value.contiguous().view(torch.uint8).numpy(), where)
        return ["table", str(value.dtype), list(value.shape), content]

    def _array(self, value: Any, where: str) -> Any:
        if value.dtype.hasobject:
            self.mark_obscure(ReasonCode.OBJECT_ARRAY, where)
            return "array"
        self._watch.array(value)
        data = value.tobytes()
        return ["array", str(value.dtype), list(value.shape), hashlib.sha256(data).hexdigest()]

    def _object(self, value: Any, kind: type, where: str) -> Any:
        name = qualified_name(kind)
        if isinstance(value, numbers.Number):
            return [name, repr(value)]
        if isinstance(value, Iterator):
            self.mark_obscure(ReasonCode.ITERATOR, where)
            return name
        outside = self._is_outside(kind)
        if outside and kind.__module__.partition(".")[0] in _INERT:
            return name
        if not outside:
            self.code.add(kind)
            if not hasattr(value, "__dict__") and not _slot_names(kind) and kind.__basicsize__ > object.__basicsize__:
                self.mark_obscure(ReasonCode.OPAQUE_TYPE, f"{where}: {kind.__name__}")
        return [name, self._attributes(value, where)]

    def _attributes(self, value: Any, where: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._watch.mapping(attributes)
            found |= {
                str(n): self.describe(self._host.setting(n, v), f"{where}.{n}") for n, v in list(attributes.items())
            }
        if slots := _slot_names(type(value)):
            self._watch.slots(value, slots)
            missing = object()
            held = {n: getattr(value, n, missing) for n in slots}
            found |= {n: self.describe(v, f"{where}.{n}") for n, v in held.items() if v is not missing}
        return found

    def _is_outside(self, kind: type) -> bool:
        return is_outside(kind.__module__ or "builtins", self._host)


def is_data(value: Any) -> bool:
    """Whether a value is a number, a text, a container or a tensor."""
    return type(value) in PLAIN or isinstance(value, (*_CONTAINERS, torch.Tensor, enum.Enum))


def _slot_names(kind: type) -> tuple[str, ...]:
    return tuple(
        name
        for cls in kind.__mro__
        if "__slots__" in vars(cls)  # classes in C have members that Python code cannot set
        for name, value in vars(cls).items()
        if isinstance(value, types.MemberDescriptorType) and name not in ("__dict__", "__weakref__")
    )


def _short(description: Any) -> Any:
    """Return a description, or its digest if it is long, so that a shared value is not written out for each owner."""
    text = json.dumps(description, sort_keys=True)
    return description if len(text) < 128 else ["digest", hashlib.sha256(text.encode()).hexdigest()]


def _entry(where: str, key: Any) -> str:
    return f"{where}[{key!r}]" if type(key) in (str, int) else where
