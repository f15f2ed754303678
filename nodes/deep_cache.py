"""DeepCache: MODEL in, a MODEL out that computes only its outer blocks in most steps."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from .node_text import NodeText

if TYPE_CHECKING:
    from ..compiler.hosts.comfy.deep_cache import Settings

STEPS = {
    name: ("INT", {"default": default, "min": least, "max": most, "tooltip": tooltip})
    for name, default, least, most, tooltip in (
        ("cache_interval", 3, 1, 1000, "One step in this many is computed whole. With 1, every step is."),
        (
            "cache_layer_id",
            0,
            0,
            12,
            "How deep the other steps go into the UNet. 0 is the outermost level only, and the fastest.",
        ),
        ("cache_block_id", 1, 0, 12, "Block in that level. Later ones compute more and differ less."),
        ("start_step", 0, 0, 1000, "Where in the schedule it begins, of 1000. All steps before are computed whole."),
        ("end_step", 1000, 0, 1000, "Where in the schedule it ends, of 1000. All steps after are computed whole."),
    )
}


class DeepCache:
    """Put before or after Compile Model. The image changes a little, and comes sooner."""

    ID = "CG_DeepCache"
    TITLE = "DeepCache"
    CATEGORY = "compiled graphs"
    FUNCTION = "cache"
    RETURN_TYPES = ("MODEL",)
    OUTPUT_TOOLTIPS = ("The model with shallow steps. LoRA nodes and Compile Model may follow.",)
    DESCRIPTION = (
        "On most steps, reuses what a UNet's deep blocks gave on an earlier step (SD1.5, SDXL, SVD). "
        "Unlike Compile Model it changes the image; the node shows by how much a step differs and what it saves."
    )
    SEARCH_ALIASES = ["deep cache", "feature cache", "step cache", "onediff", "speed up"]

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  ComfyUI's name
        model = ("MODEL", {"tooltip": "A model whose network is a UNet."})
        return {"required": {"model": model, **STEPS}, "hidden": {"unique_id": "UNIQUE_ID"}}

    def cache(self, model: Any, unique_id: str = "", **steps: int) -> dict[str, Any]:
        """Return the clone, and the text the node shows."""
        cached, text = with_deep_cache(model, settings(**steps), NodeText(unique_id))
        return {"ui": {"text": [text]}, "result": (cached,)}


def settings(
    cache_interval: int = 3, cache_layer_id: int = 0, cache_block_id: int = 1, start_step: int = 0, end_step: int = 1000
) -> Settings:
    """Return the settings that the widgets have."""
    from ..compiler.hosts.comfy.deep_cache import Settings

    return Settings(cache_interval, cache_layer_id, cache_block_id, start_step, end_step)


def with_deep_cache(model: Any, wanted: Settings, shown: NodeText) -> tuple[Any, str]:
    """Return a clone with shallow steps, and what its node shows. After each sampling it shows what that did."""
    from ..compiler.hosts.comfy.deep_cache import use_deep_cache

    tell = partial(shown.show, "deep_cache")
    cached, text = use_deep_cache(model, wanted, tell)
    return cached, tell(text)
