"""The end of a prompt that `bake` runs. Only the server that `bake` starts has this node."""

from __future__ import annotations

import json
from typing import Any

from . import inputs


class BakeEnd:
    """Says which graphs a MODEL, a VAE, a CONTROL_NET or a CLIP has got."""

    ID = "CG_BakeEnd"
    TITLE = "Bake End"
    CATEGORY = "compiled graphs"
    FUNCTION = "report"
    OUTPUT_NODE = True
    RETURN_TYPES = ()
    DESCRIPTION = "What python -m compiled_graphs bake ends its prompts with."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  ComfyUI's name
        return {
            "required": {
                "thing": (inputs.ANY, {"tooltip": "What has been compiled."}),
                "check": ("BOOLEAN", {"default": False, "tooltip": "Run each graph once on random weights."}),
            },
        }

    @classmethod
    def IS_CHANGED(cls, **inputs: Any) -> float:  # noqa: N802  ComfyUI's name
        """Say it each time."""
        return float("nan")

    def report(self, thing: Any, check: bool = False) -> dict[str, Any]:
        """Return the report as JSON, for whoever reads the history."""
        from ..compiler.hosts.comfy.baked import baked

        return {"ui": {"text": [json.dumps(baked(thing, check))]}}
