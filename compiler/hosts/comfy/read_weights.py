"""Which layers have their weights read by a block's own code, which then does not call the layer."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache

from torch import nn

from ...identity.source import read_source

ANY = ""
"""In the place of a child's name: the code does not say which."""

_READERS = frozenset({"cast_bias_weight"})
_INT8_READERS = _READERS | {"linear_input_act"}
"""Functions of ComfyUI's that take a layer and use its weight; the last one only if that is int8."""


def reads_weight(network: nn.Module, region: str, path: str, is_int8: bool) -> bool:
    """Whether code of a region, or of a module in it, may read the weight of the layer at a path below the network."""
    names = path.removeprefix(f"{region}.").split(".")
    owner = network.get_submodule(region)
    for name in names:
        if not {name, ANY}.isdisjoint(children_read(type(owner), is_int8)):
            return True
        owner = owner._modules[name]
    return False


@lru_cache(maxsize=512)
def children_read(cls: type, is_int8: bool) -> frozenset[str]:
    """Return the names of children whose weights a class's code reads, perhaps further down."""
    readers, found = _INT8_READERS if is_int8 else _READERS, set()
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        source = read_source(base)
        try:
            found |= set(_children_read(ast.parse(source.text.partition("\n")[2]), readers))
        except SyntaxError:  # there is no text, only bytecode
            if not readers.isdisjoint(source.attributes) or "weight" in source.attributes:
                found.add(ANY)
    return frozenset(found)


def _children_read(tree: ast.AST, readers: frozenset[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "weight" and not _is_self(node.value):
            yield _child(node.value)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in readers:
            yield _child(node.args[0]) if node.args else ANY


def _child(node: ast.AST) -> str:
    """Return the name of the child that an expression such as `self.mlp[2]` leads to."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Attribute) and _is_self(node.value):
            return node.attr
        node = node.value
    return ANY


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"
