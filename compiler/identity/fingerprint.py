"""The fingerprint of a region: a hash of its code, its settings and the shapes of its parameters.

Two blocks with the same fingerprint compute the same function of (weights, inputs), so they share a graph,
whatever checkpoint, file, process or day they come from. A description follows the functions that a block's
classes name, and reads every value that those functions can read: attributes, closures, globals, class
attributes. Each place that is read goes into a `Watch`, so everything that the fingerprint depends on is also
compared before each sampling. A value that cannot be described makes the block `obscure`: it shares no graph.
"""

from __future__ import annotations

import argparse
import array
import collections
import enum
import functools
import hashlib
import json
import numbers
import re
import sys
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import torch
import torch.nn.functional
from torch import nn

from ..common.host import Host
from ..common.reason import Reason, ReasonCode, Unsupported
from ..common.torch_compat import OpOverload, OpOverloadPacket
from .low_rank import sizes_of
from .memory_format import has_layouts, stride_in
from .source import CONSTRUCTORS, Source, functions_in, is_native, knows_name, qualified_name, read_source
from .watch import PLAIN, Watch, class_settings

LIBRARIES = frozenset(
    {"torch", "torchvision", "numpy", "einops", "triton", "comfy_kitchen", "gguf"}
    | {"PIL", "accelerate", "httpx", "huggingface_hub", "packaging", "requests", "safetensors", "tokenizers", "tqdm"}
)
"""Packages whose code a description does not follow. Those of the second set compute nothing in a region."""

MAX_VALUES = 50_000
"""Limit of values for one region. An object that leads to more is somebody's whole program."""

MAX_TABLE = 256
"""Values of a tensor that is taken for a table, such as the levels of a quantised format."""

_MODULE_INTERNALS = frozenset(nn.Module().__dict__) - {"training"}
_SHARED_NAMESPACES = (torch.nn.functional, torch, torch.Tensor)
"""People replace functions of torch here, for every model of the process. Layers call them without naming them."""
_BASES = (nn.Module, object)
"""They read no attributes of the classes that are derived from them, except their own."""
_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque, array.array, bytearray, str, int, float, bytes)


@dataclass(frozen=True)
class Description:
    """What identifies a region."""

    fingerprint: str
    """A hex digest that processes, hash seeds, devices, loading and offloading do not change."""
    string_constants: frozenset[str]
    """Every string constant in its code."""
    obscure: Reason | None = None
    """Why the fingerprint is incomplete; None if it is not. A region with a reason here must not use a graph."""


@dataclass(frozen=True)
class Code:
    """The code that a region can run, with the values that this code reads besides attributes."""

    digest: str
    string_constants: frozenset[str]
    obscure: Reason | None = None
    read_by_others: frozenset[str] = frozenset()
    """The names that code of neither the host nor a library mentions: what it can read of the host's layers."""
    attributes: frozenset[str] | None = None
    """The names of attributes that the code reads; None if it may read any."""

    def reads(self, name: str) -> bool:
        """Whether the code may read an attribute of this name, or put the name together."""
        return self.attributes is None or _is_spelled(name, self.attributes, self.string_constants)


@functools.lru_cache(maxsize=4096)
def _is_spelled(name: str, attributes: frozenset[str], strings: frozenset[str]) -> bool:
    """Whether code that has these attributes and strings names something, perhaps in parts."""
    if name in attributes or any(text in name or name in text for text in strings if text):
        return True
    # Python writes a class's name before a private one: `self.__id` in Block is `_Block__id`.
    return any(name.endswith(attribute) for attribute in attributes if attribute.startswith("__"))


_networks: weakref.WeakKeyDictionary[nn.Module, tuple[Host, Description, Watch]] = weakref.WeakKeyDictionary()


def describe_network(network: nn.Module, host: Host) -> tuple[Description, Watch]:
    """Describe a whole network, which takes half a second, and remember that while nothing changes."""
    describer = Describer(host)
    description = describer.describe(network)
    _networks[network] = host, description, describer.watch
    return description, describer.watch


def network_code(network: nn.Module, host: Host) -> tuple[frozenset[str], Watch]:
    """Return the string constants of a network's code, and a watch that holds now."""
    known_host, description, watch = _networks.get(network, (None, None, None))
    if known_host is not host or not watch.holds():
        description, watch = describe_network(network, host)
    return description.string_constants, watch


def fingerprint(module: nn.Module, host: Host) -> str:
    """Return the identity of a region as a hex digest (see `Description`)."""
    return Describer(host).describe(module).fingerprint


def string_constants_of(module: nn.Module, host: Host) -> frozenset[str]:
    """Return every string constant in the code that a module can run."""
    return Describer(host).describe(module).string_constants


def tensor_attributes(module: nn.Module, host: Host) -> list[str]:
    """Return the paths of tensors that a region holds outside its parameters and buffers.

    A graph would hold such a tensor as a constant, and would then belong to one checkpoint.
    """
    return [
        f"{path}.{name}" if path else name
        for path, child in module.named_modules()
        for name, value in settings_of(child, host).items()
        if isinstance(value, torch.Tensor)
    ]


def settings_of(module: nn.Module, host: Host, read_by_others: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return the attributes of a module that can decide what it computes.

    For a layer of the host's own, they are the attributes that the host lists, those that the code of others reads,
    and methods that replace the class's.
    """
    attributes = module.__dict__
    listed = host.layer_settings(module)
    if listed is not None:
        cls = type(module)
        return {
            name: value
            for name, value in attributes.items()
            if name in listed
            or (not host.is_volatile(name) and name != "forward" and (name in read_by_others or _is_method(cls, name)))
        }
    return {
        name: value
        for name, value in attributes.items()
        if name not in _MODULE_INTERNALS
        and name != "forward"
        and not host.is_volatile(name)
        and not getattr(type(value), "stands_in", False)  # our stand-in for a method leads to our whole package
    }


def _numbers_of(module: nn.Module, settings: Mapping[str, Any], host: Host) -> list[str]:
    """Return the names of a module's settings that are ints, such as the number of a layer.

    The code of a library's class is not read, so all its settings count.
    """
    if any(is_outside(base.__module__ or "builtins", host) for base in type(module).__mro__ if base not in _BASES):
        return []
    return [name for name in settings if type(module.__dict__.get(name)) is int]


class Describer:
    """Describes the regions of a network at one moment. Reads code that several regions share only once."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._watch = Watch(functools.partial(settings_of, host=host))
        self._codes: dict[frozenset, Code] = {}

    def describe(self, module: nn.Module) -> Description:
        """Describe a region."""
        names: frozenset[str] = frozenset()
        before = self._watch.mark()
        while True:
            description, code = self._describe(module, names)
            if code.read_by_others <= names:
                return description
            names |= code.read_by_others
            self._watch.rewind(before)  # the next pass reads the same modules, and more of each

    def _describe(self, module: nn.Module, read_by_others: frozenset[str]) -> tuple[Description, Code]:
        """Describe a region, given the names that the code of others reads; return its code as well."""
        settings_in = functools.partial(settings_of, host=self._host, read_by_others=read_by_others)
        values = _Values(self, {id(child): path for path, child in module.named_modules()})
        record: list[Any] = []
        numbers: set[tuple[int, str]] = set()
        roots: set[Any] = set()
        is_arranged = self._host.uses_channels_last(module)
        for path, child in module.named_modules(remove_duplicate=False):
            if values.paths[id(child)] != path:  # the module also stands at an earlier path
                record.append([path, values.paths[id(child)]])
                continue
            found = self._watch.module(child, settings_in)
            roots.add(type(child))
            settings = {
                name: values.describe(self._host.setting(name, value), f"{path}.{name}" if path else name)
                for name, value in found.items()
            }
            numbers |= {(len(record), name) for name in _numbers_of(child, settings, self._host)}
            tensors = {
                name: self._weight(child, name, t, values, is_arranged)
                for group in (child._parameters, child._buffers)
                for name, t in group.items()
                if t is not None  # a layer that is filled from a file has no entry for an absent tensor
            }
            record.append([path, qualified_name(type(child)), settings, tensors])
        code = self.code(frozenset(roots | values.code))
        for place, name in numbers:
            if not code.reads(name):
                del record[place][2][name]
        text = json.dumps([code.digest, record], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return Description(digest, code.string_constants, values.obscure or code.obscure), code

    def _weight(self, layer: nn.Module, name: str, weight: torch.Tensor, values: _Values, is_arranged: bool) -> list:
        """Describe a weight by its form, or by the layout and forms of what it consists of."""
        form = [list(sizes_of(name, weight.shape)), str(self._host.weight_dtype(layer, name, weight))]
        try:
            inner = self._host.inner_tensors(weight)
        except Unsupported:  # the region is eager for that reason
            return form
        if inner is None or inner.is_the_weight:
            return [*form, _stride(weight if inner is None else inner.tensors[0], is_arranged)]
        forms = [[n, list(t.shape), str(t.dtype)] for n, t in zip(inner.names, inner.tensors, strict=True)]
        return [*form, values.describe(inner.layout, name), forms]

    def code(self, roots: frozenset) -> Code:
        """Describe functions and classes, and all code that they lead to."""
        if roots not in self._codes:
            self._codes[roots] = _CodeWalk(self, self._host, self._watch).of(roots)
        return self._codes[roots]

    @property
    def watch(self) -> Watch:
        """The places that were read so far."""
        return self._watch

    @property
    def host(self) -> Host:
        """The program that the described regions run in."""
        return self._host


class _Values:
    """Turns values into JSON that depends on their content only, and collects the code that they lead to."""

    def __init__(self, describer: Describer, paths: Mapping[int, str]) -> None:
        self.paths = paths
        """The paths of the region's own modules, by the modules' identity."""
        self.code: set[Any] = set()
        self.obscure: Reason | None = None
        self._host = describer.host
        self._watch = describer.watch
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
            if is_outside(_home(value), self._host):
                enclosed = [self.describe(function, where) for function in _enclosed_functions(value)]
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
        """Describe a small table that code reads by its content. A graph can depend on no other tensor."""
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


_MISSING = object()
_MAKERS = frozenset({"__init__", "__new__", "__post_init__"})
_INERT = frozenset({"logging", "_thread", "threading", "contextlib", "contextvars", "_contextvars", "_io", "torch"})
"""Modules whose objects (loggers, locks, files, generators) do not decide what a block computes."""


class _CodeWalk:
    """Follows code from some functions and classes to everything that they name."""

    def __init__(self, describer: Describer, host: Host, watch: Watch) -> None:
        self._host = host
        self._watch = watch
        self._values = _Values(describer, {})
        self._records: set[str] = set()
        self._strings: set[str] = set()
        self._attributes: set[str] = set()
        self._read_by_others: set[str] = set()
        self._reads_any_attribute = False
        self._additions: list[tuple[str, str, types.FunctionType]] = []
        """Functions that somebody has added to a library's classes and modules: owner, name, function."""

    def of(self, roots: Iterable[Any]) -> Code:
        seen: set[Any] = set()
        pending = [*roots, *self._replaced_in_torch()]
        while pending or (pending := self._named_additions()):
            item = pending.pop()
            if item in seen:
                continue
            seen.add(item)
            pending.extend(self._class(item) if isinstance(item, type) else self._function(item))
            pending.extend(self._values.code - seen)
        digest = hashlib.sha256("\n\n".join(sorted(self._records)).encode()).hexdigest()
        attributes = None if self._reads_any_attribute else frozenset(self._attributes)
        strings, others = frozenset(self._strings), frozenset(self._read_by_others)
        return Code(digest, strings, self._values.obscure, others, attributes)

    def _replaced_in_torch(self) -> Iterator[types.FunctionType]:
        """Yield the functions that somebody has put in the place of torch's own."""
        for namespace in _SHARED_NAMESPACES:
            functions = {name: value for name, value in list(vars(namespace).items()) if _is_function(value)}
            self._watch.entries(vars(namespace), tuple(functions))
            for name, value in functions.items():
                if isinstance(value, types.FunctionType) and not is_outside(_home(value), self._host):
                    yield from self._foreign(namespace, name, value)

    def _foreign(self, owner: Any, name: str, function: types.FunctionType) -> Iterator[types.FunctionType]:
        """Yield a function that replaces one of a library; keep a mere addition until some code names it.

        Packages add helpers to torch's classes (transformers: `Module.smart_apply`) that no layer calls.
        """
        title = owner.__name__ if isinstance(owner, types.ModuleType) else qualified_name(owner)
        if not knows_name(owner, name):
            self._additions.append((title, name, function))
            return
        self._records.add(f"{title}.{name} is {qualified_name(function)}")
        yield function

    def _named_additions(self) -> list[types.FunctionType]:
        """Return the additions to libraries that the code read so far names."""
        used = self._attributes | self._strings
        named = [addition for addition in self._additions if addition[1] in used]
        self._additions = [addition for addition in self._additions if addition[1] not in used]
        self._records.update(f"{title}.{name} is {qualified_name(function)}" for title, name, function in named)
        return [function for _, _, function in named]

    def _class(self, cls: type) -> Iterator[Any]:
        if cls is object:
            return
        yield from cls.__mro__[1:]
        self._watch.class_(cls)
        if is_outside(cls.__module__ or "builtins", self._host):
            self._records.add(qualified_name(cls))
            for name, value in _methods(cls):
                if not is_outside(_home(value), self._host):
                    yield from self._foreign(cls, name, value)
            return
        yield from self._read(cls)
        for name, value in class_settings(cls).items():
            if name not in CONSTRUCTORS:
                yield from self._class_entry(cls, name, value)

    def _class_entry(self, cls: type, name: str, value: Any) -> Iterator[Any]:
        where = f"{cls.__name__}.{name}"
        functions = functions_in(value)
        for function in functions:
            self._note(where, self._values.enclosed(function, where))
            if not is_native(cls, name, function):
                self._records.add(f"{qualified_name(cls)}.{name} is {qualified_name(function)}")
                yield function
        if not functions and not isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType):
            self._note(f"{qualified_name(cls)}.{name}", self._values.describe(value, where))

    def _function(self, function: types.FunctionType) -> Iterator[Any]:
        if is_outside(_home(function), self._host):
            self._records.add(qualified_name(function))
            yield from _enclosed_functions(function)
            return
        yield from _enclosed_functions(function)
        self._note(qualified_name(function), self._values.enclosed(function, qualified_name(function)))
        yield from self._read(function)

    def _read(self, item: Any) -> Iterator[Any]:
        source = read_source(item)
        self._records.add(source.text)
        self._strings.update(source.string_constants)
        self._attributes.update(source.attributes)
        home = _home(item)
        # The host's layers are given to its own functions. What these read of a layer is listed.
        self._reads_any_attribute |= source.reads_any_attribute and not _is_in(home, self._host.layer_modules)
        if not self._host.is_own_code(home) and not is_outside(home, self._host):
            self._read_by_others |= source.attributes | source.string_constants
        # Names are resolved again each time: an extension may have replaced a helper since the last description.
        for chain in source.names:
            yield from self._resolve(item, chain, source)

    def _resolve(self, item: Any, chain: tuple[str, ...], source: Source) -> Iterator[Any]:
        """Yield the functions and classes that a dotted name leads to, and record the value at its end."""
        value: Any = None
        space: Mapping[str, Any] | None = _namespace(item)
        if chain[0] not in space and chain[0] in source.bound:
            return
        reads_data = not _is_in(_home(item), self._host.layer_modules)
        for place, part in enumerate(chain):
            if space is None:
                break
            value = space.get(part, _MISSING)
            if reads_data or isinstance(value, types.FunctionType | type):
                self._watch.name(space, part)
            if value is _MISSING:
                return
            if reads_data and chain[: place + 1] in source.changed and not isinstance(value, types.ModuleType):
                self._values.describe(value, part)  # this watches the value
                self._values.mark_obscure(ReasonCode.GLOBAL_STATE, f"{qualified_name(item)}: {part}")
                return
            if isinstance(value, types.ModuleType) and _is_bookkeeping(value, self._host):
                reads_data = False
            space = _space_of(value, chain[place + 1]) if place + 1 < len(chain) else None
        yield from self._value(f"{qualified_name(item)}: {'.'.join(chain)}", value, reads_data)

    def _value(self, name: str, value: Any, reads_data: bool) -> Iterator[Any]:
        value = getattr(value, "__wrapped__", value) if isinstance(value, functools._lru_cache_wrapper) else value
        if isinstance(value, types.FunctionType | type):
            yield value
            yield from self._constructors(value) if isinstance(value, type) else ()
        elif isinstance(value, types.ModuleType | argparse.Namespace) or not reads_data:
            return
        elif not is_outside(type(value).__module__ or "builtins", self._host) or _is_data(value):
            self._note(name, self._values.describe(value, name))

    def _constructors(self, cls: type) -> Iterator[types.FunctionType]:
        """Yield the functions that make an object of a class that code names: it can be made within the call.

        Layers were made before, and dataclasses' own constructors follow from their fields.
        """
        for base in () if issubclass(cls, nn.Module) else cls.__mro__:
            for name in _MAKERS & vars(base).keys() if not is_outside(base.__module__, self._host) else ():
                for function in functions_in(vars(base)[name]):
                    if function.__code__.co_filename != "<string>":
                        yield function

    def _note(self, name: str, description: Any) -> None:
        self._records.add(f"{name}={json.dumps(description, sort_keys=True)}")


def is_outside(module: str, host: Host) -> bool:
    """Whether a Python module belongs to a library or to the host's infrastructure."""
    root = module.partition(".")[0]
    return root in LIBRARIES or root in sys.stdlib_module_names or _is_in(module, host.infrastructure)


def _is_bookkeeping(module: types.ModuleType, host: Host) -> bool:
    """Whether a module's data changes while programs run: every import changes Python's, and the host its own."""
    return module is sys or _is_in(module.__name__, host.infrastructure)


def _is_in(module: str, prefixes: Iterable[str]) -> bool:
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


def _home(item: Any) -> str:
    """Return the module in which an item looks up its names. A wrapper's `__module__` is that of what it wraps."""
    home = item.__globals__.get("__name__") if isinstance(item, types.FunctionType) else item.__module__
    return home or "builtins"


def _is_data(value: Any) -> bool:
    return type(value) in PLAIN or isinstance(value, (*_CONTAINERS, torch.Tensor, enum.Enum))


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)


def _space_of(value: Any, part: str) -> Mapping[str, Any] | None:
    """Return the namespace that holds the next part of a dotted name; None if only the whole object is described."""
    if isinstance(value, type):
        return next((vars(cls) for cls in value.__mro__ if part in vars(cls)), None)
    if isinstance(value, dict) and hasattr(value, part) and part in value:  # such as parsed options
        return value
    attributes = getattr(value, "__dict__", None)
    if isinstance(value, types.ModuleType | argparse.Namespace | types.FunctionType):
        return attributes
    return attributes if isinstance(attributes, dict) and part in attributes else None


def _namespace(item: Any) -> Mapping[str, Any]:
    if isinstance(item, types.FunctionType):
        return item.__globals__
    return vars(sys.modules.get(item.__module__, types.ModuleType("empty")))


def _methods(cls: type) -> list[tuple[str, types.FunctionType]]:
    return [(name, value) for name, value in vars(cls).items() if isinstance(value, types.FunctionType)]


def _is_method(cls: type, name: str) -> bool:
    return callable(getattr(cls, name, None))


def _enclosed_functions(function: types.FunctionType) -> Iterator[types.FunctionType]:
    """Yield the functions in closure cells: a decorated function keeps the one that it wraps there."""
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:
            continue
        if isinstance(content, types.FunctionType):
            yield content


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


def _stride(tensor: torch.Tensor, is_arranged: bool) -> list[int]:
    if is_arranged and has_layouts(tensor):
        return list(stride_in(tensor, torch.contiguous_format))
    return list(tensor.stride())
