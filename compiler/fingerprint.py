"""What a region is: a hash of its code, its configuration and its parameters' shapes.

Two blocks with one fingerprint compute the same function of (weights, inputs), so they share a graph,
whatever checkpoint, file, process or day they come from. The code part follows the functions that the
region's classes name, and nothing else in their files: an unrelated edit of a host must not cost anybody
a compile, a change of a helper must.
"""

from __future__ import annotations

import argparse
import ast
import enum
import functools
import hashlib
import inspect
import json
import linecache
import numbers
import sys
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from .host import Host
from .layout import has_layouts, stride_in

_MODULE_INTERNALS = frozenset(nn.Module().__dict__) - {"training"}
_LIBRARIES = frozenset(
    {"torch", "torchvision", "numpy", "einops", "triton"}  # what they compute is their version's
    | {"PIL", "accelerate", "httpx", "huggingface_hub", "packaging", "requests", "safetensors", "tokenizers", "tqdm"}
)
"""Packages whose code a region's identity does not follow; the second lot computes nothing of a region."""
_CONSTRUCTORS = frozenset({"__init__", "reset_parameters", "extra_repr"})


@dataclass(frozen=True)
class Code:
    """The code a region can run, reduced to what identifies it."""

    digest: str
    literals: frozenset[str]
    """Every string constant in it; a key that is not among them cannot be looked up."""


def fingerprint(module: nn.Module, host: Host) -> str:
    """Return the identity of a region as a hex digest.

    Stable over processes, hash seeds, devices and offloading; changed by an edit of the region's code, by
    a configuration value (heads, eps, stride ...) and by a parameter's or buffer's shape, dtype or layout.
    Not by the layout of weights that the host arranges.
    """
    record = {"code": region_code(module, host).digest, "modules": list(_configuration(module, host))}
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def region_code(module: nn.Module, host: Host) -> Code:
    """Return the code of a region: its modules' classes and the functions they hold or name."""
    roots: set[Any] = set()
    for child in module.modules():
        roots.add(type(child))
        for name in child.__dict__.keys() - host.volatile_attributes - {"forward"}:
            roots.update(_code_of(child.__dict__[name]))
    return _closure(frozenset(roots), host.infrastructure)


def tensor_attributes(module: nn.Module) -> list[str]:
    """Return the paths of tensors that a region holds outside its parameters and buffers.

    Such a tensor would be baked into a graph as a constant, and then belong to one checkpoint.
    """
    return [
        f"{path}.{name}" if path else name
        for path, child in module.named_modules()
        for name, value in child.__dict__.items()
        if isinstance(value, torch.Tensor)
    ]


def _configuration(module: nn.Module, host: Host) -> Iterator[list]:
    is_arranged = host.arranges(module)
    for path, child in module.named_modules():
        settings = {
            name: _plain(host.setting(name, value), objects=True)
            for name, value in child.__dict__.items()
            if name not in _MODULE_INTERNALS and name not in host.volatile_attributes and name != "forward"
        }
        tensors = {
            name: [list(t.shape), str(t.dtype), _stride(t, is_arranged)]
            for group in (child._parameters, child._buffers)
            for name, t in group.items()
            if t is not None
        }
        yield [path, _name(type(child)), settings, tensors]


def _stride(tensor: torch.Tensor, is_arranged: bool) -> list[int]:
    if is_arranged and has_layouts(tensor):
        return list(stride_in(tensor, torch.contiguous_format))
    return list(tensor.stride())


def _name(item: Any) -> str:
    """Return a class's or function's name. ComfyUI names an extension's modules by the folder they lie in."""
    module = item.__module__ or "builtins"
    return item.__qualname__ if "/" in module or "\\" in module else f"{module}.{item.__qualname__}"


def _code_of(value: Any) -> Iterator[types.FunctionType | type]:
    """Yield the function that an attribute is, or the class of an object that is called like one."""
    if isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, types.FunctionType):
        yield value
    elif callable(value) and isinstance(type(value).__call__, types.FunctionType) and not isinstance(value, nn.Module):
        yield type(value)


def _plain(value: Any, depth: int = 6, objects: bool = False) -> Any:
    """Reduce a value to JSON that depends on its content only, or to the name of its type.

    `objects` follows the attributes of objects as well.
    """
    if isinstance(value, enum.Enum):
        return f"{_name(type(value))}.{value.name}"
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, numbers.Number | bytes):
        return repr(value)
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    if isinstance(value, torch.device):
        return "device"  # where a module lives is not what it computes
    if isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    if isinstance(value, functools.partial):
        value = (value.func, value.args, value.keywords)
    if depth and isinstance(value, list | tuple):
        return [_plain(item, depth - 1, objects) for item in value]
    if depth and isinstance(value, set | frozenset):
        return sorted((_plain(item, depth - 1, objects) for item in value), key=repr)
    if depth and isinstance(value, dict):
        return {str(key): _plain(item, depth - 1, objects) for key, item in value.items()}
    if isinstance(value, types.FunctionType | types.MethodType | types.BuiltinFunctionType | type):
        return _name(value)
    name = _name(type(value))
    if objects and depth and hasattr(value, "__dict__") and not isinstance(value, nn.Module | torch.Tensor):
        return [name, _plain(vars(value), depth - 1, objects)]
    return name


def _closure(roots: set[Any], infrastructure: tuple[str, ...]) -> Code:
    records: set[str] = set()
    literals: set[str] = set()
    seen: set[Any] = set()
    pending = list(roots)
    while pending:
        item = pending.pop()
        if item in seen:
            continue
        seen.add(item)
        if _is_outside(item, infrastructure):
            records.add(_name(item))
            if isinstance(item, types.FunctionType):
                pending.extend(_enclosed_functions(item))
            continue
        if isinstance(item, type):
            pending.extend([*item.__mro__[1:], *_foreign_methods(item)])
        else:
            pending.extend(_enclosed_functions(item))
            records.add(f"{_name(item)} {_enclosed_values(item)!r}")
        source = _read_source(item)
        records.add(source.text)
        literals.update(source.literals)
        # Resolved anew each time: an extension may have replaced a helper since the last look.
        for name, value in _resolve(source.names, _namespace(item)):
            if isinstance(value, types.FunctionType | type):
                pending.append(value)
            elif _is_constant(name, value):
                records.add(f"{_name(item)}: {name}={_plain(value)!r}")
    digest = hashlib.sha256("\n\n".join(sorted(records)).encode()).hexdigest()
    return Code(digest, frozenset(literals))


def _is_constant(name: str, value: Any) -> bool:
    """Whether a global is a setting of the code, and not a cache, a registry or the whole command line."""
    if isinstance(value, types.ModuleType | argparse.Namespace):
        return False
    return not isinstance(value, dict | list | set) or name.rpartition(".")[2].isupper()


def _is_outside(item: Any, infrastructure: tuple[str, ...]) -> bool:
    # A wrapper that a library made bears the name of what it wraps; its globals do not.
    home = item.__globals__.get("__name__") if isinstance(item, types.FunctionType) else item.__module__
    module = home or "builtins"
    root = module.partition(".")[0]
    return (
        root in _LIBRARIES
        or root in sys.stdlib_module_names
        or any(module == prefix or module.startswith(prefix + ".") for prefix in infrastructure)
    )


def _enclosed_functions(function: types.FunctionType) -> Iterator[types.FunctionType]:
    """A decorated function keeps the one it wraps in a closure cell."""
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:
            continue
        if isinstance(content, types.FunctionType):
            yield content


def _enclosed_values(function: types.FunctionType) -> list:
    """What else a function made inside another one depends on: defaults and numbers in closure cells."""
    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    values += [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    return [_plain(value) for value in values if isinstance(value, bool | int | float | str | tuple | torch.dtype)]


def _foreign_methods(cls: type) -> Iterator[types.FunctionType]:
    """Yield functions that somebody put on a class, which are not in its source."""
    for name, value in vars(cls).items():
        if isinstance(value, types.FunctionType) and name not in _CONSTRUCTORS:
            if value.__globals__.get("__name__") != cls.__module__ or value.__code__.co_name != name:
                yield value


@dataclass(frozen=True)
class _Source:
    text: str
    names: tuple[tuple[str, ...], ...]
    literals: frozenset[str]


@lru_cache(maxsize=4096)
def _read_source(item: Any) -> _Source:
    """Read a class or function: its text without comments, the dotted names and the strings in it."""
    title = _name(item)
    try:
        tree = ast.parse(textwrap.dedent(_source_text(item)))
    except (OSError, TypeError, SyntaxError):
        constants = list(_constants(item))
        literals = frozenset(value for value in constants if isinstance(value, str))
        return _Source(f"{title} {_bytecode(item)} {_plain(constants)}", (), literals)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            # What a constructor leaves behind is in the configuration.
            node.body = [n for n in node.body if getattr(n, "name", None) not in _CONSTRUCTORS] or [ast.Pass()]
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    nodes = list(ast.walk(tree))
    names = {tuple(chain) for node in nodes if (chain := _dotted(node))}
    literals = frozenset(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return _Source(f"{title}\n{ast.unparse(tree)}", tuple(sorted(names)), literals)


def _source_text(item: Any) -> str:
    """As `inspect.getsource`, which before Python 3.13 parses a whole file again for every class in it."""
    if isinstance(item, types.FunctionType):
        # The code object, not the function: inspect would look through functools.wraps to the wrapped one.
        return inspect.getsource(item.__code__)
    file = None if hasattr(item, "__firstlineno__") else inspect.getsourcefile(item)
    if file is None:
        return inspect.getsource(item)
    linecache.checkcache(file)
    lines = linecache.getlines(file, vars(sys.modules[item.__module__]))
    try:
        first, last = _class_lines("".join(lines))[item.__qualname__]
    except KeyError:
        raise OSError(f"no class {item.__qualname__} in {file}") from None
    return "".join(lines[first - 1 : last])


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


def _bytecode(item: Any) -> str:
    if isinstance(item, types.FunctionType):
        return f"{item.__code__.co_code.hex()} {item.__code__.co_names}"
    methods = {key: value for key, value in vars(item).items() if isinstance(value, types.FunctionType)}
    return str(sorted((key, _bytecode(value)) for key, value in methods.items()))


def _constants(item: Any) -> Iterator[Any]:
    if isinstance(item, type):
        methods = sorted(key for key, value in vars(item).items() if isinstance(value, types.FunctionType))
        for key in methods:
            yield from _constants(vars(item)[key])
    else:
        code = item.__code__ if isinstance(item, types.FunctionType) else item
        for value in code.co_consts:
            yield from _constants(value) if isinstance(value, types.CodeType) else [value]


def _namespace(item: Any) -> dict[str, Any]:
    if isinstance(item, types.FunctionType):
        return item.__globals__
    return vars(sys.modules.get(item.__module__, types.ModuleType("empty")))


def _resolve(names: tuple[tuple[str, ...], ...], namespace: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the globals that code names, following dots through modules and parsed options."""
    for chain in names:
        if chain[0] not in namespace:
            continue
        value = namespace[chain[0]]
        for part in chain[1:]:
            # Parsed options are a Namespace, or a dictionary that has its entries as attributes.
            if not isinstance(value, types.ModuleType | argparse.Namespace | dict) or not hasattr(value, part):
                break
            value = getattr(value, part)
        else:
            yield ".".join(chain), value


def _dotted(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        rest = _dotted(node.value)
        return [*rest, node.attr] if rest else []
    return []
