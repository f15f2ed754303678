"""Comparing the strides of padded maps, at which Inductor of torch 2.13 fails.

A map that is padded on each side has strides such as (height + 2) * (width + 2). With the frames as a symbol, too,
Inductor asks whether one stride divides another. sympy writes that question with a fraction that it does not reduce,
and torch has no bounds for fractions: "Invalid ranges [0:-1]". Video VAEs pad their maps so.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ...common.torch_compat import InductorLayout, MissingName, inductor_globals
from .replacement import Replaced, Replacement

_NAME = "_stride_expr_ge_or_false"


def comparing_strides() -> AbstractContextManager[None]:
    """Answer such questions in torch's place while graphs are compiled. Does nothing where torch asks none.

    Threads that compile meanwhile get the same answers.
    """
    return _replacement.in_place()


def _find() -> Replaced | None:
    layout, original = _original()
    return None if original is None else Replaced(layout, _NAME, staticmethod(_answering(original.__func__)))


_replacement = Replacement(_find)


def _original() -> tuple[Any, Any]:
    """Return Inductor's class of layouts, and its method that compares strides, or None."""
    try:
        layout, _ = InductorLayout.get(), inductor_globals.get()
    except MissingName:
        return None, None
    method = vars(layout).get(_NAME)
    return layout, method if isinstance(method, staticmethod) else None


def _answering(original: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def is_at_least(left: Any, right: Any) -> bool:
        if right == 0 or not _has_fraction(left % right):
            return original(left, right)
        is_surely = inductor_globals.get().graph.sizevars.guard_or_false
        return is_surely(left >= right) or _divides(right, left)

    return is_at_least


def _has_fraction(expression: Any) -> bool:
    import sympy

    return any(power.exp.is_negative for power in sympy.sympify(expression).atoms(sympy.Pow))


def _divides(divisor: Any, expression: Any) -> bool:
    """Whether an expression is a whole multiple of another one, whatever the sizes are."""
    import sympy

    quotient = sympy.together(sympy.cancel(expression / divisor))
    return sympy.fraction(quotient)[1] == 1
