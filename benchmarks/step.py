"""One denoising step, eager against compiled, at sizes the graphs have and have not seen.

    python benchmarks/step.py --comfyui CHECKOUT [--backend inductor] [--dtype float16] [--image-prompt] NAME ...

Both variants run in one process on the same weights; times are medians of pipelined calls. With --image-prompt each
cross-attention of a UNet is replaced by a patch, as IP-Adapter replaces it.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from pathlib import Path

import models
import torch

SIZES = {
    "sd15": [(2, 64, 64, 77), (2, 96, 96, 77), (2, 64, 64, 154), (1, 64, 64, 77), (8, 64, 64, 77)],
    "sdxl": [(2, 128, 128, 77), (2, 64, 256, 77), (4, 96, 96, 77), (1, 128, 128, 77), (2, 104, 152, 231)],
    "sd3": [(2, 128, 128, 154), (2, 64, 256, 154), (1, 128, 128, 77)],
    "flux": [(1, 128, 128, 256), (1, 64, 256, 512), (2, 96, 96, 256)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--image-prompt", action="store_true")
    parser.add_argument("names", nargs="+", choices=SIZES)
    options = parser.parse_args()
    models.use_comfyui(options.comfyui)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(f"torch {torch.__version__}, {device}, {options.dtype}, {options.backend}")
    for name in options.names:
        measure(name, options)
        gc.collect()
        torch.cuda.empty_cache()


def measure(name: str, options: argparse.Namespace) -> None:
    """Print a table for one architecture."""
    from compiled_graphs.compiler.counters import totals
    from compiled_graphs.compiler.hosts import comfy as host
    from compiled_graphs.compiler.registry import Registry
    from compiled_graphs.compiler.store import FolderStore

    patcher = models.patcher(name, getattr(torch, options.dtype))
    store = FolderStore(tempfile.mkdtemp())
    use_registry(host, Registry(store))
    start = time.perf_counter()
    compiled, text = host.compile_model(patcher, host.Request(options.backend))
    print(f"\n{name}: {text}\n  node: {time.perf_counter() - start:.1f} s,", end=" ")
    print(f"{sum(p.stat().st_size for p in store.folder.iterdir()) / 1e6:.1f} MB of graphs")
    use_registry(host, Registry(store))
    start = time.perf_counter()
    _, text = host.compile_model(patcher, host.Request(options.backend))
    print(f"  again, from the store: {time.perf_counter() - start:.1f} s: {text}")
    print(f"  {'batch, latent, tokens':>24} {'eager ms':>9} {'ours ms':>8} {'ratio':>6} {'first call s':>12} "
          f"{'compiles':>8} {'relative error':>14}")  # fmt: skip
    for batch, height, width, tokens in SIZES[name]:
        inputs = models.step_inputs(patcher.model, name, batch, height, width, tokens)
        inputs["transformer_options"] = image_prompt() if options.image_prompt else {}
        before = totals.compiles
        reference = call(patcher, inputs)
        sync()
        start = time.perf_counter()
        result = call(compiled, inputs)
        sync()
        first = time.perf_counter() - start
        error = ((result - reference).norm() / reference.norm()).item()
        eager, ours = timed(patcher, inputs, options.repeats), timed(compiled, inputs, options.repeats)
        size = f"{batch}, {height}x{width}, {tokens}"
        print(f"  {size:>24} {eager:>9.2f} {ours:>8.2f} {eager / ours:>6.2f} {first:>12.2f} "
              f"{totals.compiles - before:>8} {error:>14.1e}")  # fmt: skip
    print(f"  eager calls: {dict(totals.eager_calls)}, retired: {totals.retired}")


def use_registry(host, registry) -> None:
    """Give the host a registry of this run's own, as after a restart."""
    host.registry = lambda: registry


def call(patcher, inputs: dict) -> torch.Tensor:
    """One step, with the patcher's object patches in place."""
    model = patcher.patch_model(load_weights=False)
    try:
        with torch.inference_mode():
            return model.apply_model(**fresh(inputs))
    finally:
        patcher.unpatch_model(unpatch_weights=False)


def timed(patcher, inputs: dict, repeats: int) -> float:
    """Return the median milliseconds of a step, calls issued back to back."""
    model = patcher.patch_model(load_weights=False)
    try:
        with torch.inference_mode():
            rounds = []
            for _ in range(5):
                sync()
                start = time.perf_counter()
                for _ in range(repeats // 5):
                    model.apply_model(**fresh(inputs))
                sync()
                rounds.append((time.perf_counter() - start) / (repeats // 5) * 1e3)
            return statistics.median(rounds)
    finally:
        patcher.unpatch_model(unpatch_weights=False)


def fresh(inputs: dict) -> dict:
    """The model writes into the options it is given."""
    return {**inputs, "transformer_options": dict(inputs["transformer_options"])}


def image_prompt() -> dict:
    """Return options in which every block attends to the tokens of a picture beside those of the text."""
    from comfy.ldm.modules.attention import optimized_attention

    tokens: dict[int, torch.Tensor] = {}

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict) -> torch.Tensor:
        picture = tokens.setdefault(q.shape[-1], torch.randn(1, 4, q.shape[-1], dtype=q.dtype, device=q.device))
        picture, heads = picture.expand(len(q), -1, -1), options["n_heads"]
        return optimized_attention(q, k, v, heads) + 0.5 * optimized_attention(q, picture, picture, heads)

    blocks = [("middle", 0), *((place, number) for place in ("input", "output") for number in range(12))]
    return {"patches_replace": {"attn2": {(*block, index): attend for block in blocks for index in range(10)}}}


def sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
