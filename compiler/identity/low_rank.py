"""Low-rank branches: what a LoRA adds to a layer's result, computed beside the layer instead of merged into its weight.

The layer holds the two factors as buffers, so a graph takes them among the weights. Their first size is the rank. It is
a symbol of the graph: another rank is another value, and neither a region's identity nor a guard says which.
"""

from __future__ import annotations

from collections.abc import Sequence

DOWN, UP = "compiled_graphs_down", "compiled_graphs_up"
"""Names of the factors: [rank, inputs] and [rank, outputs]. All of one region have the same rank."""
RANK = "rank"


def is_factor(name: str) -> bool:
    """Whether a tensor of this name, which may be dotted, is a factor of a low-rank branch."""
    return name.rpartition(".")[2] in (DOWN, UP)


def sizes_of(name: str, shape: Sequence[int]) -> tuple[int | str, ...]:
    """Return the sizes of a layer's tensor as its region's identity has them: without the rank of a factor."""
    return (RANK, *shape[1:]) if is_factor(name) else tuple(shape)
