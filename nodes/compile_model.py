"""Compile Model: MODEL in, the same MODEL with compiled blocks out."""

from __future__ import annotations

from typing import Any

import torch

from ..compiler.backends import BACKENDS, NAMES
from . import messages


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
                "backend": (NAMES, {"default": NAMES[0], "tooltip": _backend_tooltip()}),
                "verify": (
                    "BOOLEAN",
                    {
                        "default": True,
                        "tooltip": "Compare each graph with the uncompiled block on its first call; one that differs "
                        "is not used. Costs one uncompiled call per graph.",
                    },
                ),
            },
            "hidden": {"unique_id": "UNIQUE_ID", "prompt": "PROMPT", "extra_pnginfo": "EXTRA_PNGINFO"},
        }

    @classmethod
    def VALIDATE_INPUTS(cls, verify: bool = True) -> bool:  # noqa: N802  ComfyUI's name
        """ComfyUI asks when a prompt is queued; imports can then go on while it loads the checkpoint."""
        from ..compiler.hosts.comfy import warm_up

        warm_up()
        return True

    def compile(
        self,
        model: Any,
        backend: str = NAMES[0],
        verify: bool = True,
        unique_id: str = "",
        prompt: dict | None = None,
        extra_pnginfo: dict | None = None,
    ) -> dict[str, Any]:
        """Return the compiled clone, and the text the node shows."""
        from ..compiler.hosts.comfy import Request, compile_model

        request = Request(
            backend,
            verify,
            str(unique_id),
            messages.running_workflow(prompt, extra_pnginfo),
            on_change=lambda changed: messages.show(unique_id, changed),
        )
        compiled, text = compile_model(model, request)
        messages.show(unique_id, text)
        return {"ui": {"text": [text]}, "result": (compiled,)}


def _backend_tooltip() -> str:
    """Say what each backend is, and of those that cannot run here why."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines = [
        "auto: inductor. eager: the traced blocks without a compiler, to see whether tracing or compiling is at fault."
    ]
    reasons = {name: backend.available(device) for name, backend in BACKENDS.items()}
    return "\n".join(lines + [f"{name}: {reason}" for name, reason in reasons.items() if reason])
