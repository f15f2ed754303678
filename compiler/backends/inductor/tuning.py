"""Choices that we make for Inductor, if this torch allows it.

They only make graphs faster. If torch lacks one of the names or has changed it, Inductor makes its own choice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import lru_cache
from itertools import chain
from typing import Any

from ...common.torch_compat import (
    InductorChoices,
    ReductionHint,
    compiler_config,
    inductor_config,
    inductor_globals,
)
from .size_width import short_sizes

log = logging.getLogger(__name__)

TAG = "compiled_graphs: longer rows, one form, 32-bit sizes"
LONGEST_ROW = 4096
"""Kernels reduce rows of up to this many values in registers."""
LONGEST_HEAD = 256
"""The same limit for rows that are not adjacent in memory, such as one head of a query."""


@contextmanager
def preferences() -> Iterator[None]:
    """Replace some of Inductor's choices while a graph is compiled.

    By default, Inductor keeps rows of up to 1,024 values in registers while it normalises them, and reads longer rows
    twice. Transformers have rows of up to 4,096 values. In registers, 2,048 rows of 1,280 in fp16 take 5.9 us instead
    of 10.1 us on an H200. For heads, whose rows are not adjacent in memory, Inductor's limit is 64 values, but heads
    have 128.

    By default, Inductor also times two forms of each pointwise kernel, at a graph's small example sizes and while other
    graphs compile on the same GPU. The form that reads adjacent values at once is faster at real sizes, but now and
    then chance selected the other one, which took up to 2.5 times as long. That other form can be twice as fast only
    for a kernel that reads values that are not adjacent, as rotary embeddings do. Such kernels are still timed.

    Sizes are 32-bit numbers (`size_width`).

    Inductor's own caches do not know of all this. A tag keeps them apart from graphs that are compiled otherwise.
    """
    with ExitStack() as stack:
        _entered(stack, lambda: compiler_config.get().patch(cache_key_tag=TAG))
        _entered(stack, short_sizes)
        choices = [_LongerRows]
        if _entered(stack, lambda: inductor_config.get().patch({"triton.autotune_pointwise": True})):
            choices.append(_OneForm)
        _entered(stack, lambda: inductor_globals.get().set_choices_handler(_made_of(choices)))
        yield


@contextmanager
def settings(changes: Mapping[str, Any]) -> Iterator[None]:
    """Change settings of Inductor for a while. If this torch lacks one of them, change none."""
    with ExitStack() as stack:
        _entered(stack, lambda: inductor_config.get().patch(dict(changes)))
        yield


def _entered(stack: ExitStack, context: Callable[[], AbstractContextManager[Any]]) -> bool:
    """Make a context and enter it. Return whether both worked."""
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
    """Log a reason once, and not for each of thousands of kernels."""
    log.info("Inductor chooses by itself: %s", reason)


def _made_of(choices: list[type]) -> Any:
    return type("Choices", (*choices, InductorChoices.get()), {})()


class _LongerRows:
    """Reduces longer rows in registers. A mixin that comes before Inductor's own choices in a class's bases."""

    def should_use_persistent_reduction(self, features: Any, *args: Any, **kwargs: Any) -> bool:
        if super().should_use_persistent_reduction(features, *args, **kwargs):
            return True
        try:
            return _fits_in_registers(features)
        except Exception as error:
            _go_without(error)
            return False


class _OneForm:
    """Times two forms only of kernels that gather. The caller must have patched `triton.autotune_pointwise`."""

    def triton_kernel_kwargs(self, kernel: type, features: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            inductor_config.get().triton.autotune_pointwise = _gathers(features)  # Inductor generates this kernel next
        except Exception as error:
            _go_without(error)
        return super().triton_kernel_kwargs(kernel, features, *args, **kwargs)


def _fits_in_registers(features: Any) -> bool:
    hints = ReductionHint.get()
    longest = {hints.INNER: LONGEST_ROW, hints.DEFAULT: LONGEST_HEAD}.get(features.get_reduction_hint(), 0)
    return features.reduction_numel.is_Integer and bool(features.reduction_numel <= longest)


def _gathers(features: Any) -> bool:
    """Whether a kernel reads values that are not adjacent in memory, but computes with them one after the other."""
    reads = chain.from_iterable(node.read_writes.reads for node in features.scheduler_nodes())
    return any(not read.stride1_for_last_dim() for read in reads if hasattr(read, "stride1_for_last_dim"))
