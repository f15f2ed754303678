"""Expressions over a graph's symbols have the values that Python gives them."""

from __future__ import annotations

import math

import pytest
import sympy
import torch
from compiled_graphs.compiler.identity.guard_expressions import evaluate
from generated import run_text
from torch.utils._sympy.functions import CeilToInt, FloorDiv, Max, Min, Mod
from torch.utils._sympy.printers import PythonPrinter

SYMBOLS = {"s0": 6, "s1": 35, "s27": 4}


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("s0", 6),
        ("3*s0", 18),
        ("s0*s1*(s27 + 1)", 1050),
        ("(s1 // 4)", 8),
        ("((s1 // 4) % 3)", 2),
        ("-s0 + 2**s27", 10),
        ("s0 <= 6 and not (s1 == 34)", True),
        ("s0 < s1 < 36", True),
        ("s0 > 6 or s1 != 35", False),
        ("max(s0, s1)", 35),
        ("min(s0, s1, 5)", 5),
        ("math.ceil(s1 / 4)", 9),
        ("math.sqrt(s27)", 2.0),
        ("(s0 if s1 > 3 else s27)", 6),
        ("torch.sym_max(s0, s1)", 35),
        ("True", True),
        (" 64", 64),
    ],
)
def test_what_tracing_writes(expression, value):
    assert evaluate(expression, SYMBOLS) == value


def test_what_torch_prints_of_its_own_functions():
    one, other = sympy.symbols("s0 s1", positive=True, integer=True)
    terms = [
        FloorDiv(one * other, 8),
        Mod(other, one),
        Max(one, other) + Min(one, other),
        CeilToInt(other / 4),
        sympy.Eq(Mod(one, 2), 0),
        sympy.And(one < other, other <= 64),
        one**2 - 3 * other,
    ]
    for term in terms:
        printed = PythonPrinter().doprint(term)
        given_by_python = run_text(f"value = {printed}", {"math": math, "torch": torch, **SYMBOLS})["value"]
        assert evaluate(printed, SYMBOLS) == given_by_python


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').getcwd()",
        "().__class__",
        "torch.load('x')",
        "math.__loader__",
        "[s0]",
        "'text'",
        "lambda: 1",
        "open('x')",
        "s0 in (6, 7)",
        "(s0",
        "max(s0, key=abs)",
        "s0.real",
        "",
    ],
)
def test_anything_else_is_refused(expression):
    with pytest.raises(ValueError, match=r"not an expression|not a function"):
        evaluate(expression, SYMBOLS)


def test_a_name_without_a_value():
    with pytest.raises(NameError, match="s9 has no value"):
        evaluate("s9 + 1", SYMBOLS)
