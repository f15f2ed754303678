"""Convolutions' weights in channels_last, within the pages that ComfyUI has filled with contiguous ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import nn

from ....identity.memory_format import has_layouts, stride_in
from .casts import declare_outdated, has_arrived
from .vbar_places import ARRIVED, PLACE, unpin


class ChannelsLastInPlace:
    """Keeps convolutions' weights in channels_last within their pages while a network samples.

    ComfyUI fills pages with contiguous weights, and eager runs of the network get them back so.
    """

    def __init__(self, layers: Callable[[], list[nn.Module]]) -> None:
        """`layers` returns the network's layers that have pages."""
        self._layers = layers
        self._is_wanted = False
        self._arranged: list[tuple[weakref.ref[nn.Module], torch.Tensor]] = []
        self._is_arranged = False

    def begin(self) -> None:
        """A sampling begins."""
        self._is_wanted, self._is_arranged = True, False

    def end(self) -> None:
        """Bring back into order, at the end of a sampling, what has not been emptied since."""
        arranged, self._arranged = self._arranged, []
        self._is_wanted = self._is_arranged = False
        for reference, weight in arranged:
            layer = reference()
            attributes = vars(layer) if layer is not None else {}
            if attributes.get(ARRIVED["weight"]) is not weight or PLACE not in attributes:
                continue
            if has_arrived(layer, keep=True):
                try:
                    attributes[ARRIVED["weight"]] = _lay_out(weight, torch.contiguous_format)
                except torch.cuda.OutOfMemoryError:
                    declare_outdated([layer])  # its next call brings the weight anew
                finally:
                    unpin(attributes[PLACE])

    def forget(self) -> None:
        """Pages have been filled: look at all weights again."""
        self._is_arranged = False

    def arrange(self) -> bool:
        """Bring the weights of convolutions, whose pages are pinned, into channels_last, unless that was done."""
        if not self._is_wanted or self._is_arranged:
            return False
        self._arranged = [(ref, weight) for ref, weight in self._arranged if (layer := ref()) is not None
                          and vars(layer).get(ARRIVED["weight"]) is weight]  # fmt: skip
        for layer in self._layers():
            weight = vars(layer).get(ARRIVED["weight"])
            if type(weight) is torch.Tensor and has_layouts(weight) and weight.is_contiguous():
                weight = vars(layer)[ARRIVED["weight"]] = _lay_out(weight, torch.channels_last)
                self._arranged.append((weakref.ref(layer), weight))
        self._is_arranged = True
        return True


def _lay_out(weight: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """Reorder a weight's values within its memory; return the tensor that reads them so."""
    with torch.inference_mode():
        laid = weight.as_strided(weight.shape, stride_in(weight, memory_format))
        laid.copy_(weight.clone())
    return laid
