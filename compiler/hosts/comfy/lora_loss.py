"""How much of a LoRA is lost in a quantised weight: merged as ComfyUI would merge it, and beside the weight.

One layer stands for all: the rounding of a format is the same in each. What an earlier sampling has merged into its
weight, and ComfyUI has not taken out yet, counts as part of the weight. Nothing of what is computed stays.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...common.inner_tensors import TENSOR_TYPES
from . import comfy_compat
from .rules import gguf_weights

log = logging.getLogger(__name__)

Factors = tuple[torch.Tensor, torch.Tensor]
"""[rank, inputs] and [rank, outputs], with the LoRA's scale in them."""


@dataclass(frozen=True)
class Losses:
    """How far the change that a LoRA makes to a weight is off, as a share of that change. It can be more than 1."""

    merged: float
    """If ComfyUI merges it and rounds the weight again."""
    beside: float
    """If it is computed beside the weight."""


def losses(patcher: Any, key: str, layer: nn.Module, exact: Factors, branch: Factors) -> Losses | None:
    """Return what the LoRAs of a patcher lose in a layer's weight, or None where that cannot be said.

    `key` is the weight's in the patcher. `exact` are the factors in float32, and `branch` those that calls use.
    """
    if gguf_weights.is_known(type(layer.weight)):  # merged at each call, and never rounded again
        return None
    try:
        with torch.inference_mode():
            change = _product(exact)
            merged = _merged(patcher, key, layer, change.device)
            if merged is None or not change.norm() > 0:
                return None
            return Losses(_error(merged, change), _error(_product(branch).float(), change))
    except Exception as error:  # memory that is short, a format that nobody knows: a figure is not worth a picture
        log.debug("What a LoRA loses in %s is not known: %s", key, error)
        return None


def _product(factors: Factors) -> torch.Tensor:
    down, up = factors
    return up.t() @ down


def _merged(patcher: Any, key: str, layer: nn.Module, device: torch.device) -> torch.Tensor | None:
    """Return how a weight changes when ComfyUI merges the patcher's LoRAs, which stay as they are."""
    weight = comfy_compat.merged_weight(patcher, key, device)
    return None if weight is None else _values(layer, weight, device) - _values(layer, layer.weight, device)


def _values(layer: nn.Module, weight: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return what a quantised weight stands for, as the layer itself tells ComfyUI."""
    weight = weight.detach().to(device)
    if type(weight) in TENSOR_TYPES:
        weight = weight.float()
    convert = getattr(layer, "convert_weight", None)
    return (weight if convert is None else convert(weight)).float()


def _error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return ((ours - exact).norm() / exact.norm()).item()
