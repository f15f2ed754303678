"""One denoising step, eager against compiled, at sizes the graphs have and have not seen.

    python benchmarks/step.py --comfyui CHECKOUT [--backend inductor] [--dtype float16] [--image-prompt]
                              [--peers static blocks ...] [--json FILE] NAME ...

All variants run in one process on the same weights; times are medians of pipelined calls. *called* goes through
Python, *recorded* is replayed as a CUDA graph. Peers: the network in channels_last, the whole of it by torch.compile
with static sizes (without and with CUDA graphs, at the first size only), each block by torch.compile with dynamic
ones. The floor is the step's counted operations at the rate of a large matrix product. With --image-prompt each
cross-attention of a UNet is replaced by a patch, as IP-Adapter replaces it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import models
import torch

SIZES = {
    "sd15": [(2, 64, 64, 77), (2, 96, 96, 77), (2, 64, 64, 154), (1, 64, 64, 77), (8, 64, 64, 77)],
    "sdxl": [(2, 128, 128, 77), (2, 64, 256, 77), (4, 96, 96, 77), (1, 128, 128, 77), (2, 104, 152, 231)],
    "sd3": [(2, 128, 128, 154), (2, 64, 256, 154), (1, 128, 128, 77)],
    "flux": [(1, 128, 128, 256), (1, 64, 256, 512), (2, 96, 96, 256)],
}


SAMPLING = {"sample_sigmas": torch.linspace(14, 0, 21)}
"""What ComfyUI says of the sampling that a step belongs to: 20 steps."""
PEERS = ("channels_last", "static", "static-cuda-graphs", "blocks")


@dataclass(frozen=True, eq=False)
class Timing:
    """What a variant's steps took."""

    ms: float
    first: float
    peak: float
    result: torch.Tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--head-start", type=float, default=20, help="seconds that worker processes have to begin")
    parser.add_argument("--sizes", type=int, default=None, help="only the first so many")
    parser.add_argument("--image-prompt", action="store_true")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=[])
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    parser.add_argument("names", nargs="+", choices=SIZES)
    options = parser.parse_args()
    models.use_comfyui(options.comfyui)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(f"torch {torch.__version__}, {device}, {options.dtype}, {options.backend}")
    for name in options.names:
        rows = measure(name, options)
        if options.json:
            write_rows(options.json, rows)
        gc.collect()
        torch.cuda.empty_cache()


def write_rows(path: Path, rows: list[dict]) -> None:
    """Append rows as JSON lines; of timings, the milliseconds."""
    with path.open("a") as file:
        for row in rows:
            values = {name: value.ms if isinstance(value, Timing) else value for name, value in row.items()}
            file.write(json.dumps(values) + "\n")


def measure(name: str, options: argparse.Namespace) -> list[dict]:
    """Print a table for one architecture, and return its rows."""
    from compiled_graphs.compiler.counters import totals
    from compiled_graphs.compiler.hosts import comfy as host
    from compiled_graphs.compiler.hosts import comfy_worker
    from compiled_graphs.compiler.registry import Registry
    from compiled_graphs.compiler.store import FolderStore
    from compiled_graphs.compiler.workers import Workers

    patcher = models.patcher(name, getattr(torch, options.dtype))
    store = FolderStore(tempfile.mkdtemp())
    workers = Workers(comfy_worker.setup, host.HOST)
    use_registry(host, Registry(store, workers=workers))
    workers.start("inductor" if options.backend == "auto" else options.backend, patcher.load_device)
    time.sleep(options.head_start)  # as while a checkpoint loads
    start = time.perf_counter()
    compiled, text = host.compile_model(patcher, host.Request(options.backend))
    seconds = time.perf_counter() - start
    workers.stop()
    print(f"\n{name}: {text}\n  node: {seconds:.1f} s,", end=" ")
    print(f"{sum(p.stat().st_size for p in store.folder.iterdir()) / 1e6:.1f} MB of graphs")
    use_registry(host, Registry(store))
    start = time.perf_counter()
    called, text = host.compile_model(patcher, host.Request(options.backend, record=False))
    print(f"  again, from the store: {time.perf_counter() - start:.1f} s: {text}")
    rows = []
    for size in SIZES[name][: options.sizes]:
        torch.manual_seed(0)
        inputs = models.step_inputs(patcher.model, name, *size)
        inputs["transformer_options"] = (image_prompt() if options.image_prompt else {}) | SAMPLING
        variants = {"eager": patcher, "called": called, "recorded": compiled}
        before = totals.compiles
        times = {label: timed(model, inputs, options.repeats) for label, model in variants.items()}
        rows.append({"model": name, "size": size, "compiles": totals.compiles - before, "compile_s": seconds, **times})
        rows[-1]["floor"] = floor(patcher, inputs, getattr(torch, options.dtype)) if torch.cuda.is_available() else None
    for label in options.peers:
        for row in rows[: 1 if label.startswith("static") else None]:
            torch.manual_seed(0)
            inputs = models.step_inputs(patcher.model, name, *row["size"])
            inputs["transformer_options"] = dict(SAMPLING)
            row[label], row[f"{label}_compile_s"] = measure_peer(label, patcher, inputs, options.repeats)
    for row in rows:
        print_row(row)
    print(f"  eager calls: {dict(totals.eager_calls)}, recordings: {totals.recordings}, retired: {totals.retired}")
    return rows


def print_row(row: dict) -> None:
    """Print what one size took."""
    print(f"  batch, latent, tokens {row['size']}: {row['compiles']} compiles")
    for label, value in row.items():
        if isinstance(value, Timing):
            ratio = f"{row['eager'].ms / value.ms:.2f}x, " if label != "eager" else ""
            error = ((value.result - row["eager"].result).norm() / row["eager"].result.norm()).item()
            print(f"    {label:>22} {value.ms:8.2f} ms, {ratio}first call {value.first:.2f} s, error {error:.1e}, "
                  f"peak {value.peak:.2f} GiB")  # fmt: skip
        elif label == "floor" and value:
            print(f"    {label:>22} {value:8.2f} ms, {row['eager'].ms / value:.2f}x")


def measure_peer(label: str, patcher, inputs: dict, repeats: int) -> tuple[Timing, float]:
    """Return the time of a step that another way makes fast, and how long that took to compile."""
    from compiled_graphs.compiler.region import find_regions

    torch._dynamo.reset()
    network = patcher.model.diffusion_model
    peer = patcher.clone()
    start = time.perf_counter()
    with torch._dynamo.config.patch(recompile_limit=64, accumulated_recompile_limit=1024):
        if label == "channels_last":
            network.to(memory_format=torch.channels_last)
        elif label == "blocks":
            for region in find_regions(network):
                peer.add_object_patch(
                    f"diffusion_model.{region.path}.forward", torch.compile(region.module.forward, dynamic=True)
                )
        else:
            mode = {"static": None, "static-cuda-graphs": "reduce-overhead"}[label]
            peer.add_object_patch("diffusion_model.forward", torch.compile(network.forward, dynamic=False, mode=mode))
        try:
            timing = timed(peer, inputs, repeats)
        finally:
            if label == "channels_last":
                network.to(memory_format=torch.contiguous_format)
    return timing, time.perf_counter() - start


def floor(patcher, inputs: dict, dtype: torch.dtype) -> float:
    """Return the milliseconds that a step's matrix products and convolutions take at the rate of a large product."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        call(patcher, inputs)
    one, other = (torch.randn(8192, 8192, dtype=dtype, device="cuda") for _ in range(2))
    for _ in range(5):
        one @ other
    sync()
    start = time.perf_counter()
    for _ in range(20):
        one @ other
    sync()
    rate = 20 * 2 * 8192**3 / (time.perf_counter() - start)
    return counter.get_total_flops() / rate * 1e3


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


def timed(patcher, inputs: dict, repeats: int) -> Timing:
    """Return the median milliseconds of a step, calls issued back to back, and the last result."""
    model = patcher.patch_model(load_weights=False)
    try:
        with torch.inference_mode():
            sync()
            reset_peak()
            start = time.perf_counter()
            model.apply_model(**fresh(inputs))
            sync()
            first = time.perf_counter() - start
            for _ in range(3):
                result = model.apply_model(**fresh(inputs))
            rounds = []
            for _ in range(5):
                sync()
                start = time.perf_counter()
                for _ in range(max(1, repeats // 5)):
                    model.apply_model(**fresh(inputs))
                sync()
                rounds.append((time.perf_counter() - start) / max(1, repeats // 5) * 1e3)
            result = model.apply_model(**fresh(inputs)).clone()
            peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
            return Timing(statistics.median(rounds), first, peak, result)
    finally:
        patcher.unpatch_model(unpatch_weights=False)
        if hasattr(patcher, "cleanup"):
            patcher.cleanup()  # as at the end of a sampling


def reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


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
