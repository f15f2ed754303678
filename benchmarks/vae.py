"""VAE decoding: eager, compiled by us, and compiled whole by torch for each size, at several sizes.

    python benchmarks/vae.py --comfyui CHECKOUT [--dtype bfloat16] [--static] [--decodes 100] kl taesd wan ltx2 ...

All variants run in one process on the same weights: a plain and a compiled `comfy.sd.VAE` decode in turn. For
videos, a size begins with the latent's frames instead of a batch. Errors are those of the decoder's own output: images
are cut off at black and white.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import models
import step
import torch

SIZES = [(1, 128, 128), (1, 64, 64), (1, 64, 256), (1, 256, 64), (1, 192, 192), (4, 64, 64), (1, 91, 117)]
VIDEOS = {
    "wan": [(21, 60, 104), (9, 60, 104), (1, 128, 128), (5, 90, 160)],  # 81 frames of 832x480, 33, an image, 720p
    "ltx2": [(16, 22, 38), (8, 22, 38), (31, 16, 24), (16, 34, 60)],  # 121 frames of 1216x704, 57, 241, 1080p
    "hunyuan": [(9, 60, 104), (5, 60, 104), (5, 90, 160)],  # 33 frames of 832x480, 17, 17 of 720p
    "hunyuan15": [(21, 30, 53), (9, 30, 53), (5, 45, 80)],  # 81 frames of 848x480, 33, 17 of 720p
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--static", action="store_true", help="also torch.compile(dynamic=False), at each size anew")
    parser.add_argument("--decodes", type=int, default=0, help="decode this many random sizes and watch memory")
    parser.add_argument("--sizes", type=sizes, help="batch or frames, height and width: 1x128x128,9x60x104")
    parser.add_argument("names", nargs="+", choices=models.VAES)
    options = parser.parse_args()
    models.use_comfyui(options.comfyui)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(f"torch {torch.__version__}, {device}, {options.dtype}")
    for name in options.names:
        measure(name, options)


@torch.inference_mode()
def measure(name: str, options: argparse.Namespace) -> None:
    """Print a table for one VAE."""
    from compiled_graphs.compiler.common.counters import totals
    from compiled_graphs.compiler.compile_cache.graph_cache import GraphCache
    from compiled_graphs.compiler.compile_cache.worker_pool import Workers
    from compiled_graphs.compiler.hosts.comfy import compile as host
    from compiled_graphs.compiler.hosts.comfy import worker_setup
    from compiled_graphs.compiler.hosts.comfy.rules.host import HOST
    from compiled_graphs.compiler.registry.registry import Registry

    step.use_registry(Registry(GraphCache(workers=Workers(worker_setup.setup, HOST))))
    plain = models.vae(name, getattr(torch, options.dtype))
    start = time.perf_counter()
    compiled, text = host.compile_vae(plain, host.Request("inductor"))
    print(f"\n{name}: {text}\n  node: {time.perf_counter() - start:.1f} s")
    print("  batch, latent |    eager ms, GiB |     ours ms, GiB, first call s, error |   static ms, GiB, first call s"
          " | eager / ours, static / ours | compiles")  # fmt: skip
    for size in options.sizes or VIDEOS.get(name, SIZES):
        latent = latent_of(plain, name, size)
        before = totals.compiles
        plain.decode(latent)  # loads this VAE's patches
        reference = output(plain, latent)
        start = time.perf_counter()
        compiled.decode(latent)
        first = time.perf_counter() - start
        error = ((output(compiled, latent) - reference).norm() / reference.norm()).item()
        del reference
        eager, eager_peak = timed(plain, latent, options.repeats)
        ours, peak = timed(compiled, latent, options.repeats)
        static, static_peak, static_first = (
            static_compile(plain, latent, options) if options.static else [float("nan")] * 3
        )
        print(f"  {'x'.join(map(str, size)):>13} | {eager:>8.1f} {eager_peak:>8.2f} | {ours:>8.1f} {peak:>8.2f} "
              f"{first:>8.2f} {error:>8.1e} | {static:>8.1f} {static_peak:>8.2f} {static_first:>8.1f} | "
              f"{eager / ours:>6.2f} {static / ours:>6.2f} | {totals.compiles - before}")  # fmt: skip
    if options.decodes and name not in models.VIDEO_VAES:
        watch_memory(plain, compiled, options.decodes)
    print(f"  eager calls: {dict(totals.eager_calls)}, retired: {totals.retired}")


def sizes(text: str) -> list[tuple[int, int, int]]:
    """Read the argument `--sizes`."""
    return [tuple(map(int, size.split("x"))) for size in text.split(",")]


def latent_of(vae, name: str, size: tuple[int, int, int]) -> torch.Tensor:
    """Return a random latent of a size."""
    number, *area = size
    shape = (1, vae.latent_channels, number) if name in models.VIDEO_VAES else (number, vae.latent_channels)
    return torch.randn(*shape, *area)


def output(vae, latent: torch.Tensor) -> torch.Tensor:
    """Return what the decoder itself returns. LTX's draws noise first: the same each time."""
    torch.manual_seed(0)
    return vae.first_stage_model.decode(latent.to(vae.vae_dtype).to(vae.device)).float()


def static_compile(vae, latent: torch.Tensor, options: argparse.Namespace) -> tuple[float, float, float]:
    """Return median milliseconds, peak GiB and first-call seconds of torch.compile made for one size."""
    torch._dynamo.reset()
    vae.decode(latent)  # loads this VAE's patches
    decode = torch.compile(vae.first_stage_model.decode, dynamic=False)
    data = latent.to(vae.vae_dtype).to(vae.device)
    start = time.perf_counter()
    decode(data)
    step.sync()
    first = time.perf_counter() - start
    return *timed_calls(lambda: decode(data), options.repeats), first


def watch_memory(plain, compiled, decodes: int) -> None:
    """Decode random sizes, eager and then compiled, and print what the allocator holds after some of them."""
    for label, vae in (("eager", plain), ("ours", compiled)):
        sizes = random.Random(0)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = []
        for _ in range(decodes):
            latent = torch.randn(sizes.randint(1, 4), 4, sizes.randint(16, 160), sizes.randint(16, 160))
            vae.decode(latent)
            step.sync()
            held.append(torch.cuda.memory_allocated() / 2**30)
        peak, reserved = torch.cuda.max_memory_allocated() / 2**30, torch.cuda.memory_reserved() / 2**30
        print(f"  {decodes} random sizes, {label}: held {held[9]:.3f} GiB after 10, {held[-1]:.3f} at the end, "
              f"peak {peak:.2f}, reserved {reserved:.2f}")  # fmt: skip


def timed(vae, latent: torch.Tensor, repeats: int) -> tuple[float, float]:
    """Return the median milliseconds of the network's decoding, and its peak GiB over the weights."""
    vae.decode(latent)  # loads this VAE's patches
    data = latent.to(vae.vae_dtype).to(vae.device)
    return timed_calls(lambda: vae.first_stage_model.decode(data), repeats)


def timed_calls(call: Callable[[], torch.Tensor], repeats: int) -> tuple[float, float]:
    """Return the median milliseconds of a call and its peak GiB over what was held before."""
    times, peak = [], 0.0
    for _ in range(repeats):
        held = _allocated()
        step.sync()
        start = time.perf_counter()
        call()
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
