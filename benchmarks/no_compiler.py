"""Do graphs of a file run where no compiler starts? Compiles in one process, and loads and runs in another.

    python benchmarks/no_compiler.py

In the second process CC and CXX name a program that fails, PATH is empty, and the caches of Inductor and of Triton are
empty. It runs the blocks of a small network at sizes that were not compiled, and compares with eager. Prints JSON with
what was loaded, or with what the graphs still need. The exit status is 0 if all ran without a compiler.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COUNTED = ("compiles", "from_file", "calls", "verifications", "retired")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", help="for the processes that this one starts")
    parser.add_argument("--part", choices=["make", "load"])
    options = parser.parse_args()
    if options.part:
        print(json.dumps((make if options.part == "make" else load)(Path(options.file))))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "bundle.graph.safetensors"))
        made = part("make", file, environment(folder, "first"))
        without = environment(folder, "second") | {"PATH": str(Path(folder, "nothing"))}
        failing = str(Path(folder, "fails.cmd" if os.name == "nt" else "fails"))
        Path(failing).write_text("exit 1\n" if os.name == "nt" else "#!/bin/sh\nexit 1\n")
        os.chmod(failing, 0o700)
        loaded = part("load", file, without | {"CC": failing, "CXX": failing})
    print(json.dumps({"made": made, "loaded": loaded}, indent=2))
    return 0 if loaded.get("ran") else 1


def environment(folder, name):
    """Return variables for a process with caches of its own, and the key of both."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    places = {variable: str(Path(folder, name, cache)) for variable, cache in caches.items()}
    return {**os.environ, **places, "COMPILED_GRAPHS_TRUST": str(Path(folder, "trust"))}


def part(name, file, variables):
    command = [sys.executable, __file__, "--part", name, "--file", file]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-8:]}
    return json.loads(done.stdout.splitlines()[-1])


def package(name):
    """Import a module of this package, whose folder may have any name."""
    sys.path.insert(0, str(ROOT.parent))
    return importlib.import_module(f"{ROOT.name}.compiler.{name}")


def network_and_compiled():
    """Return a small network of a convolution block and an attention block, each twice, and its compiled form."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Maps(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.conv = nn.GroupNorm(4, 32), nn.Conv2d(32, 32, 3, padding=1)

        def forward(self, x):
            return x + self.conv(functional.silu(self.norm(x)))

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

        def forward(self, x):
            q, k, v = (t.unflatten(2, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=2))
            mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            return x + functional.gelu(self.out(mixed))

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.maps = nn.ModuleList(Maps() for _ in range(2))
            self.tokens = nn.ModuleList(Tokens() for _ in range(2))

        def forward(self, x):
            for block in self.maps:
                x = block(x)
            tokens = x.flatten(2).transpose(1, 2)
            for block in self.tokens:
                tokens = block(tokens)
            return tokens

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = Network().to(device).requires_grad_(False)
    backends, host = package("backends"), package("common.host").Host()
    regions = package("identity.regions").find_regions(network)
    target = package("runtime.region_kinds").Target(device, backends.BACKENDS["inductor"], host)
    cache = package("compile_cache.graph_cache").GraphCache()
    return network, package("runtime.compiled_model").CompiledModel(network, regions, target, cache), device


def make(file):
    import torch

    _network, compiled, device = network_and_compiled()
    compiled.prepare(lambda copy, at: copy(torch.empty(at.batch, 32, at.height, at.width, device=device)))
    files, trust = package("storage.graph_file"), package("storage.trust").Trust()
    graphs = [files.StoredGraph.of(graph) for graph in compiled.graphs()]
    file.write_bytes(files.write_graphs(graphs, trust))
    return {
        "graphs": len(graphs),
        "device": str(device),
        "torch": torch.__version__,
        "seconds": compiled.counters.seconds,
    }


def load(file):
    import torch

    network, compiled, device = network_and_compiled()
    files, trust = package("storage.graph_file"), package("storage.trust").Trust()
    start = time.perf_counter()
    refused = [str(text) for text in compiled.load(files.read_graphs(file.read_bytes(), trust))]
    seconds = time.perf_counter() - start
    forwards, x = compiled.forwards(), torch.randn(3, 32, 24, 40, device=device)
    with torch.no_grad():
        expected = network(x)
        for path, forward in forwards.items():
            network.get_submodule(path).forward = forward
        for _ in range(3):
            found = network(x)
    counts = {name: getattr(compiled.counters, name) for name in COUNTED}
    error = ((found - expected).norm() / expected.norm()).item()
    reasons = {str(reason): count for reason, count in compiled.counters.eager_calls.items()}
    backend = package("backends").BACKENDS["inductor"]
    ran = not reasons and not refused and counts["retired"] == 0 and counts["from_file"] == 2 and error < 1e-2
    return {"ran": ran, "seconds": seconds, "error": error, "refused": refused, "uncompiled": reasons, **counts,
            "compiling here": backend.available(device) or "would be possible"}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
