"""What Inductor is told to choose otherwise than it does by itself, as far as this torch lets itself be told.

All of it makes graphs faster, and none of it is needed: where torch lacks a name or has changed one, Inductor chooses
by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import lru_cache
from itertools import chain
from typing import Any

from ...common.torch_compat import InductorChoices, ReductionHint, inductor_config, inductor_globals

log = logging.getLogger(__name__)

LONGEST_ROW = 4096
"""Rows of up to so many values are reduced in registers."""
LONGEST_HEAD = 256
"""Likewise rows that do not follow each other in memory, such as one head of a query."""


@contextmanager
def preferences() -> Iterator[None]:
    """While a graph is compiled, choose otherwise than Inductor does by itself.

    It keeps rows of up to 1,024 values in registers while it normalises them, and reads longer ones twice. Those of
    transformers have up to 4,096, and take 5.9 us where they took 10.1 (2,048 rows of 1,280 in fp16 on an H200). Of
    heads, whose rows do not follow each other, it keeps 64 values, and they have 128.

    It times two forms of each kernel that goes value by value, at a graph's example sizes, which are small, and while
    other graphs are compiled on the same GPU. The form that reads neighbours at once is the faster one at real sizes;
    the other was taken by chance now and then, and took up to 2.5 times as long. Only a kernel that reads what are
    no neighbours, as rotary embeddings do, can be twice as fast in that one, and is still timed.
    """
    with ExitStack() as stack:
        choices = [_LongerRows]
        if _entered(stack, lambda: inductor_config.get().patch({"triton.autotune_pointwise": True})):
            choices.append(_OneForm)
        _entered(stack, lambda: inductor_globals.get().set_choices_handler(_made_of(choices)))
        yield


@contextmanager
def settings(changes: Mapping[str, Any]) -> Iterator[None]:
    """Give settings of Inductor other values for a while, and leave those alone that this torch does not have."""
    with ExitStack() as stack:
        _entered(stack, lambda: inductor_config.get().patch(dict(changes)))
        yield


def _entered(stack: ExitStack, context: Callable[[], AbstractContextManager[Any]]) -> bool:
    """Enter what `context` makes, if it can be made and entered; return whether it could."""
    try:
        stack.enter_context(context())
    except Exception as error:
        _go_without(error)
        return False
    return True


def _go_without(error: Exception) -> None:
    _say_once(f"{type(error).__name__}: {error}")


@lru_cache
def _say_once(reason: str) -> None:
    """Say it for the first of thousands of kernels."""
    log.info("Inductor chooses by itself: %s", reason)


def _made_of(choices: list[type]) -> Any:
    return type("Choices", (*choices, InductorChoices.get()), {})()


class _LongerRows:
    """Reduces longer rows in registers. To go before Inductor's own choices in a class's bases."""

    def should_use_persistent_reduction(self, features: Any, *args: Any, **kwargs: Any) -> bool:
        if super().should_use_persistent_reduction(features, *args, **kwargs):
            return True
        try:
            return _fits_in_registers(features)
        except Exception as error:
            _go_without(error)
            return False


class _OneForm:
    """Times two forms only of kernels that gather. Needs the setting `triton.autotune_pointwise` to be patched."""

    def triton_kernel_kwargs(self, kernel: type, features: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            inductor_config.get().triton.autotune_pointwise = _gathers(features)  # this kernel's code is written next
        except Exception as error:
            _go_without(error)
        return super().triton_kernel_kwargs(kernel, features, *args, **kwargs)


def _fits_in_registers(features: Any) -> bool:
    hints = ReductionHint.get()
    longest = {hints.INNER: LONGEST_ROW, hints.DEFAULT: LONGEST_HEAD}.get(features.get_reduction_hint(), 0)
    return features.reduction_numel.is_Integer and bool(features.reduction_numel <= longest)


def _gathers(features: Any) -> bool:
    """Whether a kernel reads values that lie apart in memory, though it computes with them one after the other."""
    reads = chain.from_iterable(node.read_writes.reads for node in features.scheduler_nodes())
    return any(not read.stride1_for_last_dim() for read in reads if hasattr(read, "stride1_for_last_dim"))
