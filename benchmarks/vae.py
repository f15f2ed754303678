"""VAE decoding, eager against compiled, at sizes the graphs have and have not seen.

    python benchmarks/vae.py --comfyui CHECKOUT [--dtype bfloat16] kl taesd

Both variants run in one process on the same weights, with a plain and a compiled `comfy.sd.VAE` decoding in turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import models
import step
import torch

SIZES = [(1, 128, 128), (1, 64, 64), (1, 64, 256), (1, 256, 64), (1, 192, 192), (4, 64, 64), (1, 91, 117)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("names", nargs="+", choices=("kl", "taesd"))
    options = parser.parse_args()
    models.use_comfyui(options.comfyui)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(f"torch {torch.__version__}, {device}, {options.dtype}")
    for name in options.names:
        measure(name, options)


@torch.inference_mode()
def measure(name: str, options: argparse.Namespace) -> None:
    """Print a table for one VAE."""
    from compiled_graphs.compiler.counters import totals
    from compiled_graphs.compiler.hosts import comfy as host
    from compiled_graphs.compiler.registry import Registry

    step.use_registry(host, Registry())
    plain = models.vae(name, getattr(torch, options.dtype))
    start = time.perf_counter()
    compiled, text = host.compile_vae(plain)
    print(f"\n{name}: {text}\n  node: {time.perf_counter() - start:.1f} s")
    print(f"  {'batch, latent':>14} {'eager ms':>9} {'ours ms':>8} {'ratio':>6} {'eager GiB':>9} {'ours GiB':>8} "
          f"{'first call s':>12} {'compiles':>8} {'relative error':>14}")  # fmt: skip
    for batch, height, width in SIZES:
        latent = torch.randn(batch, 4, height, width)
        before = totals.compiles
        reference = plain.decode(latent)
        start = time.perf_counter()
        compiled.decode(latent)
        first = time.perf_counter() - start
        error = ((compiled.decode(latent) - reference).norm() / reference.norm()).item()
        eager, eager_peak = timed(plain, latent, options.repeats)
        ours, peak = timed(compiled, latent, options.repeats)
        print(f"  {f'{batch}, {height}x{width}':>14} {eager:>9.1f} {ours:>8.1f} {eager / ours:>6.2f} "
              f"{eager_peak:>9.2f} {peak:>8.2f} {first:>12.2f} {totals.compiles - before:>8} "
              f"{error:>14.1e}")  # fmt: skip
    print(f"  eager calls: {dict(totals.eager_calls)}, retired: {totals.retired}")


def timed(vae, latent: torch.Tensor, repeats: int) -> tuple[float, float]:
    """Return the median milliseconds of the network's decoding, and its peak GiB over the weights."""
    vae.decode(latent)  # loads this VAE's patches
    network, data = vae.first_stage_model, latent.to(vae.vae_dtype).to(vae.device)
    times, peak = [], 0.0
    for _ in range(repeats):
        held = _allocated()
        step.sync()
        start = time.perf_counter()
        network.decode(data)
        step.sync()
        times.append((time.perf_counter() - start) * 1e3)
        peak = torch.cuda.max_memory_allocated() - held if torch.cuda.is_available() else 0
    return statistics.median(times), peak / 2**30


def _allocated() -> int:
    if not torch.cuda.is_available():
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


if __name__ == "__main__":
    main()
