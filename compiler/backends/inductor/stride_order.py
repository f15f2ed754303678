"""Comparing the strides of padded maps, at which Inductor of torch 2.13 fails.

A map that is padded on each side has strides such as (height + 2) * (width + 2). With the frames as a symbol, too,
Inductor asks whether one stride divides another. sympy writes that question with a fraction that it does not reduce,
and torch has no bounds for fractions: "Invalid ranges [0:-1]". Video VAEs pad their maps so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ...common.torch_compat import InductorLayout, MissingName, inductor_globals

_NAME = "_stride_expr_ge_or_false"


@contextmanager
def comparing_strides() -> Iterator[None]:
    """Answer such questions in torch's place while graphs are compiled. Does nothing where torch asks none.

    Threads that compile meanwhile get the same answers.
    """
    _replacement.begin()
    try:
        yield
    finally:
        _replacement.end()


class _Replacement:
    """Our comparison in place of torch's, as long as anybody compiles."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._restore: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Put it in place for one more."""
        with self._lock:
            if self._users == 0:
                layout, original = _original()
                if original is not None:
                    setattr(layout, _NAME, staticmethod(_answering(original.__func__)))
                    self._restore = partial(setattr, layout, _NAME, original)
            self._users += 1

    def end(self) -> None:
        """Give torch its own back once nobody compiles any more."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._restore()
                self._restore = lambda: None


_replacement = _Replacement()


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
