"""CLIP Speedup: CLIP in, a CLIP that encodes with compiled blocks out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .compile_node import CompileNode

if TYPE_CHECKING:
    from ..compiler.hosts.comfy.request import Request


class CLIPSpeedup(CompileNode):
    """Put between a loader (or a LoRA) and the nodes that encode prompts. Others may go on using the CLIP as it was."""

    ID = "CG_CLIPSpeedup"
    TITLE = "CLIP Speedup"
    CATEGORY = "compiled graphs"
    SOCKET = ("clip", "The text encoder to compile.")
    RETURN_TYPES = ("CLIP",)
    OUTPUT_TOOLTIPS = ("A CLIP with compiled blocks, which shares the weights of the one that came in.",)
    DESCRIPTION = (
        "Compiles the repeated blocks of a text encoder once per architecture: CLIP, T5, Qwen, Gemma, Mistral, with "
        "prompts of any length. Text that a model generates is not affected."
    )
    SEARCH_ALIASES = ["compile clip", "torch compile clip", "text encoder speedup", "compile t5", "fast text encode"]

    def compile_with(self, request: Request, clip: Any) -> tuple[Any, str]:
        """Return a CLIP with compiled blocks, and what to tell the person."""
        from ..compiler.hosts.comfy.compile import compile_clip

        return compile_clip(clip, request)
