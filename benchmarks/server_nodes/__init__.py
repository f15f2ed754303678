"""Nodes for `benchmarks/server.py`: conditioning without a text encoder, and a latent that is kept to be compared."""

import json
import time

import torch


class BenchConditioning:
    """Random numbers in the form of a text encoder's result. `entries` is what else it holds, as JSON."""

    @classmethod
    def INPUT_TYPES(cls):
        whole = ("INT", {"default": 0, "max": 1 << 20})
        numbers = {"tokens": whole, "width": whole, "pooled": whole, "seed": whole}
        return {"required": {**numbers, "has_mask": ("BOOLEAN", {}), "entries": ("STRING", {})}}

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "make"
    CATEGORY = "benchmarks"

    def make(self, tokens, width, pooled, seed, has_mask, entries):
        generator = torch.Generator().manual_seed(seed)
        text = torch.randn(1, tokens, width, generator=generator)
        found = {"pooled_output": torch.randn(1, pooled, generator=generator) if pooled else None}
        if has_mask:
            found["attention_mask"] = torch.ones(1, tokens, dtype=torch.long)
        return ([[text, found | json.loads(entries)]],)


class BenchLatent:
    """A random latent. `shape` is a list of numbers, as JSON."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"shape": ("STRING", {}), "seed": ("INT", {"default": 0, "max": 1 << 20})}}

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "make"
    CATEGORY = "benchmarks"

    def make(self, shape, seed):
        generator = torch.Generator().manual_seed(seed)
        return ({"samples": torch.randn(*json.loads(shape), generator=generator)},)


class BenchSound:
    """The empty latent of a sound to LTX-2's video. Core's node for it wants a VAE; 25 columns are a second."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"length": ("INT", {"default": 0, "max": 1 << 20})}}

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "make"
    CATEGORY = "benchmarks"

    def make(self, length):
        return ({"samples": torch.zeros(1, 8, length, 16), "type": "audio"},)


class BenchAttention:
    """Has a model use another of ComfyUI's attention functions, as KJNodes' SageAttention node does."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "name": ("STRING", {"default": "pytorch"})}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "choose"
    CATEGORY = "benchmarks"

    def choose(self, model, name):
        from comfy.ldm.modules.attention import get_attention_function

        chosen, clone = get_attention_function(name), model.clone()
        options = clone.model_options["transformer_options"]
        options["optimized_attention_override"] = lambda _, *args, **kwargs: chosen(*args, **kwargs)
        return (clone,)


class BenchKeep:
    """Writes a latent or an image to a file, and says when it arrived and how much of the GPU's memory is in use."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"path": ("STRING", {})}, "optional": {"latent": ("LATENT",), "image": ("IMAGE",)}}

    RETURN_TYPES = ()
    OUTPUT_NODE = True
    FUNCTION = "keep"
    CATEGORY = "benchmarks"

    def keep(self, path, latent=None, image=None):
        kept = (latent["samples"] if image is None else image).float().cpu()
        at = time.time()
        torch.save(kept, path)
        used = reserved = 0
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            used, reserved = (total - free) / 2**30, torch.cuda.memory_reserved() / 2**30
        pages, finite = _pages(), bool(kept.isfinite().all())
        counts = {"pinned": sum(bool(flags & 2) for flags in pages), "resident": sum(flags & 1 for flags in pages) / 32}
        return {"ui": {"bench": [{"at": at, "used": used, "reserved": reserved, "finite": finite, **counts}]}}


def _pages():
    """Return the flags of all pages (32 MiB each) of streamed weights: 1 if in the GPU's memory, 2 if pinned."""
    import comfy.model_management

    models = [loaded.model.model for loaded in comfy.model_management.current_loaded_models if loaded.model is not None]
    ranges = [vbar for model in models for vbar in getattr(model, "dynamic_vbars", {}).values()]
    return [flags for vbar in ranges for flags in vbar.get_residency()]


_NODES = (BenchConditioning, BenchLatent, BenchSound, BenchAttention, BenchKeep)
NODE_CLASS_MAPPINGS = {cls.__name__: cls for cls in _NODES}
