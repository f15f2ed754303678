"""Answers for code that asks fake tensors for values, while a network is called to learn its sizes.

Networks look at values between their blocks: whether a mask covers a whole frame, which step it is. An answer decides
which calls are foreseen, and never what a graph computes: a block that asks gets none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..common.torch_compat import TorchDispatchMode, needs_values, scalar_value, without_fake_tensors

MAX_ANSWERS = 100_000
"""A loop that waits for another answer must end."""
MAX_GUESSES = 1000
"""The same for code that is told that all it asks for is so, which happens while a person waits."""

_thread = threading.local()


@contextmanager
def without_answers() -> Iterator[None]:
    """Answer nothing that this thread asks for inside the block."""
    outer = getattr(_thread, "is_off", False)
    _thread.is_off = True
    try:
        yield
    finally:
        _thread.is_off = outer


def call_with_answers(call: Callable[[bool], None]) -> None:
    """Make a call under fake tensors; if it fails for want of a value, make it again and answer what it asks for.

    `call` is told whether it is answered. Raises its first error.
    """
    try:
        return call(False)
    except Exception as error:
        if not needs_values(error):
            raise
        asked = error
    try:
        with AnsweredValues():
            call(True)
    except Exception:
        raise asked from None


class Guess:
    """A call ahead in which each boolean that code asks for is the same, such as whether a mask varies within a frame.

    `was_asked` says whether another guess may foresee other calls.
    """

    def __init__(self, call: Callable[..., None], answer: bool) -> None:
        self._call, self._answer = call, answer
        self.was_asked = False
        self._asked = 0
        self.classes = getattr(call, "classes", ())

    def __call__(self, *args: Any) -> None:
        outer = getattr(_thread, "guess", None)
        _thread.guess = self
        try:
            self._call(*args)
        finally:
            _thread.guess = outer

    def ask(self) -> bool:
        """Return the answer."""
        self.was_asked = True
        self._asked += 1
        if self._answer and self._asked > MAX_GUESSES:
            raise RuntimeError("a loop waits for another answer")
        return self._answer


class AnsweredValues(TorchDispatchMode):
    """Answers for a fake tensor that does not know its value: False, 1 or 0.0 by its dtype; of `bincount` the fewest
    counts. A mask counts as all True where it chooses values. A `Guess` decides what a boolean is.
    """

    def __init__(self) -> None:
        super().__init__()
        self._answers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        try:
            result = func(*args, **kwargs)
            if func is torch.ops.aten.sum.default and args[0].dtype is torch.bool:
                result.chosen = args[0].numel()  # as `_chosen` answers
            return result
        except Exception as error:
            answer = _ANSWERS.get(func)
            if answer is None or not needs_values(error):
                raise
            if getattr(_thread, "is_off", False) or self._answers >= MAX_ANSWERS:
                raise
        self._answers += 1
        return answer(*args, **kwargs)


def constant(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of one value as a fake tensor that knows it."""
    with without_fake_tensors():
        value = tensor.tolist()
    return torch.tensor(value, dtype=tensor.dtype, device=tensor.device)


def _value(tensor: torch.Tensor) -> bool | int | float:
    if tensor.dtype is torch.bool:
        guess = getattr(_thread, "guess", None)
        return guess.ask() if guess else False
    return 0.0 if tensor.dtype.is_floating_point else getattr(tensor, "chosen", 1)


def _counts(tensor: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    return (tensor if weights is None else weights).new_empty(max(minlength, 1))


def _chosen(tensor: torch.Tensor, indices: list[torch.Tensor | None]) -> torch.Tensor:
    places: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype is torch.bool:
            places += [index.new_zeros(index.numel(), dtype=torch.long)] * index.ndim
        else:
            places.append(index)
    return torch.ops.aten.index.Tensor(tensor, places)


_ANSWERS = {scalar_value: _value, torch.ops.aten.bincount.default: _counts, torch.ops.aten.index.Tensor: _chosen}
