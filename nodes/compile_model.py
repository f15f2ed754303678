"""Compile Model: MODEL in, the same MODEL with compiled blocks out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..compiler.backends import NAMES
from . import messages, settings, sockets


class CompileModel:
    """Put between a loader (or a LoRA) and a sampler. The image stays the same and comes sooner."""

    CATEGORY = "compiled graphs"
    FUNCTION = "compile"
    RETURN_TYPES = ("MODEL",)
    OUTPUT_TOOLTIPS = ("The model with compiled blocks. LoRA and patch nodes may follow.",)
    DESCRIPTION = (
        "Compiles the repeated blocks of a model once per architecture. Other sizes, batches, prompts, seeds, "
        "samplers, LoRAs and checkpoints of the same architecture compile nothing more, and neither does a restart."
    )
    SEARCH_ALIASES = ["torch compile", "speed up", "accelerate", "inductor", "onediff", "model speedup"]

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  ComfyUI's name
        return {
            "required": {"model": ("MODEL", {"tooltip": "The diffusion model to compile."})},
            "optional": {
                "backend": sockets.backend(),
                "verify": sockets.VERIFY,
                "cuda_graphs": sockets.CUDA_GRAPHS,
                "when": sockets.WHEN,
            },
            "hidden": sockets.HIDDEN,
        }

    @classmethod
    def VALIDATE_INPUTS(cls, backend: str = NAMES[0]) -> bool | str:  # noqa: N802  ComfyUI's name
        return sockets.check_backend(backend)

    def compile(
        self,
        model: Any,
        backend: str = NAMES[0],
        verify: bool = True,
        cuda_graphs: bool = True,
        when: str = sockets.BEFORE,
        unique_id: str = "",
        prompt: dict | None = None,
        extra_pnginfo: dict | None = None,
    ) -> dict[str, Any]:
        """Return the compiled clone, and the text the node shows."""
        from ..compiler.hosts.comfy.compile import compile_model

        settings.apply()
        request = messages.request(backend, verify, unique_id, prompt, extra_pnginfo)
        compiled, text = compile_model(
            model, replace(request, record=cuda_graphs, background=when == sockets.IN_BACKGROUND)
        )
        messages.show(unique_id, text)
        return {"ui": {"text": [text]}, "result": (compiled,)}
