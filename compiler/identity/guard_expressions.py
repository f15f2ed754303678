"""Sizes and guards of a graph are Python expressions over its symbols. They are evaluated without running code.

Tracing writes them (`torch.utils._sympy.printers.PythonPrinter`), and graph files contain them.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
}
_UNARY = {ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_}
_COMPARISONS = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS = {"max": max, "min": min, "round": round, "abs": abs}


def evaluate(expression: str, symbols: Mapping[str, int]) -> Any:
    """Return the value of an expression.

    Raises ValueError if tracing would not write such an expression, and NameError for a name without a value. Also
    raises what Python raises for operands that do not fit.
    """
    return _value(_parsed(expression), symbols)


@lru_cache(maxsize=4096)
def _parsed(expression: str) -> ast.expr:
    try:
        return ast.parse(expression.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is not an expression") from error


def _value(node: ast.expr, symbols: Mapping[str, int]) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() as value):
            return value
        case ast.Name(id=name):
            if name not in symbols:
                raise NameError(f"{name} has no value")
            return symbols[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_value(left, symbols), _value(right, symbols))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand, symbols))
        case ast.BoolOp(op=ast.And(), values=values):
            return all(_value(value, symbols) for value in values)
        case ast.BoolOp(values=values):
            return any(_value(value, symbols) for value in values)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _value(body if _value(test, symbols) else orelse, symbols)
        case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in _COMPARISONS for op in ops):
            values = [_value(each, symbols) for each in (left, *others)]
            return all(_COMPARISONS[type(op)](*values[i : i + 2]) for i, op in enumerate(ops))
        case ast.Call(func=function, args=arguments, keywords=[]):
            return _function(function)(*(_value(argument, symbols) for argument in arguments))
    raise ValueError(f"{ast.unparse(node)!r} is not an expression that tracing writes")


def _function(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=name) if name in _FUNCTIONS:
            return _FUNCTIONS[name]
        case ast.Attribute(value=ast.Name(id="math"), attr=name) if callable(getattr(math, name, None)):
            return getattr(math, name)
        case ast.Attribute(value=ast.Name(id="torch"), attr=name) if name.startswith("sym_"):
            return getattr(torch, name)
    raise ValueError(f"{ast.unparse(node)!r} is not a function that tracing uses")
