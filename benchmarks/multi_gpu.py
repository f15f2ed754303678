"""Core's MultiGPU CFG Split, compiled and not: whole prompts in a real ComfyUI server that sees several GPUs.

    python benchmarks/multi_gpu.py --comfyui CHECKOUT --home FOLDER [--models sdxl,flux6] [--depth N] [--gpus 2]
        [--steps 20] [--ways one:eager,one:ours,split:eager,split:ours] [--batch 0] [--fresh] [--json FILE]

Ways: one:eager and one:ours run on the first GPU, uncompiled and with Compile Model. split:eager and split:ours have
MultiGPU CFG Split after that, with `--gpus` as `max_gpus`. All sample with guidance (cfg 6), so that there are two
conditionings to spread. One server takes all ways of a model in turn, or with --fresh each way has its own. Models,
--depth, and what a prompt and a second mean, are those of `benchmarks/server.py`.

Each row has the first prompt's seconds (with a compile if --home is new), the median of the next four, a second size,
the GiB in use on the first GPU, how far its latents are from those of one:eager, and for `ours` what Compile Model
said, the counts of each device's copy, and the reasons of uncompiled calls. The last row of a model has the ratios.

--batch N then starts a server on each of --gpus GPUs (`--cuda-device`). One of them runs its share of N prompts alone,
then all run N. It prints prompts per second and the share of linear.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from server import (
    ComfyServer,
    Wanted,
    difference,
    largest,
    make_missing,
    median_seconds,
    model_prompt,
    node,
    run_prompt,
    started,
    tell,
)
from server_models import Size, sizes_of, with_depth

WAYS = "one:eager,one:ours,split:eager,split:ours"
GUIDANCE = 6.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--home", type=Path, required=True, help="folder for weights, graphs and latents")
    parser.add_argument("--models", default="sdxl,flux6")
    parser.add_argument("--depth", type=int, help="blocks of each kind; a model's own number by default")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--ways", default=WAYS)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=0, help="prompts to spread over servers, one on each GPU")
    parser.add_argument("--fresh", action="store_true", help="a server of its own for each way")
    parser.add_argument("--json", type=Path, help="append the figures to this file")
    options = parser.parse_args()
    for name in options.models.split(","):
        model = with_depth(name, options.depth)
        make_missing(options, model)
        rows = {row["way"]: row for row in measured(options, model)}
        tell(options, {"model": model, "ratios": ratios(rows)})
        if options.batch:
            tell(options, {"model": model, "batch": batch(options, model)})


def measured(options: argparse.Namespace, model: str) -> Iterator[dict[str, Any]]:
    """Run the prompts of each way; yield a row for each."""
    ways = options.ways.split(",")
    for some in [[way] for way in ways] if options.fresh else [ways]:
        with started(options) as running:
            for way in some:
                row = {"model": model, "way": way, **prompts(options, running, model, way)}
                tell(options, row)
                yield row


def prompts(options: argparse.Namespace, running: ComfyServer, model: str, way: str) -> dict[str, Any]:
    """Run the prompts of one way; return seconds, memory and differences."""
    before = counts(running)
    size, other_size = sizes_of(model)

    def run(seed: int, size: Size = size) -> dict[str, Any]:
        kept = latent_of(options, model, way, seed)
        made = run_prompt(running, prompt(options, model, way, seed, size, kept))
        return {**made, "differs": difference(kept, latent_of(options, model, "one:eager", seed))}

    first, again = run(1), [run(seed) for seed in (2, 3, 4, 5)]
    other = [run(seed, other_size) for seed in (6, 7)]
    everything = [first, *again, *other]
    row = {
        "first": first["seconds"],
        "again": median_seconds(again[1:]),
        "other size": other[-1]["seconds"],
        "used": round(again[-1]["used"], 2),
        "finite": all(each["finite"] for each in everything),
        "differs": largest(everything, "differs"),
    }
    if way.endswith("ours"):
        row |= {"text": first["text"], "devices": devices(running), **since(before, counts(running))}
    return row


def prompt(options: argparse.Namespace, model: str, way: str, seed: int, size: Size, kept: Path) -> dict[str, Any]:
    """Return an API prompt of one way, with guidance."""
    place, code = way.split(":")
    made = model_prompt(Wanted(model, code, seed, options.steps, size, kept))
    sampler = made["7"]["inputs"]
    sampler["cfg"] = GUIDANCE
    if place == "split":
        made["9"] = node("MultiGPU_WorkUnits", model=sampler["model"], max_gpus=options.gpus)
        sampler["model"] = ["9", 0]
    return made


def latent_of(options: argparse.Namespace, model: str, way: str, seed: int) -> Path:
    return options.home / f"{model}-{way.replace(':', '-')}-{seed}.pt"


def counts(running: ComfyServer) -> dict[str, Any]:
    totals = running.get("/compiled_graphs/registry")["totals"]
    return {name: totals[name] for name in ("compiles", "verifications", "retired", "recordings", "replays", "reasons")}


def since(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return what has been counted since then."""
    found: dict[str, Any] = {name: now[name] - before[name] for name in now if name != "reasons"}
    reasons = {reason: count - before["reasons"].get(reason, 0) for reason, count in now["reasons"].items()}
    return found | {"reasons": {reason: count for reason, count in reasons.items() if count}}


def devices(running: ComfyServer) -> dict[str, Any]:
    """Return what each device's copy of the last prompt's model did."""
    workflows = list(running.get("/compiled_graphs/registry")["workflows"].values())
    roles = workflows[-1]["roles"] if workflows else {}
    return {
        name: {key: role[key] for key in ("calls", "recordings", "replays", "retired")} for name, role in roles.items()
    }


def ratios(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return how many times faster one way is than another, by the median of prompts after the first."""
    pairs = [
        ("split:ours", "one:ours"),
        ("split:ours", "split:eager"),
        ("split:eager", "one:eager"),
        ("one:ours", "one:eager"),
    ]
    return {
        f"{fast} over {slow}": round(rows[slow]["again"] / rows[fast]["again"], 2)
        for fast, slow in pairs
        if fast in rows and slow in rows
    }


def batch(options: argparse.Namespace, model: str) -> dict[str, Any]:
    """Return prompts per second of one server and of one on each GPU, after a prompt that warms each up."""
    with ExitStack() as stack:
        places = range(options.gpus)
        contexts = [started(options, "--cuda-device", str(gpu)) for gpu in places]
        with ThreadPoolExecutor(options.gpus) as pool:
            found = list(pool.map(stack.enter_context, contexts))
            list(pool.map(lambda place: run_batch_prompt(options, model, found[place], place, 1), places))
        rates = {}
        seed = 100  # a prompt that was run before would be answered from ComfyUI's cache
        for count, prompts in ((1, options.batch // options.gpus), (options.gpus, options.batch)):
            start = time.perf_counter()
            spread(options, model, found[:count], range(seed, seed + prompts))
            rates[count] = prompts / (time.perf_counter() - start)
            seed += prompts
    share = rates[options.gpus] / rates[1] / options.gpus
    return {
        "prompts": options.batch,
        "per second": {n: round(rate, 3) for n, rate in rates.items()},
        "share": round(share, 3),
    }


def run_batch_prompt(options: argparse.Namespace, model: str, running: ComfyServer, place: int, seed: int) -> None:
    kept = options.home / f"batch-{place}.pt"
    run_prompt(running, prompt(options, model, "one:ours", seed, sizes_of(model)[0], kept))


def spread(options: argparse.Namespace, model: str, servers: list[ComfyServer], wanted: range) -> None:
    """Run a prompt for each seed: each server takes the next one when it is free."""
    seeds, lock = iter(wanted), threading.Lock()

    def work(place: int) -> None:
        while True:
            with lock:
                seed = next(seeds, None)
            if seed is None:
                return
            run_batch_prompt(options, model, servers[place], place, seed)

    with ThreadPoolExecutor(len(servers)) as pool:
        list(pool.map(work, range(len(servers))))


if __name__ == "__main__":
    main()
