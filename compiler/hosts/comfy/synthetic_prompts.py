"""Calls of a text encoder that were never made: what encoding a prompt would pass, with any number of tokens.

An encoder is called by `encode_token_weights` with a dictionary: for each network in it, rows of tokens with their
weights. How long a row can be is the tokenizer's to say. CLIP's rows have one length, and a long prompt has more rows.
Rows of the others are as long as the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...tracing.answered_values import with_answers
from ...tracing.shape_discovery import ModelCall, Sizes

ENCODE = "encode_token_weights"
"""The method by which ComfyUI enters a text encoder."""
LONG_TEXT = "word " * 400
"""More tokens than any tokenizer that cuts a text into rows puts into one."""
OTHER_SENSES = ("visual", "vision", "audio")
"""Parts of a path that name a network for images or sound. It runs once per image in a prompt."""

Tokens = Mapping[str, Any]


@dataclass(frozen=True)
class PromptCall:
    """A call as encoding a prompt would make it, from what the tokenizer makes of one."""

    clip: Any

    def __call__(self, network: nn.Module, sizes: Sizes) -> None:
        network.reset_clip_options()
        if self.clip.layer_idx is not None:
            network.set_clip_options({"layer": self.clip.layer_idx})
        network.set_clip_options({"execution_device": self.clip.patcher.load_device})
        tokens = self.clip.tokenize(LONG_TEXT)
        _encode(network, tokens, sizes, _fixed_lengths(tokens))

    def repeat(self, network: nn.Module, method: str, args: tuple, kwargs: Mapping[str, Any]) -> ModelCall:
        """Return what makes a running call again at other sizes."""
        tokens, *_ = (*args, *kwargs.values())
        fixed = _fixed_lengths(self.clip.tokenize(LONG_TEXT))
        return lambda weightless, sizes: _encode(weightless, tokens, sizes, fixed)


def _encode(network: nn.Module, tokens: Tokens, sizes: Sizes, fixed: Mapping[str, int]) -> None:
    resized = {name: _resized(rows, sizes, fixed.get(name)) for name, rows in tokens.items()}
    with_answers(lambda _: getattr(type(network), ENCODE)(network, resized))


def _fixed_lengths(tokens: Tokens) -> dict[str, int]:
    """Return the length of a row for each network that has a long text in several."""
    return {name: len(rows[0]) for name, rows in tokens.items() if _is_rows(rows) and len(rows) > 1}


def _is_rows(rows: Any) -> bool:
    return isinstance(rows, list) and len(rows) > 0 and all(isinstance(row, list) and row for row in rows)


def _resized(rows: Any, sizes: Sizes, fixed: int | None) -> Any:
    """Return rows of as many tokens as the sizes say, and as many of them."""
    if not _is_rows(rows):
        return rows
    length, row = fixed or sizes.tokens, rows[0]
    plain = [token for token in row if not _is_embedding(token[0])] or row
    longer = plain + plain[-1:] * (length - len(plain))
    return [list(longer[:length]) for _ in range(sizes.batch)]


def _is_embedding(token: Any) -> bool:
    """Whether a token stands for an embedding or an image: the tokens that it takes are not known ahead."""
    return isinstance(token, torch.Tensor | Mapping)
