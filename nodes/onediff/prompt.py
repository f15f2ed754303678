"""OneDiff's prompt with a style: what a person writes, within words for a look."""

from __future__ import annotations

from typing import Any

from ...compiler.common.words import say
from .old_node import OldNode, with_lines
from .prompt_styles import STYLES

_SWITCH = {"default": True, "label_on": "yes", "label_off": "no"}
_NO_STYLE = STYLES["(No style)"]


def _text(tooltip: str) -> tuple[str, dict[str, Any]]:
    return "STRING", {"multiline": True, "dynamicPrompts": True, "tooltip": tooltip}


class CLIPTextEncodePromptStyle(OldNode):
    TITLE = "CLIP Text Encode(PromptStyle) (old)"
    RETURN_TYPES = ("CONDITIONING", "CONDITIONING")
    RETURN_NAMES = ("positive", "negative")
    DESCRIPTION = "From OneDiff's workflows. Encodes a prompt in a style. The words of the styles are not OneDiff's."
    INPUTS = {
        "required": {
            "text_positive": _text("What the image is to show."),
            "text_negative": _text("What it is not to show."),
            "style": (list(STYLES), {"tooltip": "The look that is added to the prompt."}),
            "clip": ("CLIP", {"tooltip": "The text encoder."}),
        },
        "optional": {
            "log_prompt": ("BOOLEAN", {**_SWITCH, "tooltip": "Show on the node what is encoded."}),
            "style_positive": ("BOOLEAN", {**_SWITCH, "tooltip": "Add the style to the prompt."}),
            "style_negative": ("BOOLEAN", {**_SWITCH, "tooltip": "Add the style to the negative prompt."}),
        },
    }

    def run(
        self,
        text_positive: str,
        text_negative: str,
        style: str,
        clip: Any,
        log_prompt: bool = True,
        style_positive: bool = True,
        style_negative: bool = True,
        **hidden: Any,
    ) -> dict[str, Any]:
        """Return both prompts, encoded."""
        chosen = STYLES.get(style) or STYLES.get(style.removesuffix("_1"))  # OneDiff's second style of a name
        lines = [] if chosen else [say("There is no style {name}: the prompt is encoded as it is.", name=style)]
        chosen = chosen or _NO_STYLE
        positive = chosen.positive(text_positive) if style_positive else text_positive
        negative = chosen.negative(text_negative) if style_negative else text_negative
        if log_prompt:
            lines += [say("Prompt: {text}", text=positive), say("Negative prompt: {text}", text=negative)]
        result = (_encode(clip, positive), _encode(clip, negative))
        return with_lines({"result": result}, hidden, lines)


NODES = (CLIPTextEncodePromptStyle,)


def _encode(clip: Any, text: str) -> Any:
    """Do what ComfyUI's CLIPTextEncode does."""
    if clip is None:
        raise ValueError(say("The checkpoint has no text encoder: connect one to clip."))
    tokens = clip.tokenize(text)
    if hasattr(clip, "encode_from_tokens_scheduled"):
        return clip.encode_from_tokens_scheduled(tokens)
    encoded, pooled = clip.encode_from_tokens(tokens, return_pooled=True)  # ComfyUI until December 2024
    return [[encoded, {"pooled_output": pooled}]]
