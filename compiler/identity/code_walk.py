"""All code that some functions and classes lead to, by the names that it mentions."""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib
import importlib.util
import json
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional
from torch import nn

from ..common.host import Host
from ..common.reason import Reason, ReasonCode
from .libraries import enclosed_functions, home_of, is_bookkeeping, is_in, is_outside
from .source import CONSTRUCTORS, Import, Source, functions_in, is_native, knows_name, qualified_name, read_source
from .value_description import Values, is_data
from .watch import Watch, class_settings

_SHARED_NAMESPACES = (torch.nn.functional, torch, torch.Tensor)
"""People replace functions of torch here, for every model of the process. Layers call them without naming them."""
_MISSING = object()
_MAKERS = frozenset({"__init__", "__new__", "__post_init__"})


@dataclass(frozen=True)
class Code:
    """The code that a region can run, with the values that this code reads besides attributes."""

    digest: str
    string_constants: frozenset[str]
    obscure: Reason | None = None
    read_by_others: frozenset[str] = frozenset()
    """Names in code of others (neither the host's nor a library's): what that code may read of the host's layers."""
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


@dataclass(frozen=True)
class _ClassMethod:
    """A class method that code names, and the class before its name."""

    function: types.FunctionType
    cls: type


class CodeWalk:
    """Follows code from some functions and classes to everything that they name."""

    def __init__(self, host: Host, watch: Watch) -> None:
        self._host = host
        self._watch = watch
        self._values = Values(host, watch, {})
        self._records: set[str] = set()
        self._strings: set[str] = set()
        self._attributes: set[str] = set()
        self._read_by_others: set[str] = set()
        self._reads_any_attribute = False
        self._additions: list[tuple[str, str, types.FunctionType]] = []
        """Functions that somebody has added to a library's classes and modules: owner, name, function."""

    def of(self, roots: Iterable[Any]) -> Code:
        """Return all code that these functions and classes lead to."""
        seen: set[Any] = set()
        pending = [*roots, *self._replaced_in_torch()]
        while pending or (pending := self._named_additions()):
            item = pending.pop()
            if item in seen:
                continue
            seen.add(item)
            pending.extend(self._code_of(item))
            pending.extend(self._values.code - seen)
        digest = hashlib.sha256("\n\n".join(sorted(self._records)).encode()).hexdigest()
        attributes = None if self._reads_any_attribute else frozenset(self._attributes)
        strings, others = frozenset(self._strings), frozenset(self._read_by_others)
        return Code(digest, strings, self._values.obscure, others, attributes)

    def _code_of(self, item: Any) -> Iterator[Any]:
        if isinstance(item, _ClassMethod):
            return self._class_method(item)
        return self._class(item) if isinstance(item, type) else self._function(item)

    def _replaced_in_torch(self) -> Iterator[types.FunctionType]:
        """Yield the functions that somebody has put in the place of torch's own."""
        for namespace in _SHARED_NAMESPACES:
            functions = {name: value for name, value in list(vars(namespace).items()) if _is_function(value)}
            self._watch.entries(vars(namespace), tuple(functions))
            for name, value in functions.items():
                if isinstance(value, types.FunctionType) and not is_outside(home_of(value), self._host):
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
                if not is_outside(home_of(value), self._host):
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
        if is_outside(home_of(function), self._host):
            self._records.add(qualified_name(function))
            yield from enclosed_functions(function)
            return
        yield from enclosed_functions(function)
        self._note(qualified_name(function), self._values.enclosed(function, qualified_name(function)))
        yield from self._read(function)

    def _read(self, item: Any) -> Iterator[Any]:
        source = read_source(item)
        self._records.add(source.text)
        self._strings.update(source.string_constants)
        self._attributes.update(source.attributes)
        home = home_of(item)
        # The host's functions take its layers. A list says what they read of one, whatever name they compute.
        self._reads_any_attribute |= source.reads_any_attribute and not is_in(home, self._host.layer_modules)
        if not self._host.is_own_code(home) and not is_outside(home, self._host):
            self._read_by_others |= source.attributes | source.string_constants
        # Names are resolved again each time: an extension may have replaced a helper since the last description.
        for chain in source.names:
            yield from self._resolve(item, chain, source)

    def _resolve(self, item: Any, chain: tuple[str, ...], source: Source) -> Iterator[Any]:
        """Yield the functions and classes that a dotted name leads to, and record the value at its end."""
        space = _namespace(item)
        for statement in source.imported.get(chain[0], ()):
            yield from self._imported(item, chain, source, statement)
        if chain[0] in space or not (chain[0] in source.bound or chain[0] in source.imported):
            yield from self._follow(item, chain, source, space)

    def _imported(self, item: Any, chain: tuple[str, ...], source: Source, statement: Import) -> Iterator[Any]:
        """The same for a name that the code imports when it runs."""
        name, member, rest = statement.module, statement.member, chain[1:]
        try:
            name = importlib.util.resolve_name("." * statement.level + name, _package(item))
        except ImportError:
            return
        if is_outside(name, self._host):
            return
        module = _module(name)
        if statement.gives_root and module is not None:
            module = _module(chain[0])
        if module is None:
            return
        space = vars(module)
        if member:
            value = _imported_from(module, name, member)
            if member not in space and value is not None:  # a module may make its names when it is asked for them
                space = {member: value}
            rest = (member, *rest)
        if rest:
            yield from self._follow(item, chain, source, space, rest)

    def _class_method(self, item: _ClassMethod) -> Iterator[Any]:
        """Yield a class method's function, and what it reads of the class that it is called on."""
        yield item.function
        if is_outside(home_of(item.function), self._host):
            yield item.cls  # such as `torch.autograd.Function.apply`, which calls the methods of the class
            return
        source, first = read_source(item.function), item.function.__code__.co_varnames[:1]
        for chain in source.names:
            if chain == first:
                yield item.cls
            elif chain[:1] == first:
                space = _space_of(item.cls, chain[1])
                yield from self._follow(item.function, chain, source, space, chain[1:], item.cls)

    def _follow(
        self,
        item: Any,
        said: tuple[str, ...],
        source: Source,
        space: Mapping[str, Any] | None,
        chain: tuple[str, ...] | None = None,
        cls: type | None = None,
    ) -> Iterator[Any]:
        """Follow a dotted name from a namespace on.

        `chain` is what is left of the name there, if not all of it, and `cls` the class that has the namespace.
        """
        chain = said if chain is None else chain
        label = f"{qualified_name(item)}: {'.'.join(said)}" + (f" of {qualified_name(cls)}" if cls else "")
        value: Any = cls
        reads_data = not is_in(home_of(item), self._host.layer_modules)
        for place, part in enumerate(chain):
            if space is None:
                break
            cls = value if isinstance(value, type) else None
            self._watch_before(cls, part)
            value = space.get(part, _MISSING)
            if reads_data or isinstance(value, types.FunctionType | type):
                self._watch.name(space, part)
            if value is _MISSING:
                return
            named = said[: len(said) - len(chain) + place + 1]
            if reads_data and named in source.changed and not isinstance(value, types.ModuleType):
                self._values.describe(value, part)  # this watches the value
                self._values.mark_obscure(ReasonCode.GLOBAL_STATE, f"{qualified_name(item)}: {part}")
                return
            if isinstance(value, types.ModuleType) and is_bookkeeping(value, self._host):
                reads_data = False
            space = _space_of(value, chain[place + 1]) if place + 1 < len(chain) else None
        yield from self._value(label, value, reads_data, cls)

    def _watch_before(self, cls: type | None, name: str) -> None:
        """Watch for an entry that would come before the one that a class has under this name, in a subclass."""
        for each in cls.__mro__ if cls is not None else ():
            if name in vars(each):
                return
            self._watch.name(vars(each), name)

    def _value(self, name: str, value: Any, reads_data: bool, cls: type | None) -> Iterator[Any]:
        """Yield the code that a value is. `cls` is the class on which code has named it."""
        is_on_class = isinstance(value, classmethod)
        value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        value = getattr(value, "__wrapped__", value) if isinstance(value, functools._lru_cache_wrapper) else value
        if is_on_class and cls is not None and isinstance(value, types.FunctionType):
            yield _ClassMethod(value, cls)
        elif isinstance(value, types.FunctionType | type):
            yield value
            yield from self._constructors(value) if isinstance(value, type) else ()
        elif isinstance(value, types.ModuleType | argparse.Namespace) or not reads_data:
            return
        elif not is_outside(type(value).__module__ or "builtins", self._host) or is_data(value):
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


def _package(item: Any) -> str:
    """Return the package that relative imports of an item's module start from."""
    space = _namespace(item)
    name = space.get("__name__") or ""
    return space.get("__package__") or (name if "__path__" in space else name.rpartition(".")[0])


def _module(name: str) -> types.ModuleType | None:
    """Return a module that code imports while it runs. It is imported now if it was not."""
    with suppress(Exception):  # such as a package that is not installed: then the code runs without it
        return importlib.import_module(name)
    return None


def _imported_from(module: types.ModuleType, name: str, member: str) -> Any:
    """Return what `from name import member` gives; None if it fails."""
    with suppress(Exception):
        return getattr(module, member)
    return _module(f"{name}.{member}")


def _methods(cls: type) -> list[tuple[str, types.FunctionType]]:
    return [(name, value) for name, value in vars(cls).items() if isinstance(value, types.FunctionType)]
