"""VAE Speedup: VAE in, a VAE with a compiled decoder out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .compile_node import CompileNode

if TYPE_CHECKING:
    from ..compiler.hosts.comfy.request import Request


class VAESpeedup(CompileNode):
    """Put between a loader and VAE Decode. Other nodes may go on using the VAE as it was."""

    ID = "CG_VAESpeedup"
    TITLE = "VAE Speedup"
    CATEGORY = "compiled graphs"
    SOCKET = ("vae", "The VAE to compile.")
    WIDGETS_BEFORE = {
        "encode": (
            "BOOLEAN",
            {"default": False, "tooltip": "Compile the encoder as well, for image to image and inpainting."},
        )
    }
    RETURN_TYPES = ("VAE",)
    OUTPUT_TOOLTIPS = ("A VAE of its own with compiled code, which shares the weights of the one that came in.",)
    DESCRIPTION = (
        "Compiles a VAE's decoder once per architecture and dtype: any image size, batch and tile from one graph, with "
        "the weights it is given. The VAE that came in is not changed."
    )
    SEARCH_ALIASES = ["compile vae", "torch compile vae", "fast decode", "onediff vae", "vae accelerate"]

    def compile_with(self, request: Request, vae: Any, encode: bool = False) -> tuple[Any, str]:
        """Return a VAE with compiled code, and what to tell the person."""
        from ..compiler.hosts.comfy.compile import compile_vae

        return compile_vae(vae, request, encode)
