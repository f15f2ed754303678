"""The source text of running code, which need not be the text on disk.

Python keeps no text of the modules that it imports, and an update may have changed a file since. So the file is
compiled again, which takes milliseconds, and the running code is looked up in the result. A text stands for running
code only if it gives the same bytecode, constants and names; line numbers do not count. Bytecode does not show a
class's constants and a function's defaults, which are values by then: those are compared with the values. The rest
of a file, such as its decorators, is compared with the bytecode that Python cached when it imported the file.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import linecache
import marshal
import os
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..common.files import read_bounded

MAX_SOURCE = 2**24
"""Limit of a source file, in bytes."""
_CONSTANTS = (bool, int, float, complex, str, bytes, tuple, type(None))
_PYC_HEADER = 16
"""Bytes of a header in a bytecode file: magic number, flags, the source's time and size."""


def running_source(item: type | types.FunctionType) -> str:
    """Return the source lines of a running class or function, indented as in the file, with its decorators.

    Raises OSError if there is no text, or if the file has changed since its code was imported.
    """
    if isinstance(item, types.FunctionType):
        return _function_source(item, item.__code__.co_filename)
    return _class_source(item)


@dataclass(frozen=True)
class _Class:
    """A class statement of a file."""

    line: int
    codes: frozenset[types.CodeType]
    """The bare code (see `_bare`) of the functions defined directly in the class."""
    methods: frozenset[str]


@dataclass(frozen=True)
class _File:
    lines: list[str]
    codes: Mapping[types.CodeType, list[int]]
    """The first lines of functions, by bare code (see `_bare`)."""
    classes: Mapping[str, list[_Class]]
    """Class statements by qualified name."""


def _function_source(function: types.FunctionType, path: str) -> str:
    file = _file(path, function.__globals__)
    first = function.__code__.co_firstlineno
    for line in sorted(file.codes.get(_bare(function.__code__), ()), key=lambda line: abs(line - first)):
        text, node = _block(file, line)
        arguments = getattr(node, "args", None)
        if not isinstance(arguments, ast.arguments) or _arguments_agree(arguments, function):
            return text
    raise _changed(path, function)


def _class_source(cls: type) -> str:
    path = _class_file(cls)
    own = [function for function in _own_functions(cls) if function.__code__.co_filename == path]
    namespace = vars(sys.modules.get(cls.__module__, types.ModuleType("gone")))
    file = _file(path, namespace)
    for found in file.classes.get(cls.__qualname__, ()):
        if _methods_agree(found, cls, own):
            text, node = _block(file, found.line)
            if _constants_agree(node, cls, own) and _bases_agree(node, cls, namespace):
                return text
    raise _changed(path, cls)


def _methods_agree(found: _Class, cls: type, own: list[types.FunctionType]) -> bool:
    if found.methods and not own:  # the class is in C, and the file holds its form in Python
        return False
    codes = {_bare(function.__code__) for function in own}
    return codes <= found.codes and all(_mangled(name, cls) in vars(cls) for name in found.methods)


def _changed(path: str, item: Any) -> OSError:
    return OSError(f"{item.__qualname__} runs as it was imported, but {path} has changed since")


def _class_file(cls: type) -> str:
    """Return the file that a class was written in: that of its methods, except those that a decorator generated."""
    paths = [function.__code__.co_filename for function in _own_functions(cls)]
    written = [path for path in paths if not path.startswith("<")]
    try:
        return written[0] if written else inspect.getsourcefile(cls) or ""
    except TypeError as error:
        if paths:
            return paths[0]  # a cell of a notebook, or typed code
        raise OSError(str(error)) from None


def _file(path: str, namespace: Mapping[str, Any]) -> _File:
    """Return a file as it is now. Raises OSError if the file as a whole shows that it is not what was imported."""
    try:
        status = os.stat(path)
    except OSError:  # a cell of a notebook or a module in an archive, whose text its runner keeps
        text = "".join(linecache.getlines(path, dict(namespace)))
        if not text:
            raise
        return _indexed(_compiled(text, path), text)
    return _on_disk(path, status.st_mtime_ns, status.st_size, status.st_ino)


@lru_cache(maxsize=512)
def _on_disk(path: str, written: int, size: int, number: int) -> _File:
    try:
        text = importlib.util.decode_source(read_bounded(Path(path), MAX_SOURCE))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise OSError(f"{path} is not Python ({error})") from None
    code = _compiled(text, path)
    cached = _cached(path, written, size)
    if cached is not None and _bare(cached) != _bare(code):
        raise OSError(f"{path} has changed since it was imported")
    return _indexed(code, text)


def _compiled(text: str, path: str) -> types.CodeType:
    try:
        return compile(text, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise OSError(f"{path} is not Python ({error})") from None


def _cached(path: str, written: int, size: int) -> types.CodeType | None:
    """Return the bytecode that Python cached of an earlier state of a file.

    Returns None if there is none, or if it is of the present state.
    """
    try:
        data = read_bounded(Path(importlib.util.cache_from_source(path)), MAX_SOURCE)
        magic, flags, *state = data[:4], *(int.from_bytes(data[i : i + 4], "little") for i in range(4, _PYC_HEADER, 4))
        if magic != importlib.util.MAGIC_NUMBER or flags or state == [written // 10**9 & 2**32 - 1, size & 2**32 - 1]:
            return None
        code = marshal.loads(data[_PYC_HEADER:])
    except (OSError, NotImplementedError, EOFError, TypeError, ValueError):
        return None
    return code if isinstance(code, types.CodeType) else None


def _indexed(module: types.CodeType, text: str) -> _File:
    codes: dict[types.CodeType, list[int]] = {}
    classes: dict[str, list[_Class]] = {}
    for name, code in _inner(module, ""):
        if _is_function(code):
            codes.setdefault(_bare(code), []).append(code.co_firstlineno)
        else:
            inside = [each for each in code.co_consts if isinstance(each, types.CodeType) and _is_function(each)]
            methods = {each.co_name for each in inside if not each.co_name.startswith(("<", "__annotate"))}
            bare = frozenset(map(_bare, inside))
            classes.setdefault(name, []).append(_Class(code.co_firstlineno, bare, frozenset(methods)))
    return _File(text.splitlines(keepends=True), codes, classes)


def _inner(code: types.CodeType, prefix: str) -> Iterator[tuple[str, types.CodeType]]:
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            name = prefix + each.co_name
            yield name, each
            yield from _inner(each, f"{name}.<locals>." if _is_function(each) else f"{name}.")


def _is_function(code: types.CodeType) -> bool:
    return bool(code.co_flags & inspect.CO_OPTIMIZED)


@lru_cache(maxsize=2**15)
def _bare(code: types.CodeType) -> types.CodeType:
    """Return code without its file and line numbers, which an edit elsewhere in the file changes."""
    consts = tuple(_bare(each) if isinstance(each, types.CodeType) else each for each in code.co_consts)
    return code.replace(co_filename="", co_firstlineno=1, co_linetable=b"", co_consts=consts)


def _block(file: _File, line: int) -> tuple[str, ast.stmt]:
    """Return the text of the class, function or lambda that begins in a line, and its syntax tree.

    The text ends before a line that is indented no further. If that line is within brackets or a string, the text
    before it does not parse, and the next such line is tried. Python's tokenizer, which `inspect` uses, takes several
    times as long.
    """
    lines = file.lines[line - 1 :]
    margin = _margin(lines[0])
    head = "if 1:\n" if margin else ""
    for end in _ends(lines, margin):
        with suppress(SyntaxError, ValueError, RecursionError):
            node = ast.parse(head + "".join(lines[:end])).body[0]
            node = node.body[0] if margin else node
            return "".join(lines[: node.end_lineno - bool(margin)]), node
    raise OSError("the text does not parse")


def _ends(lines: list[str], margin: int) -> Iterator[int]:
    for number, line in enumerate(lines[1:], 1):
        if (text := line.strip()) and text[0] not in ")]}#" and _margin(line) <= margin:
            yield number
    yield len(lines)


def _margin(line: str) -> int:
    return len(line) - len(line.lstrip())


def _own_functions(cls: type) -> Iterator[types.FunctionType]:
    """Yield the functions that a class's own statement defined, including those that a decorator has wrapped."""
    for value in vars(cls).values():
        for function in _functions(value):
            if function.__qualname__ == f"{cls.__qualname__}.{function.__code__.co_name}":
                if function.__globals__.get("__name__") == cls.__module__:
                    yield function


def _functions(value: Any) -> Iterator[types.FunctionType]:
    if isinstance(value, property):
        parts = [value.fget, value.fset, value.fdel]
    elif isinstance(value, functools.cached_property | functools.partialmethod):
        parts = [value.func]
    else:
        parts = [getattr(value, "__func__", None), getattr(value, "__wrapped__", None)]
    if isinstance(value, types.FunctionType):
        yield value
    for part in parts:
        if part is not None:
            yield from _functions(part)


def _constants_agree(statement: ast.ClassDef, cls: type, own: list[types.FunctionType]) -> bool:
    said: dict[str, Any] = {}
    for node in statement.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        said |= {_mangled(each.id, cls): node.value for each in targets if isinstance(each, ast.Name)}
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            said.pop(_mangled(node.name, cls), None)
            named = [function for function in own if function.__code__.co_name == node.name]
            if named and not any(_arguments_agree(node.args, function) for function in named):
                return False
    return all(_agrees(value, vars(cls)[name]) for name, value in said.items() if name in vars(cls))


def _bases_agree(statement: ast.ClassDef, cls: type, namespace: Mapping[str, Any]) -> bool:
    """Whether a class has the bases that its statement names, as far as those names can be resolved."""
    resolved = [_resolved(base, namespace) for base in statement.bases]
    named = [base if isinstance(base, type) else None for base in resolved]  # NamedTuple is a function
    known = (*cls.__mro__, *vars(cls).get("__orig_bases__", ()))
    if any(base is not None and not _is_among(base, known) for base in named):
        return False
    return None in named or all(_is_among(base, (*named, object)) for base in cls.__bases__)


def _resolved(node: ast.expr, namespace: Mapping[str, Any]) -> Any:
    match node:
        case ast.Name(id=name):
            return namespace.get(name)
        case ast.Attribute(value=value, attr=name):
            holder = _resolved(value, namespace)
            return vars(holder).get(name) if isinstance(holder, types.ModuleType | type) else None
    return None


def _is_among(item: Any, items: tuple[Any, ...]) -> bool:
    return any(item is each for each in items)


def _arguments_agree(arguments: ast.arguments, function: types.FunctionType) -> bool:
    defaults, named = function.__defaults__ or (), function.__kwdefaults__ or {}
    nodes = {arg.arg: node for arg, node in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if node}
    return (
        len(defaults) == len(arguments.defaults)
        and named.keys() == nodes.keys()
        and all(map(_agrees, arguments.defaults, defaults))
        and all(_agrees(node, named[name]) for name, node in nodes.items())
    )


def _agrees(node: ast.expr | None, value: Any) -> bool:
    """Whether an expression can have this value. A constant has only its own."""
    if node is None or type(value) not in _CONSTANTS:
        return True
    try:
        return repr(ast.literal_eval(node)) == repr(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return True


def _mangled(name: str, cls: type) -> str:
    private = name.startswith("__") and not name.endswith("__")
    return f"_{cls.__name__.lstrip('_')}{name}" if private else name
