"""ControlNet Speedup: CONTROL_NET in, the same CONTROL_NET with compiled blocks out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .compile_node import CompileNode

if TYPE_CHECKING:
    from ..compiler.hosts.comfy.request import Request


class ControlNetSpeedup(CompileNode):
    """Put between a ControlNet loader and Apply ControlNet. Other nodes may go on using the ControlNet as it was."""

    ID = "CG_ControlNetSpeedup"
    TITLE = "ControlNet Speedup"
    CATEGORY = "compiled graphs"
    SOCKET = ("control_net", "The ControlNet to compile.")
    RETURN_TYPES = ("CONTROL_NET",)
    OUTPUT_TOOLTIPS = ("A ControlNet with compiled blocks, which shares the weights of the one that came in.",)
    DESCRIPTION = (
        "Compiles the repeated blocks of a ControlNet once per architecture: any image size, batch and strength. T2I "
        "adapters, which run once per image, and Control-LoRAs pass through."
    )
    SEARCH_ALIASES = ["compile controlnet", "torch compile controlnet", "control speedup", "onediff controlnet"]

    def compile_with(self, request: Request, control_net: Any) -> tuple[Any, str]:
        """Return the ControlNet with compiled blocks, and what to tell the person."""
        from ..compiler.hosts.comfy.compile import compile_control_net

        return compile_control_net(control_net, request)
