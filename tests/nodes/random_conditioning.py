"""A node for test servers: conditioning without a text encoder, which at SDXL's width would take gigabytes."""

from __future__ import annotations

import torch


class RandomConditioning:
    CATEGORY = "tests"
    FUNCTION = "make"
    RETURN_TYPES = ("CONDITIONING",)

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"width": ("INT", {"default": 2048}), "seed": ("INT", {"default": 0})}}

    def make(self, width, seed):
        generator = torch.Generator().manual_seed(seed)
        text = torch.randn(1, 77, width, generator=generator)
        return ([[text, {"pooled_output": torch.randn(1, 1280, generator=generator)}]],)


NODE_CLASS_MAPPINGS = {"RandomConditioning": RandomConditioning}
