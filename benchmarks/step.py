"""One denoising step, eager against compiled, at sizes the graphs have and have not seen.

    python benchmarks/step.py --comfyui CHECKOUT [--backend inductor] [--dtype float16] [--image-prompt]
                              [--grow] [--json FILE] NAME ... [--peers static blocks ...]

All variants run in one process on the same weights; times are medians of pipelined calls. *called* goes through
Python, *recorded* is replayed as a CUDA graph. Peers: the network in channels_last, the whole of it by torch.compile
with static or dynamic sizes, by ComfyUI's own TorchCompileModel, and each block by torch.compile with dynamic sizes;
those that are static run at the first size only. *graph* is the same as a CUDA graph made of the network's call
alone. Errors are against the network in float32. The floor is the step's counted operations at the rate of a large
matrix product. With --image-prompt each cross-attention of a UNet is replaced by a patch, as IP-Adapter replaces it.
With --grow sizes run from a quarter to four megapixels, batches from 1 to 16 and prompts from 77 to 1,001 tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import models
import torch

SIZES = {
    "sd15": [(2, 64, 64, 77), (2, 96, 96, 77), (2, 64, 64, 154), (1, 64, 64, 77), (8, 64, 64, 77)],
    "sdxl": [(2, 128, 128, 77), (2, 64, 256, 77), (4, 96, 96, 77), (1, 128, 128, 77), (2, 104, 152, 231)],
    "sd3": [(2, 128, 128, 154), (2, 64, 256, 154), (1, 128, 128, 77)],
    "flux": [(1, 128, 128, 256), (1, 64, 256, 512), (2, 96, 96, 256)],
    "wan": [(1, 60, 104, 512), (1, 104, 60, 512)],
}
GROWTH = {
    "megapixels": [(2, side, side, 77) for side in (64, 128, 192, 256)],
    "batch": [(batch, 128, 128, 77) for batch in (1, 2, 4, 8, 16)],
    "tokens": [(2, 128, 128, tokens) for tokens in (77, 154, 308, 616, 1001)],
}
"""What grows, and the sizes of its steps."""

SAMPLING = {"sample_sigmas": torch.linspace(14, 0, 21)}
"""What ComfyUI says of the sampling that a step belongs to: 20 steps."""
OURS = ("eager", "called", "recorded")
PEERS = ("channels_last", "static", "core", "dynamic", "blocks")
AT_FIRST_SIZE_ONLY = ("static", "core", "dynamic")


@dataclass(frozen=True, eq=False)
class Timing:
    """What a variant's steps took."""

    ms: float
    first: float
    peak: float
    result: torch.Tensor
    graph: float | None = None
    """Milliseconds as a CUDA graph of the network's call alone."""


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
    parser.add_argument("--bound", type=int, default=150, help="seconds that a peer may take to compile")
    parser.add_argument("--grow", action="store_true", help="measure how cost grows, instead of the other sizes")
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    parser.add_argument("names", nargs="+", choices=SIZES)
    options = parser.parse_args()
    models.use_comfyui(options.comfyui)
    print(f"torch {torch.__version__}, {device_name()}, {options.dtype}, {options.backend}")
    for name in options.names:
        measure(name, options, keeping(options.json))
        gc.collect()
        torch.cuda.empty_cache()


def keeping(path: Path | None) -> Callable[[list[dict]], None]:
    """Return what writes rows after those that a file has, again whenever there is more in them: runs get cut off."""
    before = path.read_text() if path and path.exists() else ""

    def keep(rows: list[dict]) -> None:
        if path:
            path.write_text(before + "".join(json.dumps(_plain(row)) + "\n" for row in rows))

    return keep


def _plain(row: dict) -> dict:
    """Of timings, keep the milliseconds and the peak."""
    values = {}
    for name, value in row.items():
        if isinstance(value, Timing):
            values |= {name: value.ms, f"{name}_graph": value.graph, f"{name}_peak": value.peak}
        else:
            values[name] = value
    return values


def measure(name: str, options: argparse.Namespace, keep: Callable[[list[dict]], None]) -> None:
    """Print a table for one architecture, and keep its rows."""
    from compiled_graphs.compiler.common.counters import totals
    from compiled_graphs.compiler.compile_cache.graph_cache import GraphCache
    from compiled_graphs.compiler.compile_cache.worker_pool import Workers
    from compiled_graphs.compiler.hosts.comfy import compile as host
    from compiled_graphs.compiler.hosts.comfy import process, worker_setup
    from compiled_graphs.compiler.hosts.comfy.rules.host import HOST
    from compiled_graphs.compiler.registry.registry import Registry
    from compiled_graphs.compiler.storage.store import FolderStore

    patcher = models.patcher(name, getattr(torch, options.dtype))
    store = FolderStore(tempfile.mkdtemp())
    workers = Workers(worker_setup.setup, HOST)
    use_registry(Registry(GraphCache(store, workers=workers)))
    workers.start("inductor" if options.backend == "auto" else options.backend, patcher.load_device)
    process.warm_up(options.backend)  # what this process imports; of a backend that was warmed up before, nothing
    time.sleep(options.head_start)  # as while a checkpoint loads
    start = time.perf_counter()
    compiled, text = host.compile_model(patcher, host.Request(options.backend))
    seconds = time.perf_counter() - start
    workers.stop()
    print(f"\n{name}: {text}\n  node: {seconds:.1f} s,", end=" ")
    print(f"{sum(p.stat().st_size for p in store.folder.iterdir()) / 1e6:.1f} MB of graphs")
    use_registry(Registry(GraphCache(store)))
    start = time.perf_counter()
    called, text = host.compile_model(patcher, host.Request(options.backend, capture=False))
    print(f"  again, from the store: {time.perf_counter() - start:.1f} s: {text}")
    variants = {"eager": patcher, "called": called, "recorded": compiled}
    if options.grow:
        rows = [
            {"grows": what, **measure_size(name, size, patcher, variants, None, options)}
            for what, sizes in GROWTH.items()
            for size in sizes
        ]
    else:
        exact = models.in_float32(name, patcher) if torch.cuda.is_available() else patcher
        rows = [measure_size(name, size, patcher, variants, exact, options) for size in SIZES[name][: options.sizes]]
        rows[0] |= {"compile_s": seconds}
    keep(rows)
    for label in options.peers:
        for row in rows[: 1 if label in AT_FIRST_SIZE_ONLY else None]:
            inputs = sized(name, row["size"], patcher)
            row[label], row[f"{label}_compile_s"] = measure_peer(label, patcher, inputs, options)
            print(f"  batch, latent, tokens {row['size']}:")
            print_timing(label, row)
            keep(rows)
    print(f"  eager calls: {dict(totals.eager_calls)}, recordings: {totals.captures}, retired: {totals.retired}")


def sized(name: str, size: tuple[int, ...], patcher, options: dict | None = None) -> dict:
    """Return a step's arguments, the same ones for each variant."""
    torch.manual_seed(0)
    inputs = models.step_inputs(patcher.model, name, *size)
    inputs["transformer_options"] = (options or {}) | SAMPLING
    return inputs


def measure_size(name: str, size: tuple[int, ...], patcher, variants: dict, exact, options: argparse.Namespace) -> dict:
    """Return a row: what a step of each variant takes at one size, and how far from float32 it is."""
    from compiled_graphs.compiler.common.counters import totals

    inputs = sized(name, size, patcher, image_prompt() if options.image_prompt else None)
    before = totals.compiles
    row = {"model": name, "size": size}
    row |= {label: timed(model, inputs, options.repeats) for label, model in variants.items()}
    row["compiles"] = totals.compiles - before
    if torch.cuda.is_available() and not options.grow:
        for label in ("eager", "called"):
            row[label] = replace(row[label], graph=graph_ms(variants[label], inputs, options.repeats))
        row["floor"] = floor(patcher, inputs, getattr(torch, options.dtype))
    if exact is not None:
        wanted = call(exact, inputs)
        row["errors"] = {label: relative_error(row[label].result, wanted) for label in variants}
    print_row(row)
    return row


def relative_error(result: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((result - wanted).norm() / wanted.norm()).item()


def print_row(row: dict) -> None:
    """Print what our variants took at one size."""
    print(f"  batch, latent, tokens {row['size']}: {row['compiles']} compiles")
    for label in OURS:
        print_timing(label, row)
    if floor := row.get("floor"):
        print(f"    {'floor':>14} {floor:8.2f} ms, {row['eager'].ms / floor:.2f}x")
    if errors := row.get("errors"):
        print(f"    from float32: {', '.join(f'{name} {error:.2e}' for name, error in errors.items())}", flush=True)


def print_timing(label: str, row: dict) -> None:
    """Print what one variant took."""
    timing, seconds = row[label], row.get(f"{label}_compile_s")
    if timing is None:
        print(f"    {label:>14} not done after {seconds:.0f} s", flush=True)
        return
    ratio = f"{row['eager'].ms / timing.ms:.2f}x, " if label != "eager" else ""
    graph = f"as a CUDA graph {timing.graph:.2f} ms, " if timing.graph else ""
    error = relative_error(timing.result, row["eager"].result)
    compiled = f", compiled in {seconds:.1f} s" if seconds else ""
    print(f"    {label:>14} {timing.ms:8.2f} ms, {ratio}{graph}first call {timing.first:.2f} s, from eager "
          f"{error:.1e}, peak {timing.peak:.2f} GiB{compiled}", flush=True)  # fmt: skip


def measure_peer(label: str, patcher, inputs: dict, options: argparse.Namespace) -> tuple[Timing | None, float]:
    """Return the time of a step that another way makes fast, None if it took too long, and its seconds to compile."""
    torch._dynamo.reset()
    network = patcher.model.diffusion_model
    start = time.perf_counter()
    try:
        with torch._dynamo.config.patch(recompile_limit=64, accumulated_recompile_limit=1024), bound(options.bound):
            peer = peer_of(label, patcher)
            inputs = as_sampled(inputs, peer)
            call(peer, inputs)
            sync()
            seconds = time.perf_counter() - start
            timing = timed(peer, inputs, options.repeats)
            graph = None if label == "core" else graph_ms(peer, inputs, options.repeats)
            return replace(timing, graph=graph), seconds
    except TooLong:
        return None, time.perf_counter() - start
    finally:
        if label == "channels_last":
            network.to(memory_format=torch.contiguous_format)


def peer_of(label: str, patcher):
    """Return a patcher that runs the same network in another way."""
    from compiled_graphs.compiler.identity.regions import find_regions

    network, peer = patcher.model.diffusion_model, patcher.clone()
    if label == "channels_last":
        network.to(memory_format=torch.channels_last)
    elif label == "blocks":
        for region in find_regions(network):
            forward = torch.compile(region.module.forward, dynamic=True)
            peer.add_object_patch(f"diffusion_model.{region.path}.forward", forward)
    elif label == "core":
        from comfy_api.torch_helpers import set_torch_compile_wrapper

        set_torch_compile_wrapper(model=peer, backend="inductor")
    else:
        forward = torch.compile(network.forward, dynamic=label == "dynamic")
        peer.add_object_patch("diffusion_model.forward", forward)
    return peer


def as_sampled(inputs: dict, patcher) -> dict:
    """Return a step's arguments with the patcher's wrappers among the options, where a sampling puts them."""
    wrappers = {kind: dict(named) for kind, named in getattr(patcher, "wrappers", {}).items()}
    return {**inputs, "transformer_options": inputs["transformer_options"] | {"wrappers": wrappers}}


class TooLong(BaseException):
    """No compiler that waits for its own processes takes it for an error of theirs."""


@contextmanager
def bound(seconds: int) -> Iterator[None]:
    """Raise TooLong in what takes longer."""

    def expire(*_: object) -> None:
        raise TooLong

    previous = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def graph_ms(patcher, inputs: dict, repeats: int) -> float | None:
    """Return the median milliseconds of the network's call as a CUDA graph, None if it cannot be one."""
    from compiled_graphs.compiler.runtime.cuda_graph import capture_on_gpu

    seen = []
    with sampling(patcher) as model:
        hook = model.diffusion_model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append((args, fresh(kwargs))), with_kwargs=True
        )
        try:
            model.apply_model(**fresh(inputs))
            hook.remove()
            args, kwargs = seen[0]
            run = partial(run_network, model.diffusion_model, args, kwargs)
            run()  # what is compiled for a call from here must not be while it is recorded
            return pipelined(capture_on_gpu(run, torch.cuda.graph_pool_handle()).replay, repeats)
        except (RuntimeError, TypeError) as error:
            causes = [str(cause).splitlines()[0] for cause in (error, error.__context__) if cause is not None]
            print(f"    no CUDA graph: {', while handling '.join(causes)}")
            return None
        finally:
            hook.remove()


def run_network(network: torch.nn.Module, args: tuple, kwargs: dict) -> None:
    """One call of the network alone, whose result is dropped at once."""
    network(*args, **fresh(kwargs))


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


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def use_registry(registry) -> None:
    """Give the host a registry of this run's own, as after a restart."""
    from compiled_graphs.compiler.hosts.comfy import process

    process.registry = lambda: registry


def call(patcher, inputs: dict) -> torch.Tensor:
    """One step, with the patcher's object patches in place."""
    with sampling(patcher) as model:
        return model.apply_model(**fresh(inputs))


@contextmanager
def sampling(patcher) -> Iterator[object]:
    """Give the model with the patcher's object patches in place, as ComfyUI does from a sampling's begin to its end."""
    model = patcher.patch_model(load_weights=False)
    try:
        with torch.inference_mode():
            if hasattr(patcher, "pre_run"):
                patcher.pre_run()
            yield model
    finally:
        patcher.unpatch_model(unpatch_weights=False)
        if hasattr(patcher, "cleanup"):
            patcher.cleanup()


def timed(patcher, inputs: dict, repeats: int) -> Timing:
    """Return the median milliseconds of a step, calls issued back to back, and the last result."""
    with sampling(patcher) as model:
        sync()
        reset_peak()
        start = time.perf_counter()
        model.apply_model(**fresh(inputs))
        sync()
        first = time.perf_counter() - start
        for _ in range(3):
            model.apply_model(**fresh(inputs))
        milliseconds = pipelined(lambda: model.apply_model(**fresh(inputs)), repeats)
        result = model.apply_model(**fresh(inputs)).clone()
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        return Timing(milliseconds, first, peak, result)


def pipelined(step: Callable[[], object], repeats: int) -> float:
    """Return the median milliseconds of a step, issued back to back in five rounds."""
    rounds, count = [], max(1, repeats // 5)
    for _ in range(5):
        sync()
        start = time.perf_counter()
        for _ in range(count):
            step()
        sync()
        rounds.append((time.perf_counter() - start) / count * 1e3)
    return statistics.median(rounds)


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
