"""Inputs that several nodes have."""

from __future__ import annotations

from typing import Any

import torch

from ..compiler.backends import BACKENDS, NAMES
from ..compiler.backends.oneflow import onediff_text
from ..compiler.common.words import join, say, translations

HIDDEN = {"unique_id": "UNIQUE_ID", "prompt": "PROMPT", "extra_pnginfo": "EXTRA_PNGINFO"}

VERIFY = (
    "BOOLEAN",
    {
        "default": True,
        "tooltip": "Compare each graph with the uncompiled block on its first call; one that differs is not used. "
        "Costs one uncompiled call per graph.",
    },
)

BEFORE, IN_BACKGROUND = "before sampling", "in background"
WHEN = (
    [BEFORE, IN_BACKGROUND],
    {
        "default": BEFORE,
        "tooltip": "before sampling: the node compiles what is missing and shows how far it is. in background: "
        "sampling begins at once, and each block becomes fast when its graph is ready.",
    },
)

CUDA_GRAPHS = (
    "BOOLEAN",
    {
        "default": True,
        "tooltip": "On NVIDIA GPUs, record a step once per image size and replay it. This helps most if the CPU is "
        "slow. LoRAs and ControlNets may take part. Where another node patches the model, or the weights do not fit on "
        "the GPU, steps run without it. Needs the memory of a step while sampling.",
    },
)

LORA_BRANCH = (
    "BOOLEAN",
    {
        "default": False,
        "tooltip": "For quantised models (float8, int8, GGUF ...): compute LoRAs beside the weights instead of merging "
        "them. The image is closer to that of the unquantised model with the LoRA. Other kinds of adapter are merged "
        "as always.",
    },
)


class _Any(str):
    """A socket type that accepts every other: ComfyUI compares types by `!=`."""

    def __ne__(self, other: object) -> bool:
        return False


ANY = _Any("*")


def backend() -> tuple[list[str], dict[str, Any]]:
    """Return the choice of backends. The tooltip says what each is, and why some cannot run here.

    It depends on the machine, so its translations go with it and `web/node_types.js` shows them.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines = [
        say(
            "auto: inductor. inductor_fp8: large linear layers multiply in float8, faster for Flux and less exact. "
            "oneflow: for NVIDIA GPUs of the Ampere generation and older. eager: the traced blocks without a "
            "compiler, to see whether tracing or compiling is at fault."
        )
    ]
    reasons = {name: backend.available(device) for name, backend in BACKENDS.items()}
    lines += [say("{name}: {text}", name=name, text=reason) for name, reason in reasons.items() if reason]
    if reasons["oneflow"] is None and (text := onediff_text()):
        lines.append(text)
    tooltip = join(lines)
    return NAMES, {"default": NAMES[0], "tooltip": str(tooltip), "translations": translations(tooltip)}


def check_backend(name: str) -> bool | str:
    """Answer ComfyUI's question whether there is such a backend: True, or a sentence that says what there is."""
    return name in NAMES or f"There is no backend named '{name}'; choose one of {', '.join(NAMES)}."
