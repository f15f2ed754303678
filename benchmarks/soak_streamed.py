"""Random prompts in a real ComfyUI server whose GPU is short of memory: is each image right, does anything stay behind?

    python benchmarks/soak_streamed.py --comfyui CHECKOUT [--home FOLDER] [--prompts 500] [--minutes 10] [--leave GIB]
        [--models MODEL,...] [--depth N] [--sizes SIZE,...] [--keep-models]

Two models (SDXL in fp16, and Flux with 6 + 12 blocks in bf16 or with N + N) take turns at random, at three sizes,
without a LoRA or with one of two strengths. ComfyUI may use --leave GiB of the GPU (its --vram-headroom is the rest),
which is less than both models need, so they evict each other. ComfyUI loads a model again when the other one ran in
between, unless --keep-models. With one model alone, only a changed LoRA has pages filled anew. The latent of each
prompt is compared with that of the same prompt without our nodes, which stays in --home, as does a latent that
differs. The exit status is 1 if a latent differs, or differs by much more than others of its case, if a prompt or a
graph's check fails, a page of weights stays pinned, memory grows or something compiles that was compiled before.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import server as bench
from comfy_server import ComfyServer, PromptFailed

MODELS, LORAS, SIZES = ("sdxl", "flux6"), (None, 0.5, 1.0), ((1024, 1024), (832, 1216), (768, 768))
TOLERANCE = 2e-2
"""Of latents, relative. Another strength of the LoRA is 0.25 away for SDXL, 0.055 for Flux with 3 + 3 blocks."""
SPREAD, LEAST = 1.5, 1e-3
"""A latent may differ by SPREAD times the least difference of its case, or of LEAST if that is more."""
GROWTH = 1.05
WINDOW = 50
"""Prompts of which one figure for memory is the least: models that are loaded at the moment count for nothing."""
AHEAD = 3
"""Prompts in the server's queue, so that it does not wait for this process."""

_turns = itertools.count()

Case = tuple[str, float | None, tuple[int, int]]
"""A model, the strength of its LoRA and a size."""


@dataclass(frozen=True)
class Queued:
    """A prompt that the server has not answered yet."""

    case: Case
    kept: Path
    id: str


@dataclass
class Found:
    """What the prompts showed."""

    differences: dict[str, list[float]] = field(default_factory=dict)
    """From the latent without our nodes, for each case."""
    used: list[float] = field(default_factory=list)
    pinned: int = 0
    failed: Counter[str] = field(default_factory=Counter)

    @property
    def largest(self) -> float:
        """The largest difference of all."""
        return max(itertools.chain(*self.differences.values()), default=0.0)

    def uneven(self) -> list[str]:
        """Return the cases in which one difference is far above the least."""
        return [case for case, values in self.differences.items() if max(values) > bound(values)]

    def faults(self, compiles: int, retired: int) -> list[str]:
        """Return what is wrong, a sentence each. `retired` counts graphs that failed a check."""
        first, last = (min(part, default=0.0) for part in (self.used[WINDOW : 2 * WINDOW], self.used[-WINDOW:]))
        wrong = {
            f"a latent differs by {self.largest:.1e}": self.largest > TOLERANCE,
            f"some latents differ by more than others: {self.uneven()}": bool(self.uneven()),
            f"{self.pinned} pages stay pinned": self.pinned > 0,
            f"memory grows from {first:.2f} to {last:.2f} GiB": last > GROWTH * first > 0,
            f"{compiles} compiles after the first prompts": compiles > 0,
            f"{retired} graphs failed a check": retired > 0,
            f"prompts failed: {dict(self.failed)}": bool(self.failed),
        }
        return [text for text, is_wrong in wrong.items() if is_wrong]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--home", type=Path, help="folder for weights, graphs and latents; a new one by default")
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--minutes", type=float, default=10.0, help="in all, with making weights and references")
    parser.add_argument("--leave", type=float, default=9.0, help="GiB of the GPU that ComfyUI may use")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", type=lambda text: text.split(","), default=MODELS, help="such as flux6")
    parser.add_argument("--depth", type=int, help="blocks of each kind of Flux; its own number by default")
    parser.add_argument("--sizes", type=bench.sizes, default=SIZES, help="such as 768x768,512x512")
    parser.add_argument("--keep-models", action="store_true", help="both models stay loaded (ComfyUI's --cache-lru)")
    options = parser.parse_args()
    options.end = time.monotonic() + 60 * options.minutes
    options.home = options.home or Path(tempfile.mkdtemp())
    options.models = [bench.with_depth(model, options.depth) for model in options.models]
    for model in options.models:
        if not bench.weights_of(options, model).exists():
            command = [sys.executable, bench.__file__, "--comfyui", str(options.comfyui), "--home", str(options.home)]
            subprocess.run([*command, "--make", model], check=True)
    nodes = options.home / "custom_nodes" / "bench"
    shutil.copytree(Path(__file__).parent / "server_nodes", nodes, dirs_exist_ok=True)
    headroom = f"{gpu_memory() - options.leave:.2f}"
    flags = ["--vram-headroom", headroom, "--disable-api-nodes", "--preview-method", "none"]
    if options.keep_models:
        flags += ["--cache-lru", "64"]
    if (front := options.home / "front").exists():
        flags += ["--front-end-root", str(front)]
    with ComfyServer(str(options.comfyui), options.home, tuple(flags)) as server:
        sys.exit(soak(options, server))


def gpu_memory() -> float:
    """Return GiB of the GPU. Another process asks, so that this one has nothing on the GPU."""
    asks = "import torch; print(torch.cuda.get_device_properties(0).total_memory / 2**30)"
    return float(subprocess.run([sys.executable, "-c", asks], check=True, capture_output=True, text=True).stdout)


def soak(options: argparse.Namespace, server: ComfyServer) -> int:
    """Run the prompts; return the exit status."""
    cases: list[Case] = list(itertools.product(options.models, LORAS, options.sizes))
    for case in cases:
        if not reference(options, case).exists():
            server.run(prompt(options, case, reference(options, case), "eager"))
    for model in options.models:
        server.run(prompt(options, (model, None, options.sizes[0]), options.home / "soak-first.pt", "ours"))
    before, found = totals(server)["compiles"], Found()
    try:
        ask(options, server, cases, found)
        counted = totals(server)
        faults = found.faults(counted["compiles"] - before, counted["retired"])
    except (OSError, RuntimeError) as error:  # the server is gone
        counted, faults = {}, [f"the server ended: {error}\n{server.end_of_log()}"]
    report = {
        "prompts": len(found.used),
        "differs, least and most": {case: [min(values), max(values)] for case, values in found.differences.items()},
        "used, least of each fifty": [
            round(min(found.used[start : start + WINDOW]), 2) for start in range(0, len(found.used), WINDOW)
        ],
        "pinned": found.pinned,
        **{name: counted.get(name) for name in ("compiles", "recordings", "replays", "calls", "reasons")},
        "errors that ComfyUI logged": dict(Counter(line[:200] for line in server.lines_with("ERROR ")).most_common(5)),
        "faults": faults,
    }
    print(json.dumps(report), flush=True)
    return 1 if faults else 0


def ask(options: argparse.Namespace, server: ComfyServer, cases: list[Case], found: Found) -> None:
    """Run random cases until the number or the time is reached."""
    chosen = random.Random(options.seed)
    queued: deque[Queued] = deque()
    for number in range(options.prompts):
        if time.monotonic() > options.end:
            break
        case, path = chosen.choice(cases), options.home / f"soak-ours-{number}.pt"
        try:
            queued.append(Queued(case, path, server.queue(prompt(options, case, path, "ours"))))
        except PromptFailed as error:
            found.failed[str(error)[-200:]] += 1
        if len(queued) == AHEAD:
            note(options, server, queued.popleft(), found)
    for each in queued:
        note(options, server, each, found)


def reference(options: argparse.Namespace, case: Case) -> Path:
    """Return the place of a case's latent without our nodes. It stays in --home."""
    model, lora, size = case
    return options.home / f"soak-{model}-{lora}-{'x'.join(map(str, size))}-{options.steps}steps.pt"


def prompt(options: argparse.Namespace, case: Case, kept: Path, way: str) -> dict[str, Any]:
    """Return the prompt of a case, which keeps its latent at a path."""
    model, lora, size = case
    built = bench.model_prompt(bench.Wanted(model, way, 1, options.steps, size, kept, lora))
    # ComfyUI hands back what it made before unless an input is another one. This one changes nothing.
    built["7"]["inputs"]["denoise"] = 1.0 - 1e-9 * next(_turns)
    return built


def note(options: argparse.Namespace, server: ComfyServer, queued: Queued, found: Found) -> None:
    """Wait for a prompt; note what the server says of it, and how far its latent is from that without our nodes."""
    try:
        entry = server.wait(queued.id)
    except PromptFailed as error:
        found.failed[str(error)[-200:]] += 1
        return
    row = next(output["bench"][0] for output in entry["outputs"].values() if "bench" in output)
    expected = reference(options, queued.case)
    differs = bench.difference(queued.kept, expected)
    others = found.differences.setdefault(expected.stem, [])
    others.append(differs)
    if differs > bound(others):
        print(f"{queued.kept} differs by {differs:.1e} from {expected.name}", server.end_of_log(), file=sys.stderr)
    else:
        queued.kept.unlink()
    found.used.append(row["used"])
    found.pinned = max(found.pinned, row["pinned"])
    if len(found.used) % WINDOW == 0:  # so that a run which is cut off has told something
        print(f"{len(found.used)} prompts, latents differ by at most {found.largest:.1e}", file=sys.stderr, flush=True)


def bound(differences: list[float]) -> float:
    """Return by how much latents of one case may differ, of which these were measured."""
    return min(TOLERANCE, SPREAD * max(LEAST, min(differences)))


def totals(server: ComfyServer) -> dict[str, Any]:
    return server.get("/compiled_graphs/registry")["totals"]


if __name__ == "__main__":
    main()
