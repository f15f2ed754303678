"""ControlNet Speedup: CONTROL_NET in, the same CONTROL_NET with compiled blocks out."""

from __future__ import annotations

from typing import Any

from ..compiler.backends import NAMES
from . import messages, settings, sockets


class ControlNetSpeedup:
    """Put between a ControlNet loader and Apply ControlNet. Other nodes may go on using the ControlNet as it was."""

    CATEGORY = "compiled graphs"
    FUNCTION = "compile"
    RETURN_TYPES = ("CONTROL_NET",)
    OUTPUT_TOOLTIPS = ("A ControlNet with compiled blocks, which shares the weights of the one that came in.",)
    DESCRIPTION = (
        "Compiles the repeated blocks of a ControlNet once per architecture: any image size, batch and strength. T2I "
        "adapters, which run once per image, and Control-LoRAs pass through."
    )
    SEARCH_ALIASES = ["compile controlnet", "torch compile controlnet", "control speedup", "onediff controlnet"]

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  ComfyUI's name
        return {
            "required": {"control_net": ("CONTROL_NET", {"tooltip": "The ControlNet to compile."})},
            "optional": {"backend": sockets.backend(), "verify": sockets.VERIFY},
            "hidden": sockets.HIDDEN,
        }

    @classmethod
    def VALIDATE_INPUTS(cls, backend: str = NAMES[0]) -> bool | str:  # noqa: N802  ComfyUI's name
        return sockets.check_backend(backend)

    def compile(
        self,
        control_net: Any,
        backend: str = NAMES[0],
        verify: bool = True,
        unique_id: str = "",
        prompt: dict | None = None,
        extra_pnginfo: dict | None = None,
    ) -> dict[str, Any]:
        """Return the ControlNet with compiled blocks, and the text the node shows."""
        from ..compiler.hosts.comfy.compile import compile_control_net

        settings.apply()
        request = messages.request(backend, verify, unique_id, prompt, extra_pnginfo)
        compiled, text = compile_control_net(control_net, request)
        messages.show(unique_id, text)
        return {"ui": {"text": [text]}, "result": (compiled,)}
