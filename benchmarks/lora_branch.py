"""A LoRA on quantised weights: merged by ComfyUI against beside the weights (`lora_branch`), exactness and seconds.

    python benchmarks/lora_branch.py --comfyui CHECKOUT [--format float8_e4m3fn] [--rank 16] [--steps 20]

A Flux of a few blocks of full width, with random weights and a LoRA on all matrices of the blocks. Errors are relative
differences of what the first block and the last one return in the first step. *Unquantised* is the model in float32
with the LoRA. *Dequantised* holds the values of the quantised weights in float32, so a difference from it is what has
become of the LoRA alone, unless the GPU multiplies quantised weights with rounded inputs. Seconds are of a sampling
with the same LoRA as before, and of one with another strength.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import server
import step
import torch

FLUX = "flux6"


@torch.inference_mode()  # as ComfyUI runs nodes
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--format", default="float8_e4m3fn")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--depth", type=int, default=2, help="blocks of each kind")
    parser.add_argument("--width", type=int, default=3072)
    parser.add_argument("--side", type=int, default=128, help="of the latent")
    options = parser.parse_args()
    models.use_comfyui(options.comfyui)
    from compiled_graphs.compiler.common.counters import totals
    from compiled_graphs.compiler.compile_cache.graph_cache import GraphCache
    from compiled_graphs.compiler.hosts.comfy import compile as host
    from compiled_graphs.compiler.registry.registry import Registry
    from compiled_graphs.compiler.storage.store import FolderStore

    step.use_registry(Registry(GraphCache(FolderStore(tempfile.mkdtemp()))))
    print(f"torch {torch.__version__}, {step.device_name()}, {options.format}, rank {options.rank}, {options.backend}")
    state = weights(options)
    files = server.quantized(state, options.format)
    lora = patches(state, options.rank)
    rounded = {name: value(weight) for name, weight in load(files).model.diffusion_model.named_parameters()}
    expected = [outputs(with_lora(load(each), lora), options) for each in (in_float32(state), in_float32(rounded))]

    def compiled(low_rank: bool) -> Any:
        return host.compile_model(load(files), host.Request(options.backend, low_rank=low_rank))[0]

    ways: dict[str, Callable[[], Any]] = {
        "eager, merged": lambda: load(files),
        "compiled, merged": lambda: compiled(False),
        "compiled, beside": lambda: compiled(True),
    }
    for label, make in ways.items():
        model = make()
        found = outputs(with_lora(model, lora), options)
        errors = [[step.relative_error(a, b) for a, b in zip(found, each, strict=True)] for each in expected]
        seconds(with_lora(model, lora), options)
        same, before = seconds(with_lora(model, lora), options), totals.compiles
        changed = seconds(with_lora(model, lora, 0.5), options)
        print(
            f"  {label}: from unquantised {errors[0][0]:.2e}, {errors[0][1]:.2e}; "
            f"from dequantised {errors[1][0]:.2e}, {errors[1][1]:.2e}; "
            f"{same:.3f} s, another strength {changed:.3f} s and {totals.compiles - before} compiles"
        )


def weights(options: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Return random weights of a Flux, in bfloat16."""
    shape = {"depth": options.depth, "depth_single_blocks": options.depth}
    shape |= {"hidden_size": options.width, "num_heads": options.width // 128}
    models.CONFIGS[FLUX] = models.FLUX_DEV | shape
    network = models.patcher(FLUX, torch.bfloat16).model.diffusion_model
    return {name: weight.cpu().contiguous() for name, weight in network.state_dict().items()}


def load(state: dict[str, torch.Tensor]) -> Any:
    """Load weights as ComfyUI's loader does."""
    import comfy.sd

    return comfy.sd.load_diffusion_model_state_dict(dict(state))


def in_float32(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weight.float() for name, weight in state.items()}


def value(weight: torch.Tensor) -> torch.Tensor:
    """Return what a weight stands for."""
    return (weight.dequantize() if hasattr(weight, "_qdata") else weight).detach().cpu()


def patches(state: dict[str, torch.Tensor], rank: int) -> dict[str, Any]:
    """Return a LoRA on the matrices of all blocks, as ComfyUI's loader makes it, a tenth as large as the weights."""
    import comfy.lora

    file, names, generator = {}, {}, torch.Generator().manual_seed(0)
    for name, weight in state.items():
        if weight.ndim == 2 and "_blocks." in name:
            key = f"diffusion_model.{name}"
            names[key] = key
            scale = (0.1 * weight.float().std() / rank**0.5) ** 0.5
            file[f"{key}.lora_up.weight"] = torch.randn(weight.shape[0], rank, generator=generator) * scale
            file[f"{key}.lora_down.weight"] = torch.randn(rank, weight.shape[1], generator=generator) * scale
    return comfy.lora.load_lora(file, names)


def with_lora(model: Any, lora: dict[str, Any], strength: float = 1.0) -> Any:
    clone = model.clone()
    clone.add_patches(lora, strength)
    return clone


def outputs(model: Any, options: argparse.Namespace) -> list[torch.Tensor]:
    """Return what the first block and the last one return in the first step."""
    sample(model, options, 1)  # a graph's first call returns eager's result
    network, kept = model.model.diffusion_model, {}
    blocks = network.double_blocks[0], network.single_blocks[-1]

    def keep(place: int) -> Callable:
        return lambda block, arguments, result: kept.update({place: first(result).float().cpu()})

    handles = [block.register_forward_hook(keep(place)) for place, block in enumerate(blocks)]
    try:
        sample(model, options, 1)
    finally:
        for handle in handles:
            handle.remove()
    return [kept[place] for place in range(len(blocks))]


def first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple | list) else result


def seconds(model: Any, options: argparse.Namespace) -> float:
    step.sync()
    start = time.perf_counter()
    sample(model, options, options.steps)
    step.sync()
    return time.perf_counter() - start


def sample(model: Any, options: argparse.Namespace, steps: int) -> torch.Tensor:
    import comfy.sample

    text, pooled = (torch.randn(1, *s, generator=torch.Generator().manual_seed(1)) for s in ((256, 4096), (768,)))
    latent = torch.zeros(1, 16, options.side, options.side)
    conditioning = [[text, {"pooled_output": pooled, "guidance": 3.5}]]
    noise = comfy.sample.prepare_noise(latent, 1)
    arguments = (model, noise, steps, 1.0, "euler", "simple", conditioning, conditioning, latent)
    return comfy.sample.sample(*arguments, disable_pbar=True, seed=1)


if __name__ == "__main__":
    main()
