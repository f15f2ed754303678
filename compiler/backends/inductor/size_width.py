"""Kernels get sizes as 32-bit numbers.

Inductor gives a kernel that counts with 32 bits its sizes in 64 all the same, in case it multiplies some. Where the
kernel divides by a size, which it does for each value of a padded map, it then divides 64-bit numbers: reflecting the
sides of a video's map took 1.2 ms for 0.14 GB on an H100, and reading and writing it takes 0.1 ms.

The graphs of this project have guards against tensors with more values than 32 bits can count (`export._index_limits`),
and take their inputs in formats without gaps. So no product of sizes in an index is larger than that. The guards are
those of the exported graph. `split_products` makes a tensor three times as long as a layer's result; that would matter
for T5-XXL with more than 70,000 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ...common.torch_compat import MissingName, triton_codegen
from .replacement import Replaced, Replacement

_NAME = "signature_to_meta"
_is_ours: ContextVar[bool] = ContextVar("has_guards_against_long_tensors", default=False)


@contextmanager
def short_sizes() -> Iterator[None]:
    """Have kernels that this thread compiles take sizes as 32-bit numbers, if they count with 32 bits.

    Kernels of others, whose graphs may lack such guards, stay as they are.
    """
    token = _is_ours.set(True)
    try:
        with _replacement.in_place():
            yield
    finally:
        _is_ours.reset(token)


def _find() -> Replaced | None:
    try:
        owner = triton_codegen.get()
    except MissingName:
        return None
    original = vars(owner).get(_NAME)
    return None if original is None else Replaced(owner, _NAME, _with_short_sizes(original))


def _with_short_sizes(original: Callable[..., dict[str, str]]) -> Callable[..., dict[str, str]]:
    def types_of_arguments(*given: Any, **named: Any) -> dict[str, str]:
        types = original(*given, **named)
        if named.get("size_dtype") != "tl.int32" or not _is_ours.get():
            return types
        return {name: "i32" if kind == "i64" and name.startswith("ks") else kind for name, kind in types.items()}

    return types_of_arguments


_replacement = Replacement(_find)
