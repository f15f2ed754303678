"""Where the blocks of video VAEs keep frames between the chunks of a video.

Those of Wan, Qwen-Image and Anima are given a list and a cursor. Those of HunyuanVideo 1.5 are given a list to take
from and a list to put to. Those of SeedVR2 are given a dictionary. Those of LTX keep them in their modules.
"""

from __future__ import annotations

from functools import lru_cache

from torch import nn

from ....common.host import FrameCache, FrameCarry, FrameKeeping, FrameMemory
from ....identity.call_signature import forward_signature
from ....identity.regions import find_regions

CELLS = "temporal_cache_state"
"""The attribute of `comfy.ldm.lightricks.vae.causal_conv3d.CausalConv3d` and others."""
_CACHE = FrameCache(entries="feat_cache", cursor="feat_idx")
_CARRY = FrameCarry(given="conv_carry_in", left="conv_carry_out")
"""Arguments of `comfy.ldm.modules.diffusionmodules.model.conv_carry_causal_3d` and of its callers."""
_MEMORY = FrameMemory(entries="memory_cache")
"""The argument of `comfy.ldm.seedvr.vae.InflatedCausalConv3d` and of its callers."""


@lru_cache(maxsize=256)
def frame_cache(cls: type) -> FrameKeeping | None:
    """Return the names of the arguments for blocks that take them, whosever they are."""
    try:
        taken = forward_signature(cls).parameters
    except (AttributeError, TypeError, ValueError):  # a module that TorchScript has made
        return None
    if _CARRY.given in taken and _CARRY.left in taken:
        return _CARRY
    if _MEMORY.entries in taken and "memory_state" in taken:
        return _MEMORY
    return _CACHE if _CACHE.entries in taken and _CACHE.cursor in taken else None


def keeps_frames(network: nn.Module) -> bool:
    """Whether a network has blocks that keep frames: it then cuts a video into chunks of fixed lengths."""
    return any(frame_cache(type(module)) is _CACHE for module in network.modules())


def remembers_frames(network: nn.Module) -> bool:
    """Whether regions of a network keep frames in a dictionary."""
    return _has_regions_with(_MEMORY, network)


def hands_frames_on(network: nn.Module) -> bool:
    """Whether regions of a network hand frames on. In older VAEs such blocks are parts of one region."""
    return _has_regions_with(_CARRY, network)


def _has_regions_with(keeping: FrameKeeping, network: nn.Module) -> bool:
    return any(frame_cache(type(region.module)) is keeping for region in find_regions(network))
