"""Where the blocks of video VAEs keep frames between the chunks of a video.

Those of Wan, Qwen-Image and Anima are given a list and a cursor. Those of LTX keep them in their modules.
"""

from __future__ import annotations

from functools import lru_cache

from torch import nn

from ....common.host import FrameCache
from ....identity.call_signature import forward_signature

CELLS = "temporal_cache_state"
"""The attribute of `comfy.ldm.lightricks.vae.causal_conv3d.CausalConv3d` and others."""
_CACHE = FrameCache(entries="feat_cache", cursor="feat_idx")


@lru_cache(maxsize=256)
def frame_cache(cls: type) -> FrameCache | None:
    """Return the names of the arguments for blocks that take them, whosever they are."""
    try:
        taken = forward_signature(cls).parameters
    except (TypeError, ValueError):  # a module that TorchScript has made
        return None
    return _CACHE if _CACHE.entries in taken and _CACHE.cursor in taken else None


def keeps_frames(network: nn.Module) -> bool:
    """Whether a network has blocks that keep frames: it then cuts a video into chunks of fixed lengths."""
    return any(frame_cache(type(module)) for module in network.modules())
