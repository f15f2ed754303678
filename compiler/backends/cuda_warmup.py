"""CUDA warm-up: loads CUDA's libraries before anybody waits for them.

cuBLAS, cuDNN and PyTorch's own kernels load when a process first uses them. Without a warm-up, the first step after a
start takes a third of a second longer, with or without graphs.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from ..common.compare import disagreement

log = logging.getLogger(__name__)

TYPES = (torch.float16, torch.bfloat16)
"""The dtypes in which diffusion models run on GPUs. Each has its own kernels."""


class Example(nn.Module):
    """One layer of each kind that blocks consist of."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        options = {"device": device, "dtype": dtype}
        self.norm, self.conv = nn.GroupNorm(2, 8, **options), nn.Conv2d(8, 8, 3, padding=1, **options)
        self.rows, self.linear = nn.LayerNorm(8, **options), nn.Linear(8, 16, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [batch, 8, height, width] to [batch, height * width, 16]."""
        x = x + self.conv(nn.functional.silu(self.norm(x)))
        return self.linear(self.rows(x.flatten(2).transpose(1, 2)))


def load_libraries(device: torch.device) -> None:
    """Run a few small operations of each kind on a CUDA device; do nothing on any other.

    A failure is only logged: the libraries then load when they are needed. Draws no random numbers, because a sampler
    on another thread may be drawing its own.
    """
    if device.type != "cuda":
        return
    try:
        with torch.inference_mode():
            for dtype in TYPES:
                _compute(device, dtype)
    except RuntimeError as error:  # the GPU lacks the dtype or memory; nobody has asked for a result yet
        log.debug("CUDA's libraries load when they are needed: %s", error)


def _compute(device: torch.device, dtype: torch.dtype) -> None:
    example = Example(torch.device("meta"), dtype).to_empty(device=device)
    x = torch.zeros(2, 8, 16, 16, device=device, dtype=dtype)
    rows = example(x.contiguous(memory_format=torch.channels_last)).flatten(0, 1)
    heads = torch.zeros(2, 2, 64, 64, device=device, dtype=dtype)
    nn.functional.scaled_dot_product_attention(heads, heads, heads)
    products = torch.cat([rows, rows]).T @ nn.functional.gelu(rows.repeat(2, 1))
    disagreement([products], [products])
    times = torch.ones(2, device=device).pow(0.5).log()
    torch.outer(times, torch.arange(4, device=device)).sin().cos().exp()
