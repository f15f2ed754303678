"""Remembers what a description has read, so that a cheap comparison tells whether any of it has changed.

A fingerprint says what a block's code, settings and globals were when its graph was made. Other extensions change
them afterwards: a padding mode, a class, a function of a module. `Watch.holds` reads the same places again and
compares by identity. This takes milliseconds for a whole network, while a new description takes a second.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import is_, itemgetter
from typing import Any

from torch import nn

PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Types that are compared by value, since equal values may be different objects."""

Settings = Callable[[nn.Module], Mapping[str, Any]]
"""Returns the attributes of a module that its code can read, except those that only the host itself uses."""


class Watch:
    """The places that descriptions have read, and the values that were there.

    Modules, and all other objects that allow it, are referenced weakly, so that a watch keeps no model alive.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._modules: list[_Module] = []
        self._globals: dict[tuple[int, str], tuple[Mapping[str, Any], str, Any]] = {}
        self._mappings: dict[int, tuple[Mapping, tuple, _Values]] = {}
        self._classes: dict[int, tuple[type, tuple[str, ...], _Values]] = {}
        self._entries: dict[int, tuple[Mapping, tuple[str, ...], _Values]] = {}
        self._sequences: dict[int, tuple[Any, _Values]] = {}
        self._arrays: dict[int, tuple[Any, bytes]] = {}
        self._functions: dict[int, tuple[types.FunctionType, tuple]] = {}
        self._cells: dict[int, tuple[types.CellType, Any]] = {}
        self._slots: dict[int, tuple[Any, tuple[str, ...], _Values]] = {}
        self._references: dict[int, tuple[weakref.ref, Any]] = {}

    def module(self, module: nn.Module, settings: Settings | None = None) -> Mapping[str, Any]:
        """Watch a module: class, settings, children, and which tensors are present. Return the settings."""
        read = settings or self._settings
        found = read(module)
        self._modules.append(_Module(module, read, found))
        return found

    def mark(self) -> int:
        """Return a place to which `rewind` goes back."""
        return len(self._modules)

    def rewind(self, mark: int) -> None:
        """Forget the modules that were watched since."""
        del self._modules[mark:]

    def children(self, model: nn.Module, paths: Iterable[str]) -> None:
        """Watch which modules are at these paths, and which contain them."""
        parents = {parent for path in paths for parent in _parents(path)}
        for path in sorted(parents):
            try:
                self._modules.append(_Module(model.get_submodule(path), lambda module: {}, {}))
            except AttributeError:
                continue

    def name(self, namespace: Mapping[str, Any], name: str) -> None:
        """Watch one entry of a namespace, which may be missing."""
        self._globals.setdefault((id(namespace), name), (namespace, name, namespace.get(name, _MISSING)))

    def mapping(self, mapping: Mapping) -> None:
        """Watch the keys and values of a dictionary, or of a class."""
        if id(mapping) not in self._mappings:
            self._mappings[id(mapping)] = (mapping, tuple(mapping), _Values(mapping.values()))

    def class_(self, cls: type) -> None:
        """Watch the entries of a class's own dictionary."""
        if id(cls) not in self._classes:
            settings = class_settings(cls)
            self._classes[id(cls)] = (cls, tuple(settings), _Values(settings.values()))

    def entries(self, namespace: Mapping[str, Any], names: tuple[str, ...]) -> None:
        """Watch many entries of one namespace. New entries do not count as a change."""
        if id(namespace) not in self._entries:
            self._entries[id(namespace)] = (namespace, names, _Values(namespace[name] for name in names))

    def sequence(self, sequence: Iterable) -> None:
        """Watch the items of a list, a set or a deque."""
        self._sequences.setdefault(id(sequence), (sequence, _Values(sequence)))

    def array(self, array: Any) -> None:
        """Watch the values of a numpy array."""
        self._arrays.setdefault(id(array), (array, array.tobytes()))

    def function(self, function: types.FunctionType) -> None:
        """Watch the code, the defaults and the closure of a function."""
        if id(function) in self._functions:
            return
        self._functions[id(function)] = (function, _parts(function))
        for cell in function.__closure__ or ():
            self._cells[id(cell)] = (cell, _content(cell))
        if function.__kwdefaults__:
            self.mapping(function.__kwdefaults__)

    def slots(self, item: Any, names: tuple[str, ...]) -> None:
        """Watch the attributes that an object keeps in slots."""
        values = _Values(getattr(item, name, _MISSING) for name in names)
        self._slots.setdefault(id(item), (item, names, values))

    def reference(self, reference: weakref.ref) -> None:
        """Watch the object that a weak reference points to."""
        self._references.setdefault(id(reference), (reference, _weak(reference())))

    def holds(self) -> bool:
        """Whether every watched place still has the value that was read."""
        return (
            all(read.holds() for read in self._modules)
            and all(is_same(space.get(name, _MISSING), value) for space, name, value in self._globals.values())
            and all(tuple(m) == keys and values.are(m.values()) for m, keys, values in self._mappings.values())
            and all(_are_settings(cls, names, values) for cls, names, values in self._classes.values())
            and all(values.are(map(space.get, names)) for space, names, values in self._entries.values())
            and all(values.are(items) for items, values in self._sequences.values())
            and all(all(map(is_, _parts(f), parts)) for f, parts in self._functions.values())
            and all(is_same(_content(cell), content) for cell, content in self._cells.values())
            and all(values.are([getattr(o, n, _MISSING) for n in ns]) for o, ns, values in self._slots.values())
            and all(_alive(kept) is reference() for reference, kept in self._references.values())
            and all(array.tobytes() == data for array, data in self._arrays.values())
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore, at the end, every watched place that has changed."""
        undo = [
            *(_restore_mapping(m) for m, _, _ in self._mappings.values() if isinstance(m, dict)),
            *(_restore_sequence(s) for s, _ in self._sequences.values() if hasattr(s, "clear")),
            *(_restore_attributes(o, names) for o, names, _ in self._slots.values()),
            *(_restore_attributes(cls, names) for cls, names, _ in self._classes.values() if _is_python_class(cls)),
            *(_restore_entry(space, name) for space, name, _ in self._globals.values() if isinstance(space, dict)),
            *(_restore_cell(cell) for cell, _ in self._cells.values()),
            *(_restore_array(array) for array, _ in self._arrays.values()),
            *(read.restore() for read in self._modules),
        ]
        try:
            yield
        finally:
            for put_back in undo:
                put_back()


class _Module:
    """The state of one module when it was read."""

    __slots__ = (
        "_children",
        "_cls",
        "_get",
        "_keys",
        "_module",
        "_names",
        "_references",
        "_settings",
        "_tables",
        "_values",
    )

    def __init__(self, module: nn.Module, settings: Settings, found: Mapping[str, Any]) -> None:
        self._module = weakref.ref(module)
        self._settings = settings
        self._cls = type(module)
        self._keys = tuple(module.__dict__)
        self._names = tuple(found)
        self._values = _Values(found.values())
        self._get = _getter(self._names)
        self._children = tuple(module._modules)
        self._references = tuple(map(_weak, module._modules.values()))
        self._tables = _tensors_there(module._parameters), _tensors_there(module._buffers)

    def holds(self) -> bool:
        module = self._module()
        if module is None or type(module) is not self._cls:
            return False
        attributes = module.__dict__
        if tuple(attributes) != self._keys:
            if tuple(self._settings(module)) != self._names:
                return False
            self._keys = tuple(attributes)  # only the host's own bookkeeping was added or removed
        children = attributes["_modules"]
        if children or self._children:
            if tuple(children) != self._children or not all(map(is_, children.values(), map(_alive, self._references))):
                return False
        tables = _tensors_there(attributes["_parameters"]), _tensors_there(attributes["_buffers"])
        return tables == self._tables and self._values.are(self._get(attributes))

    def restore(self) -> Callable[[], None]:
        """Return a function that restores the settings."""
        module = self._module()
        before = {name: module.__dict__[name] for name in self._names if name in module.__dict__}

        def put_back() -> None:
            for name in self._settings(module).keys() - before.keys():
                del module.__dict__[name]
            for name, value in before.items():
                if module.__dict__.get(name, _MISSING) is not value:
                    module.__dict__[name] = value

        return put_back


class _Ref(weakref.ref):
    """A weak reference of ours, as opposed to those that attributes hold."""

    __slots__ = ()


class _Values:
    """Values that were read, referenced weakly where possible."""

    def __init__(self, values: Iterable[Any]) -> None:
        kept = [_weak(value) for value in values]
        self._kept = kept
        self._weak = any(type(value) is _Ref for value in kept)

    def are(self, values: Iterable[Any]) -> bool:
        """Whether these are the values that were read, in the same order."""
        values = list(values)
        kept = list(map(_alive, self._kept)) if self._weak else self._kept
        return len(values) == len(kept) and (all(map(is_, values, kept)) or all(map(is_same, values, kept)))


_MISSING, _GONE = object(), object()


def class_settings(cls: type) -> dict[str, Any]:
    """Return the entries of a class's own dictionary, without those that Python adds."""
    return {
        name: value
        for name, value in vars(cls).items()
        if name != "_abc_impl"
        and (name[:2] != "__" or (isinstance(value, types.FunctionType) and not name.startswith("__annotate")))
    }


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are one object, or equal plain values of one type. 0.0 and -0.0 are different."""
    if one is other:
        return True
    return type(one) is type(other) and type(one) in PLAIN and repr(one) == repr(other)


def _weak(value: Any) -> Any:
    if type(value) in PLAIN:
        return value
    try:
        return _Ref(value)
    except TypeError:  # such as a list, a dictionary or a tuple
        return value


def _alive(kept: Any) -> Any:
    """Return the object that was kept. One that is gone is not None: None may have taken its place."""
    if type(kept) is not _Ref:
        return kept
    value = kept()
    return _GONE if value is None else value


def _getter(names: tuple[str, ...]) -> Callable[[Mapping[str, Any]], tuple]:
    if len(names) > 1:
        return itemgetter(*names)
    return lambda attributes: tuple([attributes[name] for name in names])


def _are_settings(cls: type, names: tuple[str, ...], values: _Values) -> bool:
    settings = class_settings(cls)
    return tuple(settings) == names and values.are(settings.values())


def _restore_mapping(mapping: dict) -> Callable[[], None]:
    before = list(dict.items(mapping))

    def put_back() -> None:
        now = list(dict.items(mapping))
        if len(now) != len(before) or not all(a[0] is b[0] and a[1] is b[1] for a, b in zip(now, before)):
            dict.clear(mapping)
            dict.update(mapping, before)

    return put_back


def _restore_sequence(sequence: Any) -> Callable[[], None]:
    before = list(sequence)

    def put_back() -> None:
        now = list(sequence)
        if len(now) != len(before) or not all(map(is_, now, before)):
            sequence.clear()
            (sequence.update if isinstance(sequence, set) else sequence.extend)(before)

    return put_back


def _restore_attributes(item: Any, names: tuple[str, ...]) -> Callable[[], None]:
    before = [(name, _attribute(item, name)) for name in names]

    def put_back() -> None:
        for name, value in before:
            if is_same(_attribute(item, name), value):
                continue
            if value is _MISSING:
                delattr(item, name)
            else:
                setattr(item, name, value)

    return put_back


def _attribute(item: Any, name: str) -> Any:
    """Return an object's attribute, or the raw entry of a class's own dictionary, such as a static method."""
    return vars(item).get(name, _MISSING) if isinstance(item, type) else getattr(item, name, _MISSING)


def _restore_entry(namespace: dict, name: str) -> Callable[[], None]:
    before = namespace.get(name, _MISSING)

    def put_back() -> None:
        if namespace.get(name, _MISSING) is before:
            return
        if before is _MISSING:
            del namespace[name]
        else:
            namespace[name] = before

    return put_back


def _restore_cell(cell: types.CellType) -> Callable[[], None]:
    before = _content(cell)

    def put_back() -> None:
        if _content(cell) is not before:
            if before is _MISSING:
                del cell.cell_contents
            else:
                cell.cell_contents = before

    return put_back


def _restore_array(array: Any) -> Callable[[], None]:
    before = array.copy()

    def put_back() -> None:
        if array.tobytes() != before.tobytes():
            array[...] = before

    return put_back


def _is_python_class(cls: type) -> bool:
    return bool(cls.__flags__ & (1 << 9))  # Py_TPFLAGS_HEAPTYPE: attributes of other classes cannot be set


def _parents(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(len(parts))]


def _tensors_there(table: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a module's tensors that are present, that is, not None."""
    return tuple([name for name, tensor in table.items() if tensor is not None]) if table else ()


def _parts(function: types.FunctionType) -> tuple:
    return function.__code__, function.__defaults__, function.__kwdefaults__


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING
