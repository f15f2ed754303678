"""The table of RESULTS.md: whole prompts of several models, in one server with ComfyUI's default flags.

    python benchmarks/table.py --comfyui CHECKOUT --home FOLDER [--steps 20] [--prompts 3] [--json FILE] MODEL ...

Models are those of `benchmarks/server.py`, with a format after the name for a quantised one. Each runs uncompiled, then
with Compile Model. A row has the median of the prompts after the first one of each way, the first compiled prompt
(`first_compile`: with a new --home it compiles), a second size, how far the latents are apart, and GiB in use.
Weights are made before, in a process for each model.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from server import (
    ComfyServer,
    PromptFailed,
    Wanted,
    difference,
    make_missing,
    median_seconds,
    model_prompt,
    run_prompt,
    started,
    tell,
)
from server_models import Size, sizes_of

PAUSE = 30.0
"""Seconds from the server's start to the first prompt: people open a workflow first."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--home", type=Path, required=True, help="folder for weights, graphs and latents")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=3, help="of each way, after the first one")
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    parser.add_argument("models", nargs="+")
    options = parser.parse_args()
    with started(options) as server, ThreadPoolExecutor() as pool:
        start = time.monotonic()
        list(pool.map(partial(make_missing, options), options.models))
        time.sleep(max(0.0, PAUSE - (time.monotonic() - start)))
        for model in options.models:
            tell(options, measured(options, server, model))


def measured(options: argparse.Namespace, server: ComfyServer, model: str) -> dict[str, Any]:
    """Return the row of one model, or why there is none."""
    try:
        normal, compiled = (way_of(options, server, model, way) for way in ("eager", "ours"))
    except PromptFailed as error:
        return {"model": model, "failed": str(error)[-1500:]}
    return {
        "model": model,
        "normal": normal["again"],
        "compiled": compiled["again"],
        "gain": round(normal["again"] / compiled["again"], 2),
        "first_compile": compiled["first"],
        "other size": [normal["other size"], compiled["other size"]],
        "used": [normal["used"], compiled["used"]],
        "differs": max(map(difference, compiled["latents"], normal["latents"])),
        "finite": normal["finite"] and compiled["finite"],
        "text": compiled["text"],
        "counted": compiled["counted"],
    }


def way_of(options: argparse.Namespace, server: ComfyServer, model: str, way: str) -> dict[str, Any]:
    """Run the prompts of one way."""
    size, other_size = sizes_of(model)
    before = counts(server)

    def run(seed: int, size: Size = size) -> dict[str, Any]:
        kept = options.home / f"table-{model}-{way}-{seed}.pt"
        made = run_prompt(server, model_prompt(Wanted(model, way, seed, options.steps, size, kept)))
        return {**made, "latent": kept}

    first, *again = [run(seed) for seed in range(1, options.prompts + 2)]
    compiles = counts(server)["compiles"]
    other = run(options.prompts + 2, other_size)
    everything = [first, *again, other]
    counted = {name: count - before[name] for name, count in counts(server).items()}
    return {
        "first": first["seconds"],
        "again": median_seconds(again),
        "other size": other["seconds"],
        "used": round(again[-1]["used"], 2),
        "latents": [each["latent"] for each in everything],
        "finite": all(each["finite"] for each in everything),
        "text": again[-1]["text"] or first["text"],
        "counted": {**counted, "compiles at another size": counts(server)["compiles"] - compiles},
    }


def counts(server: ComfyServer) -> dict[str, int]:
    totals = server.get("/compiled_graphs/registry")["totals"]
    return {name: totals[name] for name in ("compiles", "retired", "recordings", "replays")}


if __name__ == "__main__":
    main()
