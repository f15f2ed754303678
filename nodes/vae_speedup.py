"""VAE Speedup: VAE in, a VAE with a compiled decoder out."""

from __future__ import annotations

from typing import Any

from ..compiler.backends import NAMES
from . import messages, settings, sockets


class VAESpeedup:
    """Put between a loader and VAE Decode. Other nodes may go on using the VAE as it was."""

    CATEGORY = "compiled graphs"
    FUNCTION = "compile"
    RETURN_TYPES = ("VAE",)
    OUTPUT_TOOLTIPS = ("A VAE of its own with compiled code, which shares the weights of the one that came in.",)
    DESCRIPTION = (
        "Compiles a VAE's decoder once per architecture and dtype: any image size, batch and tile from one graph, with "
        "the weights it is given. The VAE that came in is not changed."
    )
    SEARCH_ALIASES = ["compile vae", "torch compile vae", "fast decode", "onediff vae", "vae accelerate"]

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  ComfyUI's name
        return {
            "required": {"vae": ("VAE", {"tooltip": "The VAE to compile."})},
            "optional": {
                "encode": (
                    "BOOLEAN",
                    {"default": False, "tooltip": "Compile the encoder as well, for image to image and inpainting."},
                ),
                "backend": sockets.backend(),
                "verify": sockets.VERIFY,
            },
            "hidden": sockets.HIDDEN,
        }

    @classmethod
    def VALIDATE_INPUTS(cls, backend: str = NAMES[0]) -> bool | str:  # noqa: N802  ComfyUI's name
        return sockets.check_backend(backend)

    def compile(
        self,
        vae: Any,
        encode: bool = False,
        backend: str = NAMES[0],
        verify: bool = True,
        unique_id: str = "",
        prompt: dict | None = None,
        extra_pnginfo: dict | None = None,
    ) -> dict[str, Any]:
        """Return the VAE with compiled code, and the text the node shows."""
        from ..compiler.hosts.comfy.compile import compile_vae

        settings.apply()
        request = messages.request(backend, verify, unique_id, prompt, extra_pnginfo)
        compiled, text = compile_vae(vae, request, encode)
        messages.show(unique_id, text)
        return {"ui": {"text": [text]}, "result": (compiled,)}
