"""Compile Model: MODEL in, the same MODEL with compiled blocks out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from . import inputs
from .compile_node import CompileNode

if TYPE_CHECKING:
    from ..compiler.hosts.comfy.request import Request


class CompileModel(CompileNode):
    """Put between a loader (or a LoRA) and a sampler. The image stays the same and comes sooner."""

    ID = "CG_CompileModel"
    TITLE = "Compile Model"
    CATEGORY = "compiled graphs"
    SOCKET = ("model", "The diffusion model to compile.")
    WIDGETS_AFTER = {"cuda_graphs": inputs.CUDA_GRAPHS, "when": inputs.WHEN, "lora_branch": inputs.LORA_BRANCH}
    RETURN_TYPES = ("MODEL",)
    OUTPUT_TOOLTIPS = ("The model with compiled blocks. LoRA and patch nodes may follow.",)
    DESCRIPTION = (
        "Compiles the repeated blocks of a model once per architecture. Other sizes, batches, prompts, seeds, "
        "samplers, LoRAs and checkpoints of the same architecture compile nothing more, and neither does a restart."
    )
    SEARCH_ALIASES = ["torch compile", "speed up", "accelerate", "inductor", "onediff", "model speedup"]

    def compile_with(
        self,
        request: Request,
        model: Any,
        cuda_graphs: bool = True,
        when: str = inputs.BEFORE,
        lora_branch: bool = False,
    ) -> tuple[Any, str]:
        """Return the compiled clone, and what to tell the person."""
        from ..compiler.hosts.comfy.compile import compile_model

        background = when == inputs.IN_BACKGROUND
        return compile_model(model, replace(request, capture=cuda_graphs, background=background, low_rank=lora_branch))
