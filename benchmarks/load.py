"""Save the graphs of a model to a file, load them in new processes, and time both.

    python benchmarks/load.py --comfyui CHECKOUT [--dtype float16] NAME

The loading processes have empty Inductor caches. Their clock starts after torch is imported and the model built; in
the second one the imports that ComfyUI's queueing of a prompt sets off are done by then as well.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import models
import step
import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("name", choices=step.SIZES)
    options = parser.parse_args()
    models.use_comfyui(options.comfyui)
    if options.load:
        load(options)
    else:
        save(options)


def save(options: argparse.Namespace) -> None:
    """Compile, write a file, and start the process that loads it."""
    from compiled_graphs.compiler.hosts.comfy import compile as host
    from compiled_graphs.compiler.registry.registry import Registry
    from compiled_graphs.compiler.storage.graph_file import StoredGraph, write_graphs
    from compiled_graphs.compiler.storage.trust import Trust

    step.use_registry(Registry())
    compiled, text = host.compile_model(models.patcher(options.name, getattr(torch, options.dtype)))
    print(f"{options.name}: {text}")
    stored = [StoredGraph.of(graph) for graph in host.graphs_in_use(compiled)]
    start = time.perf_counter()
    data = write_graphs(stored, Trust())
    raw = sum(len(graph.executable) for graph in stored)
    print(f"  file: {len(data) / 1e6:.1f} MB of {raw / 1e6:.1f} MB, written in {time.perf_counter() - start:.2f} s")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "graphs")
        path.write_bytes(data)
        for warm in (False, True):
            environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(Path(folder, f"inductor-{warm}"))}
            command = [sys.executable, __file__, "--comfyui", str(options.comfyui), "--dtype", options.dtype]
            command += ["--warm"] * warm
            subprocess.run([*command, "--load", str(path), options.name], env=environment, check=True)


def load(options: argparse.Namespace) -> None:
    """Load a file into a fresh model and time it and the first two steps."""
    from compiled_graphs.compiler.hosts.comfy import compile as host
    from compiled_graphs.compiler.hosts.comfy import process
    from compiled_graphs.compiler.registry.registry import Registry
    from compiled_graphs.compiler.storage.graph_file import read_graphs
    from compiled_graphs.compiler.storage.trust import Trust

    step.use_registry(Registry())
    if options.warm:
        process.warm_up()
    patcher = models.patcher(options.name, getattr(torch, options.dtype))
    while any(thread.name.startswith("warm up") for thread in threading.enumerate()):
        time.sleep(0.01)
    step.sync()
    start = time.perf_counter()
    graphs = read_graphs(options.load.read_bytes(), Trust())
    read = time.perf_counter() - start
    compiled, text = host.compile_model(patcher, host.Request(graphs=graphs, source="the file"))
    total = time.perf_counter() - start
    label = "new process, imports done" if options.warm else "new process"
    print(f"  {label}: file to installed {total:.2f} s (reading {read:.2f} s): {text}")
    inputs = models.step_inputs(patcher.model, options.name, *step.SIZES[options.name][0])
    for number in ("first", "second"):
        step.sync()
        start = time.perf_counter()
        step.call(compiled, inputs)
        step.sync()
        print(f"  {number} step {time.perf_counter() - start:.3f} s")


if __name__ == "__main__":
    main()
