"""The source of classes and functions, reduced to what can change their results."""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import sys
import textwrap
import types
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from ..common.torch_compat import torch_functions
from .source_text import running_source

CONSTRUCTORS = frozenset({"__init__", "reset_parameters", "extra_repr"})
"""Methods that ran before a block is described. The block's attributes hold what they left behind."""

_CHANGING = frozenset(
    {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "clear", "remove"}
)
_READ_ANY_ATTRIBUTE = frozenset(
    {"vars", "dir", "eval", "exec", "attrgetter", "methodcaller", "__dict__", "copy", "deepcopy", "pickle", "locals"}
    | {"asdict", "astuple", "getmembers", "__getattr__", "__getattribute__", "__getstate__", "__reduce__"}
    | {"getattr", "hasattr", "getattr_static"}
)
"""Names by which code reads attributes without naming them, or hands them to code that does."""
_sources: weakref.WeakKeyDictionary[Any, tuple[tuple[types.CodeType, ...], Source]] = weakref.WeakKeyDictionary()
"""What was read of items that still live, and their code then. A function would keep all that it closes over."""


@dataclass(frozen=True)
class Import:
    """A statement within a function that imports one name."""

    module: str
    level: int = 0
    """Dots before the module."""
    member: str = ""
    """The name in the module, or nothing for the module itself."""
    gives_root: bool = False
    """Whether the name gets the outermost package of the module, as `import a.b` does."""


@dataclass(frozen=True)
class Source:
    """The facts that are read from a class or function, without comments, docstrings and constructors."""

    text: str
    names: tuple[tuple[str, ...], ...] = ()
    """The dotted names that the code reads, each split into its parts."""
    bound: frozenset[str] = field(default=frozenset())
    """Names that the code assigns. They are local, unless a global has the name."""
    changed: frozenset[tuple[str, ...]] = field(default=frozenset())
    """Dotted names whose content the code changes. A global among them is memory, not a setting."""
    attributes: frozenset[str] = field(default=frozenset())
    """Names of attributes that the code reads, on any object."""
    imported: Mapping[str, tuple[Import, ...]] = field(default_factory=dict)
    """What the code imports while it runs, by the name that it gets. Branches may import different things."""
    string_constants: frozenset[str] = field(default=frozenset())
    """String constants of the code. The code cannot look up another key by a constant."""
    reads_any_attribute: bool = True
    """Whether the code may read attributes that it does not name: by `vars`, or by a name that it computes."""

    @cached_property
    def digest(self) -> str:
        """The text's hash, in hex."""
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest()


def qualified_name(item: Any) -> str:
    """Return a class's or function's name, without the module's if that is a folder.

    ComfyUI names an extension's modules by their folder, which differs between installations.
    """
    module = item.__module__ or "builtins"
    return item.__qualname__ if "/" in module or "\\" in module else f"{module}.{item.__qualname__}"


def read_source(item: Any) -> Source:
    """Read a class or function as it runs: from its source, or from its bytecode if no source is available."""
    codes = tuple(code for _, code in codes_of(item))
    known, source = _sources.get(item, (None, None))
    if source is None or known != codes:  # it was given other code
        source = _read_source(item, codes)
        _sources[item] = codes, source
    return source


def codes_of(item: Any) -> list[tuple[str, types.CodeType]]:
    """Return the code of a function, or of all functions in a class's dictionary, each with its name."""
    if isinstance(item, types.FunctionType):
        return [(item.__name__, item.__code__)]
    return [(name, function.__code__) for name, value in vars(item).items() for function in functions_in(value)]


def functions_in(value: Any) -> list[types.FunctionType]:
    """Return the functions that an entry of a class's dictionary consists of."""
    if isinstance(value, types.FunctionType):
        return [value]
    parts = [getattr(value, name, None) for name in ("__func__", "fget", "fset", "fdel", "func")]
    return [part for part in parts if isinstance(part, types.FunctionType)]


def _read_source(item: Any, codes: tuple[types.CodeType, ...]) -> Source:
    title = qualified_name(item)
    try:
        tree = ast.parse(textwrap.dedent(running_source(item)))
    except (OSError, TypeError, SyntaxError):
        return _compiled_source(title, codes)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            node.body = [n for n in node.body if getattr(n, "name", None) not in CONSTRUCTORS] or [ast.Pass()]
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    nodes = list(ast.walk(tree))
    # A lambda's text is its whole line, which may hold other lambdas too.
    code = _bytecode(item.__code__) if getattr(item, "__name__", "") == "<lambda>" else ""
    left = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)} | set(map(id, _decorators(tree)))
    return Source(
        f"{title}\n{ast.unparse(tree)}{code}",
        tuple(sorted({tuple(chain) for node in nodes if id(node) not in left and (chain := _dotted(node))})),
        frozenset(_bound(nodes)) - {name for node in nodes if isinstance(node, ast.Global) for name in node.names},
        frozenset(_changed(nodes)) - {()},
        frozenset(node.attr for node in nodes if isinstance(node, ast.Attribute)),
        _imports(nodes),
        frozenset(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)),
        _reads_any_attribute(nodes),
    )


def _decorators(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield what ran when the item was defined. What a decorator has made of a function is what is read instead."""
    for item in tree.body:
        for each in (item, *(item.body if isinstance(item, ast.ClassDef) else ())):
            for decorator in getattr(each, "decorator_list", ()):
                yield from ast.walk(decorator)


def _reads_any_attribute(nodes: list[ast.AST]) -> bool:
    constant = {id(node.func) for node in nodes if isinstance(node, ast.Call) and _names_its_attribute(node)}
    named = [node for node in nodes if id(node) not in constant]
    return any(isinstance(n, ast.MatchClass) or not _READ_ANY_ATTRIBUTE.isdisjoint(_words_in(n)) for n in named)


def _names_its_attribute(call: ast.Call) -> bool:
    """Whether this is `getattr` or `hasattr` of a name that is a constant."""
    is_lookup = isinstance(call.func, ast.Name) and call.func.id in ("getattr", "hasattr")
    return is_lookup and len(call.args) > 1 and isinstance(call.args[1], ast.Constant)


def _words_in(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        return [node.attr]
    return [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []


def is_native(cls: type, name: str, function: Any) -> bool:
    """Whether the class's own statement defined this function under this name."""
    return (
        isinstance(function, types.FunctionType)
        and function.__globals__.get("__name__") == cls.__module__
        and function.__qualname__ == f"{cls.__qualname__}.{function.__code__.co_name}"
        and name.endswith(function.__code__.co_name)  # Python prefixes a private name with the class's
    )


def knows_name(owner: Any, name: str) -> bool:
    """Whether the library that owns a class or module uses this name there, whoever put the present value there."""
    if name.startswith("__") and name.endswith("__"):  # Python itself calls special methods
        return True
    bases = owner.__mro__[1:] if isinstance(owner, type) else (torch_functions,)
    module = owner.__module__ if isinstance(owner, type) else owner.__name__
    if any(hasattr(base, name) for base in bases):
        return True
    words = _words(module)
    return words is None or name in words


@lru_cache(maxsize=256)
def _words(module: str) -> frozenset[str] | None:
    """Return every word in the source of a module, or None if the source is not available."""
    try:
        return frozenset(re.findall(r"\w+", inspect.getsource(sys.modules[module])))
    except (KeyError, OSError, TypeError):
        return None


def _compiled_source(title: str, codes: tuple[types.CodeType, ...]) -> Source:
    constants = [value for code in codes for value in _constants(code)]
    names = sorted({(name,) for code in codes for name in _global_names(code)})
    string_constants = frozenset(value for value in constants if isinstance(value, str))
    attributes = frozenset(name for (name,) in names)
    text = "\n".join([title, *map(_bytecode, codes)])
    return Source(text, tuple(names), attributes=attributes, string_constants=string_constants)


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


def _bound(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id


def _imports(nodes: list[ast.AST]) -> dict[str, tuple[Import, ...]]:
    found: dict[str, tuple[Import, ...]] = {}
    for node in nodes:
        for alias in node.names if isinstance(node, ast.ImportFrom | ast.Import) else ():
            if isinstance(node, ast.ImportFrom):
                name, made = alias.asname or alias.name, Import(node.module or "", node.level, alias.name)
            else:
                name, made = (
                    alias.asname or alias.name.partition(".")[0],
                    Import(alias.name, gives_root=not alias.asname),
                )
            found[name] = (*found.get(name, ()), made)
    return found


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
