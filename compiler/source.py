"""The source of classes and functions, reduced to what can change their results."""

from __future__ import annotations

import ast
import hashlib
import inspect
import linecache
import sys
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

CONSTRUCTORS = frozenset({"__init__", "reset_parameters", "extra_repr"})
"""Methods that have run before a block is described: what they leave behind is in its attributes."""

_CHANGING = frozenset(
    {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "clear", "remove"}
)


@dataclass(frozen=True)
class Source:
    """What is read off a class or function. Comments, docstrings and constructors are left out."""

    text: str
    names: tuple[tuple[str, ...], ...] = ()
    """Dotted names, part by part."""
    bound: frozenset[str] = field(default=frozenset())
    """Names that it assigns: if they are no globals, they are its own."""
    changed: frozenset[tuple[str, ...]] = field(default=frozenset())
    """Dotted names whose content it changes: as globals they are its memory, and no settings."""
    strings: frozenset[str] = field(default=frozenset())
    """String constants: a key that is not among them cannot be looked up by a constant."""

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest()


def qualified_name(item: Any) -> str:
    """Return a class's or function's name. ComfyUI names an extension's modules by the folder they lie in."""
    module = item.__module__ or "builtins"
    return item.__qualname__ if "/" in module or "\\" in module else f"{module}.{item.__qualname__}"


@lru_cache(maxsize=4096)
def read_source(item: Any) -> Source:
    """Read a class or function; one whose source cannot be had is its bytecode."""
    title = qualified_name(item)
    try:
        text = _source_text(item)
        tree = ast.parse(textwrap.dedent(text))
    except (OSError, TypeError, SyntaxError):
        return _compiled_source(title, item)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            node.body = [n for n in node.body if getattr(n, "name", None) not in CONSTRUCTORS] or [ast.Pass()]
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    nodes = list(ast.walk(tree))
    # The text of a lambda is its whole line, on which there may be others.
    code = _bytecode(item.__code__) if getattr(item, "__name__", "") == "<lambda>" else ""
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    return Source(
        f"{title}\n{ast.unparse(tree)}{code}",
        tuple(sorted({tuple(chain) for node in nodes if id(node) not in inner and (chain := _dotted(node))})),
        frozenset(_bound(nodes)) - {name for node in nodes if isinstance(node, ast.Global) for name in node.names},
        frozenset(_changed(nodes)) - {()},
        frozenset(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)),
    )


def is_native(cls: type, function: Any) -> bool:
    """Whether a function of a class is the one that the class's source shows there."""
    if not isinstance(function, types.FunctionType) or function.__globals__.get("__name__") != cls.__module__:
        return False
    code = function.__code__
    try:
        file, first, last = _class_place(cls)
    except (OSError, TypeError, SyntaxError):
        return vars(cls).get(code.co_name) is function
    return code.co_filename == file and first <= code.co_firstlineno <= last


def _compiled_source(title: str, item: Any) -> Source:
    codes = [item.__code__] if isinstance(item, types.FunctionType) else [f.__code__ for f in _functions(item)]
    constants = [value for code in codes for value in _constants(code)]
    names = sorted({(name,) for code in codes for name in _global_names(code)})
    return Source(
        "\n".join([title, *map(_bytecode, codes)]),
        tuple(names),
        frozenset(),
        frozenset(),
        frozenset(value for value in constants if isinstance(value, str)),
    )


def _functions(cls: type) -> list[types.FunctionType]:
    return [value for _, value in sorted(vars(cls).items()) if isinstance(value, types.FunctionType)]


def _bytecode(code: types.CodeType) -> str:
    constants = [repr(value) for value in code.co_consts if not isinstance(value, types.CodeType | frozenset)]
    constants += [repr(sorted(map(repr, value))) for value in code.co_consts if isinstance(value, frozenset)]
    inner = [_bytecode(value) for value in code.co_consts if isinstance(value, types.CodeType)]
    return " ".join([code.co_code.hex(), str(code.co_names), *constants, *inner])


def _constants(code: types.CodeType) -> Iterator[Any]:
    for value in code.co_consts:
        yield from _constants(value) if isinstance(value, types.CodeType) else [value]


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from _global_names(value)


def _source_text(item: Any) -> str:
    """As `inspect.getsource`, which before Python 3.13 parses a whole file again for every class in it."""
    if isinstance(item, types.FunctionType):
        # The code object, not the function: inspect would look through functools.wraps to the wrapped one.
        return inspect.getsource(item.__code__)
    file, first, last = _class_place(item)
    return "".join(linecache.getlines(file, vars(sys.modules[item.__module__]))[first - 1 : last])


def _class_place(cls: type) -> tuple[str, int, int]:
    """Return the file of a class, and its first and last line. Raises OSError if there is none."""
    file = inspect.getsourcefile(cls)
    if file is None:
        raise OSError(f"no file of {cls.__qualname__}")
    linecache.checkcache(file)
    lines = linecache.getlines(file, vars(sys.modules[cls.__module__]))
    try:
        return file, *_class_lines("".join(lines))[cls.__qualname__]
    except KeyError:
        raise OSError(f"no class {cls.__qualname__} in {file}") from None


@lru_cache(maxsize=64)
def _class_lines(text: str) -> dict[str, tuple[int, int]]:
    """Return the first and the last line of each class in a file, decorators included, by qualified name."""
    found: dict[str, tuple[int, int]] = {}

    def visit(node: ast.AST, path: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                begin = child.decorator_list[0].lineno if child.decorator_list else child.lineno
                found.setdefault(path + child.name, (begin, child.end_lineno))
                visit(child, f"{path}{child.name}.")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                visit(child, f"{path}{child.name}.<locals>.")
            else:
                visit(child, path)

    visit(ast.parse(text), "")
    return found


def _bound(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id


def _changed(nodes: list[ast.AST]) -> Iterator[tuple[str, ...]]:
    for node in nodes:
        if isinstance(node, ast.Global):
            yield from ((name,) for name in node.names)
        elif isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield tuple(_dotted(node.value))
            yield tuple(_dotted(node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING:
            yield tuple(_dotted(node.func.value))


def _dotted(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        rest = _dotted(node.value)
        return [*rest, node.attr] if rest else []
    return []
