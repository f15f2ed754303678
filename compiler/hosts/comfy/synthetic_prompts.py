"""Calls of a text encoder that were never made: what encoding a prompt would pass, with any number of tokens.

An encoder is called by `encode_token_weights` with a dictionary: for each network in it, rows of tokens with their
weights. How long a row can be is the tokenizer's to say. CLIP's rows have one length, and a long prompt has more rows.
Rows of the others are as long as the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ...tracing.answered_values import call_with_answers
from ...tracing.shape_discovery import ModelCall, Sizes

ENCODE = "encode_token_weights"
"""The method by which ComfyUI enters a text encoder."""
LONG_TEXT = f'"{"word " * 400}"'
"""More tokens than any tokenizer that cuts a text into rows puts into one. What is in quotes, byT5 encodes as well."""
OTHER_SENSES = frozenset({"visual", "vision_model", "vision_tower", "audio_model", "audio_tower"})
"""Names of parts that look at images or listen to sound. They run once for each in a prompt, and are left alone."""
SIDE = 5
"""Of an image in a call ahead, in tokens."""

Tokens = Mapping[str, Any]


@dataclass(frozen=True)
class PromptCall:
    """A call as encoding a prompt would make it, from what the tokenizer makes of one."""

    clip: Any
    """It leads neither to a patcher nor to a network: what is compiled keeps it."""
    device: torch.device

    def __call__(self, network: nn.Module, sizes: Sizes) -> None:
        network.reset_clip_options()
        if self.clip.layer_idx is not None:
            network.set_clip_options({"layer": self.clip.layer_idx})
        network.set_clip_options({"execution_device": self.device})
        tokens = self.clip.tokenize(LONG_TEXT)
        _encode(network, tokens, sizes, _fixed_lengths(tokens))

    def repeat(self, network: nn.Module, method: str, args: tuple, kwargs: Mapping[str, Any]) -> ModelCall:
        """Return what makes a running call again at other sizes."""
        tokens, *_ = (*args, *kwargs.values())

        def again(weightless: nn.Module, sizes: Sizes) -> None:
            # Within this call, since a tokenizer may refuse the text: the prompt goes on, uncompiled.
            _encode(weightless, tokens, sizes, _fixed_lengths(self.clip.tokenize(LONG_TEXT)))

        return again


def is_of_other_sense(path: str) -> bool:
    """Whether a block is of a part of an encoder that reads no text."""
    return not OTHER_SENSES.isdisjoint(path.split("."))


def _encode(network: nn.Module, tokens: Tokens, sizes: Sizes, fixed: Mapping[str, int]) -> None:
    resized = {name: _resized(rows, sizes, fixed.get(name)) for name, rows in tokens.items()}
    for part in network.modules():
        if hasattr(type(part), "preprocess_embed"):
            part.preprocess_embed = partial(_see, part)
    call_with_answers(lambda _: getattr(type(network), ENCODE)(network, resized))


def _see(part: nn.Module, embed: Any, device: torch.device) -> tuple[torch.Tensor, _Seen]:
    """Return what a network for text gets for an image."""
    width = part.get_input_embeddings().weight.shape[1]
    return torch.empty((SIDE * SIDE, width), device=device), _Seen()


class _Seen(dict):
    """What an encoder notes of an image: Qwen2.5-VL its grid, a tensor of one row; Qwen3-VL a dictionary with it."""

    def max(self) -> int:
        return 2 * SIDE

    def __missing__(self, key: Any) -> Any:
        found: dict[Any, Any] = {"grid": self, "deepstack": [], 0: (1, 2 * SIDE, 2 * SIDE)}
        return found[key]


def _fixed_lengths(tokens: Tokens) -> dict[str, int]:
    """Return the length of a row for each network that has a long text in several."""
    return {name: len(rows[0]) for name, rows in tokens.items() if _is_rows(rows) and len(rows) > 1}


def _is_rows(rows: Any) -> bool:
    return isinstance(rows, list) and len(rows) > 0 and all(isinstance(row, list) and row for row in rows)


def _resized(rows: Any, sizes: Sizes, fixed: int | None) -> Any:
    """Return as many rows as the sizes say, of so many tokens, and with an image if there was one."""
    if not _is_rows(rows):
        return rows
    length, row = fixed or sizes.tokens, rows[0]
    plain = [token for token in row if isinstance(token[0], int)] or row
    longer = (plain + plain[-1:] * (length - len(plain)))[:length]
    images = [({"type": token[0].get("type")}, *token[1:]) for token in row if isinstance(token[0], Mapping)]
    return [[longer[0], *images[:1], *longer[1:]] for _ in range(sizes.batch)]
