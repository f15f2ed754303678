"""What the examples share: graphs from a folder, or into it, and the clock."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compiled_graphs.compiler.common.counters import totals
from compiled_graphs.diffusers import compile_pipe, load_pipe, save_pipe


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every example."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--graphs", type=Path, default=Path("graphs"), help="folder to load from, or to save to")
    parser.add_argument("--backend", default="auto")
    return parser


def provide_graphs(pipe: Any, folder: Path, backend: str) -> None:
    """Load a pipeline's graphs, or compile and save them if the folder is not there. Tells how long it took."""
    pipe.set_progress_bar_config(disable=True)
    start = time.perf_counter()
    if folder.is_dir():
        parts = load_pipe(pipe, folder)
        told = ", ".join(f"{part.part} {part.loaded} of {part.regions}" for part in parts)
        print(f"loaded {told} in {time.perf_counter() - start:.1f} s")
    else:
        saved = save_pipe(compile_pipe(pipe, backend=backend), folder)
        told = ", ".join(f"{part.part} {part.graphs} graphs" for part in saved)
        print(f"compiled and saved {told} in {time.perf_counter() - start:.1f} s")


def timed(what: str, make: Callable[[], Any]) -> Any:
    """Make something; tell how long it took, and what was compiled for it."""
    before, start = totals.compiles, time.perf_counter()
    made = make()
    print(f"{what}: {time.perf_counter() - start:.2f} s, {totals.compiles - before} compiled")
    return made


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
