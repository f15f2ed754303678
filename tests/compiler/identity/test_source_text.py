from __future__ import annotations

import argparse
import functools
import gc
import importlib
import importlib.util
import inspect
import itertools
import linecache
import os
import py_compile
import sys
import types
import weakref

import pytest
from compiled_graphs.compiler.identity import source_text
from compiled_graphs.compiler.identity.source import read_source
from compiled_graphs.compiler.identity.source_text import running_source
from generated import run_text

NUMBERS = itertools.count()

SOURCE = '''\
"""A module."""
import contextlib
import dataclasses
import enum
import functools
import typing

BASE = 2
T = typing.TypeVar("T")


def scaled(factor):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args):
            return factor * function(*args)

        return wrapper

    return decorate


def plain(x, shift=1, *, scale=3):
    return x * scale + shift  # a comment


def closing(
    x,
    y=2,
):
    text = """
at the margin
"""
    return [
        x + y, text,
    ]


class Block:
    """A block."""

    factor: int = 2
    __hidden = 5
    other = BASE * 2

    def __init__(self, width=4):
        self.width = width

    def forward(self, x, gain=1.5):
        return self.inner(x) * self.factor * gain

    @property
    def double(self):
        return self.width * 2

    @staticmethod
    def inner(x):
        return x + 1

    @scaled(2)
    def outer(self, x):
        return (lambda y: y + 1)(x)

    def __private(self):
        return 7

    class Nested:
        def run(self):
            return "nested"


class Derived(Block):
    pass


class Typed(typing.Generic[T]):
    width: int = 3


class Named(typing.NamedTuple):
    width: int = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Plain(Derived):
    width: int = 3
    names: tuple = ("a", "b")

    def area(self):
        return self.width**2


class Kind(enum.Enum):
    A = 1
    B = "b"


def make(number):
    def inside(x):
        return x + number

    class Local:
        def forward(self, x):
            return x * number

    return inside, Local
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Return a function that imports a text as a new module."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)

    def load(text=SOURCE):
        name = f"source_of_{os.getpid()}_{next(NUMBERS)}"
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        importlib.invalidate_caches()
        return importlib.import_module(name)

    return load


def special(module):
    return [module.Typed, module.Named, module.Plain, module.Kind]


def items(module):
    local, cls = module.make(3)
    outer = inspect.unwrap(module.Block.outer)
    functions = [module.plain, module.closing, module.scaled, outer, local]
    return [*functions, module.Block, module.Block.Nested, module.Derived, *special(module), cls]


def write(module, text):
    """Overwrite a module's file with another text, with a later time, as an update does."""
    with open(module.__file__, "w", encoding="utf-8") as file:
        file.write(text)
    seconds = os.stat(module.__file__).st_mtime + 10
    os.utime(module.__file__, (seconds, seconds))


def test_the_text_is_what_inspect_finds(module):
    for item in items(module()):
        code = item if isinstance(item, type) else item.__code__
        assert running_source(item) == inspect.getsource(code)


def test_the_text_has_the_decorators(module):
    assert running_source(module().Block.outer.__wrapped__).startswith("    @scaled(2)\n    def outer")


def test_a_text_is_read_with_its_encoding(module, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "in_latin.py").write_bytes('# coding: latin-1\r\ndef text():\r\n    return "é"\r\n'.encode("latin-1"))
    importlib.invalidate_caches()
    assert running_source(importlib.import_module("in_latin").text) == 'def text():\n    return "é"\n'


EDITS = {
    "a constant": ("return x + 1\n", "return x + 2\n"),
    "a name": ("self.inner(x) * self.factor", "self.inner(x) * self.width"),
    "an operator": ("x * number", "x / number"),
    "an operator in a function": ("return x * scale + shift", "return x * scale - shift"),
    "a value in a closure": ("return x + number", "return x - number"),
    "the type of a constant": ("(lambda y: y + 1)(x)", "(lambda y: y + 1.0)(x)"),
    "a nested class": ('return "nested"', 'return "nestled"'),
    "a text over lines": ("at the margin", "at the margins"),
    "a function's default": ("shift=1", "shift=2"),
    "a named default": ("scale=3", "scale=4"),
    "a default more": ("x, shift=1", "x=0, shift=1"),
    "a method's default": ("gain=1.5", "gain=2.5"),
    "a class's constant": ("factor: int = 2", "factor: int = 3"),
    "the type of a class's constant": ("factor: int = 2", "factor: int = 2.0"),
    "a private constant": ("__hidden = 5", "__hidden = 6"),
    "a class's expression": ("BASE * 2", "BASE * 3"),
    "a decorator": ("@scaled(2)", "@scaled(3)"),
    "a decorator less": ("    @scaled(2)\n", ""),
    "a private method": ("return 7", "return 8"),
    "a property": ("self.width * 2", "self.width * 3"),
    "a method more": ("    def __private", "    def extra(self):\n        return 1\n\n    def __private"),
    "a method less": ("    def __private(self):\n        return 7\n", ""),
    "another base": ("class Block:", "class Block(contextlib.ContextDecorator):"),
    "a base less": ("class Derived(Block):", "class Derived:"),
    "a base for another": ("class Derived(Block):", "class Derived(Block.Nested):"),
}
ONLY_THE_FILE_TELLS = {"a class's expression", "a decorator", "a decorator less"}


def refused(module):
    names = []
    for item in items(module):
        try:
            running_source(item)
        except OSError as error:
            names.append(item.__qualname__ if os.path.basename(module.__file__) in str(error) else str(error))
    return names


@pytest.mark.parametrize("edit", EDITS)
def test_updated_file_is_refused(module, edit):
    old = module()
    write(old, SOURCE.replace(*EDITS[edit]))
    assert refused(old)
    assert refused(module(SOURCE.replace(*EDITS[edit]))) == [], "a new process runs this text"


@pytest.mark.parametrize("edit", sorted(EDITS.keys() - ONLY_THE_FILE_TELLS))
def test_update_with_bytecode_is_refused(module, edit):
    old = module()
    write(old, SOURCE.replace(*EDITS[edit]))
    py_compile.compile(old.__file__, doraise=True)  # as pip does
    assert refused(old)


@pytest.mark.parametrize("edit", sorted(EDITS.keys() - ONLY_THE_FILE_TELLS))
def test_update_of_same_time_and_size_is_refused(module, edit):
    old = module()
    status = os.stat(old.__file__)
    write(old, SOURCE.replace(*EDITS[edit]))
    os.utime(old.__file__, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert refused(old)


def test_edit_without_a_change_of_code_is_accepted(module):
    old = module()
    write(old, "# one line more\n\n" + SOURCE.replace("# a comment", "# another comment"))
    assert refused(old) == []
    assert "another comment" in running_source(old.plain)


def test_source_read_before_an_update_is_kept(module):
    old = module()
    source = read_source(old.Block)
    write(old, SOURCE.replace("return x + 1\n", "return x + 2\n"))
    assert read_source(old.Block) is source


@pytest.mark.parametrize("text", ["", "nonsense (", "\0", "é".encode("latin-1"), "def plain(): pass"])
def test_file_that_is_not_python_is_refused(module, text):
    old = module()
    with open(old.__file__, "wb") as file:
        file.write(text if isinstance(text, bytes) else text.encode())
    assert len(refused(old)) == len(items(old))


def test_missing_file_is_refused(module):
    old = module()
    os.unlink(old.__file__)
    assert len(refused(old)) == len(items(old))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_named_pipe_does_not_block(module):
    old = module()
    os.unlink(old.__file__)
    os.mkfifo(old.__file__)
    assert len(refused(old)) == len(items(old))


def test_function_added_to_a_class_is_ignored(module):
    old, other = module(), module()
    expected = running_source(other.Block)
    old.Block.forward = lambda self, x: x
    old.Block.added = other.plain
    assert running_source(old.Block) == expected


def test_replaced_code_is_looked_up_again(module):
    old = module()
    assert running_source(old.plain).startswith("def plain")
    old.plain.__code__ = old.closing.__code__
    old.plain.__defaults__, old.plain.__kwdefaults__ = (2,), None
    assert running_source(old.plain).startswith("def closing")


def test_code_without_a_file_comes_from_linecache():
    text = "class Cell:\n    def forward(self, x):\n        return x + 1\n"
    namespace = run_text(text, {"__name__": "a_notebook"}, file_name="<cell 1>")
    with pytest.raises(OSError, match="cell 1"):
        running_source(namespace["Cell"])
    linecache.cache["<cell 1>"] = (len(text), None, text.splitlines(keepends=True), "<cell 1>")
    try:
        assert running_source(namespace["Cell"]) == text
        assert running_source(namespace["Cell"].forward) == text.partition("\n")[2]
    finally:
        del linecache.cache["<cell 1>"]


@pytest.mark.parametrize("item", [int, types.SimpleNamespace, functools.partial])
def test_builtins_are_refused(item):
    with pytest.raises(OSError, match=r"."):
        running_source(item)


def test_a_file_is_read_and_compiled_once(module, monkeypatch):
    old, compiled = module(), []
    compile_text = source_text._compiled
    monkeypatch.setattr(source_text, "_compiled", lambda text, path: compiled.append(path) or compile_text(text, path))
    for _ in range(3):
        assert refused(old) == []
    assert compiled == [old.__file__]


def test_code_is_compared_without_cached_bytecode(module, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    old = module()
    assert not os.path.exists(importlib.util.cache_from_source(old.__file__))
    write(old, SOURCE.replace("return x + 1\n", "return x + 2\n"))
    assert refused(old) == ["Block"]


def test_functions_that_were_read_are_not_kept():
    """One may close over a whole model."""

    def read():
        large = argparse.Namespace()

        def scale(x):
            return x * large.factor

        assert "large.factor" in read_source(scale).text
        return weakref.ref(large)

    gone = read()
    gc.collect()
    assert gone() is None
