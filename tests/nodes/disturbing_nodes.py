"""Nodes for test servers: they fail as other people's nodes do, or patch a model."""

from __future__ import annotations

import time
from pathlib import Path

import torch


class StopInStep:
    """Makes the n-th sampling step fail, by lack of memory or by another error."""

    CATEGORY = "tests"
    FUNCTION = "patch"
    RETURN_TYPES = ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls):
        required = {"model": ("MODEL",), "step": ("INT", {"default": 1}), "memory": ("BOOLEAN", {"default": True})}
        return {"required": required}

    def patch(self, model, step, memory):
        clone, calls = model.clone(), []

        def inside(h, skip, options):
            calls.append(options["block"])
            if calls.count(("output", 1)) > step:
                raise (
                    torch.cuda.OutOfMemoryError("Allocation failed") if memory else ZeroDivisionError("a node's fault")
                )
            return h, skip

        clone.set_model_output_block_patch(inside)
        return (clone,)


class HoldStep:
    """Makes each sampling step wait while a file exists."""

    CATEGORY = "tests"
    FUNCTION = "patch"
    RETURN_TYPES = ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "file": ("STRING", {"default": ""})}}

    def patch(self, model, file):
        clone = model.clone()

        def inside(h, skip, options):
            while Path(file).exists():
                time.sleep(0.01)
            return h, skip

        clone.set_model_output_block_patch(inside)
        return (clone,)


class ScaleAttention:
    """Patches the attention of every transformer."""

    CATEGORY = "tests"
    FUNCTION = "patch"
    RETURN_TYPES = ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "factor": ("FLOAT", {"default": 0.5})}}

    def patch(self, model, factor):
        clone = model.clone()
        clone.set_model_attn2_patch(lambda n, context, value, options: (n * factor, context, value))
        return (clone,)


class Fail:
    """Raises when it runs."""

    CATEGORY = "tests"
    FUNCTION = "fail"
    RETURN_TYPES = ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "number": ("INT", {"default": 0})}}

    def fail(self, model, number):
        raise RuntimeError("this node always fails")


NODE_CLASS_MAPPINGS = {"StopInStep": StopInStep, "HoldStep": HoldStep, "ScaleAttention": ScaleAttention, "Fail": Fail}
