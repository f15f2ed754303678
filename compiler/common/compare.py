"""The check against eager: it runs once per graph and process, on the person's real tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .torch_compat import float32_precisions

BOUNDS = {
    torch.float64: 1e-6,
    torch.float32: 1e-3,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
    torch.float8_e4m3fn: 2e-1,
}
"""Largest relative error ||graph - eager|| / ||eager|| by dtype.

Whole models measured 2e-3 in fp16 (SDXL) and 7e-3 in bf16 (Flux). A wrong graph is off by about 1.
"""


def disagreement(
    graph: Sequence[torch.Tensor], eager: Sequence[torch.Tensor], precision: torch.dtype | None = None
) -> str | None:
    """Return what is wrong with a graph's outputs, or None if they agree with eager's within the bound.

    `precision` is the dtype that the graph computes in, if it is coarser than that of its outputs. Where eager itself
    is not finite (a broken checkpoint), the graph's values are not compared.
    """
    if len(graph) != len(eager):
        return f"{len(graph)} outputs where eager has {len(eager)}"
    for ours, theirs in zip(graph, eager, strict=True):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return f"{_describe(ours)} where eager has {_describe(theirs)}"
        if theirs.is_complex():
            ours, theirs = torch.view_as_real(ours), torch.view_as_real(theirs)
        if not theirs.is_floating_point():
            if not torch.equal(ours, theirs):
                return f"other {theirs.dtype} values than eager"
            continue
        error = relative_error(ours, theirs)
        bound = BOUNDS.get(bounding_dtype(theirs, precision), BOUNDS[torch.bfloat16])
        if not error <= bound:
            return f"relative error {error:.1e} against eager, more than {bound:.0e} for {theirs.dtype}"
    return None


def bounding_dtype(tensor: torch.Tensor, coarser: torch.dtype | None) -> torch.dtype:
    """Return the dtype whose bound applies. GPUs calculate convolutions in float32 with float16's digits by default."""
    precision = coarser or tensor.dtype
    rounds = precision is torch.float32 and tensor.is_cuda and "tf32" in float32_precisions()
    return torch.float16 if rounds else precision


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return ||ours - theirs|| / ||theirs|| over the elements where `theirs` is finite; NaN if ours is not."""
    wide = torch.float64 if theirs.device.type == "cpu" else torch.float32
    ours, theirs = ours.to(wide), theirs.to(wide)  # float8 has neither isfinite nor norm
    finite = theirs.isfinite()
    ours, theirs = torch.where(finite, ours, 0), torch.where(finite, theirs, 0)
    norm = theirs.norm()
    return ((ours - theirs).norm() / torch.where(norm > 0, norm, 1)).item()


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
