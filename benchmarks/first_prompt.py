"""The first prompt after a restart: plain, and compiled with graphs that `bake` made.

    python benchmarks/first_prompt.py --comfyui /folder/of/ComfyUI sdxl flux

Each prompt runs in a server of its own. The ways take turns: plain in a server without this extension, plain with it,
and compiled. The seconds are ComfyUI's own, from a prompt's start to its end. They include loading the weights, but not
the server's start, whose seconds stand beside them.

Inductor's folder is removed before each start, unless `--warm` keeps it. With `--run`, and with `--warm`, `bake` runs
the workflow, so that kernels are timed at its size. With `--listen`, servers listen when the graphs are loaded. Images
for a fleet have both.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import server
from server_models import sizes_of, with_depth

WAYS = {
    "without": ("--disable-all-custom-nodes", "--whitelist-custom-nodes", "bench"),
    "eager": (),
    "ours": (),
}
"""What ComfyUI is started with for each way."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--home", type=Path, help="folder for weights, graphs and latents; a new one by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--depth", type=int, help="blocks of each kind; a model's own number by default")
    parser.add_argument("--sizes", type=server.sizes, help="two sizes, of which the first is used")
    parser.add_argument("--backend", default="inductor", help="of Compile Model")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds from a server's start to its prompt")
    parser.add_argument("--warm", action="store_true", help="keep Inductor's folder")
    parser.add_argument("--run", action="store_true", help="have bake run the workflow")
    parser.add_argument("--listen", action="store_true", help="servers listen when their graphs are loaded")
    parser.add_argument("--json", type=Path, help="append the figures to this file")
    parser.add_argument("models", nargs="+")
    options = parser.parse_args()
    options.home = options.home or Path(tempfile.mkdtemp())
    if options.listen:
        os.environ["COMPILED_GRAPHS_LISTEN"] = "warm"
    for model in options.models:
        measure(options, with_depth(model, options.depth))


def measure(options: argparse.Namespace, model: str) -> None:
    """Bake a model's graphs, then run first prompts; print a row."""
    server.make_missing(options, model)
    bake(options, model)
    runs: dict[str, list[dict]] = {way: [] for way in WAYS}
    for number in range(options.rounds):
        for way in WAYS if number % 2 == 0 else reversed(WAYS):
            runs[way].append(first_prompt(options, model, way))
    medians = {way: statistics.median(run["seconds"] for run in runs[way]) for way in WAYS}
    row = {
        "run": model,
        **{f"{way}, each": [round(run["seconds"], 2) for run in runs[way]] for way in WAYS},
        **medians,
        "start": {way: round(statistics.median(run["start"] for run in runs[way]), 1) for way in WAYS},
        "more than without": round(medians["ours"] - medians["without"], 2),
        "differs": max(run["differs"] or 0.0 for run in runs["ours"]),
        "compiles": [run["compiles"] for run in runs["ours"]],
        "text": runs["ours"][-1]["text"],
    }
    server.tell(options, row)


def bake(options: argparse.Namespace, model: str) -> None:
    """Have the command of the extension make the graphs, and check each against plain code."""
    workflow = options.home / f"{model}.json"
    workflow.write_text(json.dumps(prompt_of(options, model, "ours")))
    with server.started(options):
        pass  # it puts the extension and the nodes of the benchmarks in their place
    command = [sys.executable, "-m", "compiled-graphs", "bake", str(workflow), "--verify"]
    command += ["--comfyui", str(options.comfyui), "--store", str(options.home / "graphs")]
    command += ["--run"] if options.warm or options.run else []
    variables = {"COMPILED_GRAPHS_TRUST": str(options.home / "trust")}
    start = time.perf_counter()
    done = subprocess.run(
        [*command, "--", "--base-directory", str(options.home), *server.flags_of(options.home)],
        cwd=options.home / "custom_nodes",
        env=os.environ | variables | {"TORCHINDUCTOR_CACHE_DIR": str(options.home / "inductor")},
        capture_output=True,
        text=True,
    )
    print(f"{done.stdout[-1500:]}{done.stderr[-1500:]}bake: {time.perf_counter() - start:.0f} s", flush=True)
    done.check_returncode()


def first_prompt(options: argparse.Namespace, model: str, way: str) -> dict:
    """Start a server and run one prompt; return its seconds, and how many graphs it compiled."""
    if not options.warm:
        shutil.rmtree(options.home / "inductor", ignore_errors=True)
    begun = time.perf_counter()
    with server.started(options, *WAYS[way]) as started:
        start = time.perf_counter() - begun
        time.sleep(options.pause)
        ran = server.run_prompt(started, prompt_of(options, model, way))
        compiles = started.get("/compiled_graphs/registry")["totals"]["compiles"] if way != "without" else 0
    differs = server.difference(kept(options, model, way), kept(options, model, "without"))
    return {**ran, "start": start, "compiles": compiles, "differs": differs}


def prompt_of(options: argparse.Namespace, model: str, way: str) -> dict:
    size = (options.sizes or sizes_of(model))[0]
    wanted = server.Wanted(
        model,
        "ours" if way == "ours" else "eager",
        1,
        options.steps,
        size,
        kept(options, model, way),
        backend=options.backend,
    )
    return server.model_prompt(wanted)


def kept(options: argparse.Namespace, model: str, way: str) -> Path:
    return options.home / f"first-{model}-{way}.pt"


if __name__ == "__main__":
    main()
