"""Changing the strength of a LoRA: until the first step is done, eager against compiled.

    python benchmarks/lora.py --comfyui CHECKOUT [--backend inductor] [--dtype float16] [--rank 32] NAME

Both run in one process in turn, by ComfyUI's own loader, as a queue that changes the LoRA's strength does. The
LoRA covers all linear layers.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import models
import step
import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--swaps", type=int, default=10)
    parser.add_argument("name", choices=step.SIZES)
    options = parser.parse_args()
    models.use_comfyui(options.comfyui)
    from compiled_graphs.compiler.common.counters import totals
    from compiled_graphs.compiler.compile_cache.graph_cache import GraphCache
    from compiled_graphs.compiler.hosts.comfy import compile as host
    from compiled_graphs.compiler.registry.registry import Registry
    from compiled_graphs.compiler.storage.store import FolderStore

    step.use_registry(Registry(GraphCache(FolderStore(tempfile.mkdtemp()))))
    patcher = models.patcher(options.name, getattr(torch, options.dtype))
    compiled, text = host.compile_model(patcher, host.Request(options.backend))
    print(f"torch {torch.__version__}, {step.device_name()}, {options.name}, {options.dtype}: {text}")
    patches = lora(patcher, options.rank)
    inputs = step.sized(options.name, step.SIZES[options.name][0], patcher)
    variants = {"eager": patcher, "compiled": compiled}
    seconds: dict[str, list[float]] = {label: [] for label in variants}
    for number in range(options.swaps + 2):  # the first two compile, check and fill caches
        if number == 2:
            before = totals.compiles
        results = []
        for label, variant in variants.items():
            taken, result = swap(variant, patches, 0.1 + 0.05 * number, inputs)
            results.append(result)
            if number >= 2:
                seconds[label].append(taken)
        print(f"  swap {number}: error {step.relative_error(*reversed(results)):.1e}")
    medians = {label: statistics.median(values) for label, values in seconds.items()}
    print(f"  seconds to the end of the first step: {medians}, ratio {medians['compiled'] / medians['eager']:.3f}")
    print(f"  {len(patches)} weights, {totals.compiles - before} compiles")


def lora(patcher, rank: int) -> dict:
    """Return patches as ComfyUI's LoRA loader makes them."""
    import comfy.lora

    file, names = {}, {}
    for key, weight in patcher.model.state_dict().items():
        if weight.ndim == 2 and key.startswith("diffusion_model.") and key.endswith(".weight"):
            names[key] = key
            file[f"{key}.lora_up.weight"] = 0.02 * torch.randn(weight.shape[0], rank)
            file[f"{key}.lora_down.weight"] = 0.02 * torch.randn(rank, weight.shape[1])
            file[f"{key}.alpha"] = torch.tensor(float(rank))
    return comfy.lora.load_lora(file, names)


def swap(patcher, patches: dict, strength: float, inputs: dict) -> tuple[float, torch.Tensor]:
    """Return the seconds that a LoRA at a strength takes until a step is done, and the step's result."""
    import comfy.model_management

    step.sync()
    start = time.perf_counter()
    clone = patcher.clone()
    clone.add_patches(patches, strength)
    comfy.model_management.load_models_gpu([clone])
    clone.pre_run()
    with torch.inference_mode():
        result = clone.model.apply_model(**step.fresh(inputs))
    step.sync()
    seconds = time.perf_counter() - start
    clone.cleanup()
    return seconds, result


if __name__ == "__main__":
    main()
