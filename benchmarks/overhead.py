"""What a call costs on the host beside the graph itself: guards, plans and arguments, with graphs that do nothing.

    python benchmarks/overhead.py --comfyui CHECKOUT NAME ...

Each region of a model at its real size is called with a step's own arguments; its graph returns results that were
allocated before. Nothing is computed, so this measures a CPU, on any machine. *Recorded* is what a replayed step asks
for the whole network at once, and how much of it before the GPU has its work.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence

import models
import step
import torch

REPEATS = 300


class Nothing:
    """Satisfies `Executable`: gives what the region gave when it was traced, at the sizes of the call."""

    def __init__(self) -> None:
        self.results: Sequence[torch.Tensor] = ()

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        return self.results

    def to_bytes(self) -> bytes:
        return b""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", required=True)
    parser.add_argument("names", nargs="+", choices=["sd15", "sdxl"])
    options = parser.parse_args()
    models.use_comfyui(options.comfyui)
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    models.fill = lambda network: None  # 5 GB that are never read need not be written
    for name in options.names:
        measure(name)


@torch.inference_mode()
def measure(name: str) -> None:
    """Print microseconds for each kind of region, for a mean region, and for a recorded step."""
    from compiled_graphs.compiler.backends import BACKENDS
    from compiled_graphs.compiler.backends.eager.backend import EagerBackend
    from compiled_graphs.compiler.hosts.comfy import compile as host
    from compiled_graphs.compiler.registry.registry import Registry

    backend = EagerBackend()
    backend.compile = lambda exported: Nothing()
    BACKENDS["nothing"] = backend
    step.use_registry(Registry())
    patcher = models.patcher(name, torch.float32)
    compiled, text = host.compile_model(patcher, host.Request("nothing", verify=False))
    print(f"torch {torch.__version__}, {name}: {text}")
    network = patcher.model.diffusion_model
    forwards = compiled.object_patches["diffusion_model.forward"].compiled.forwards()
    taken: dict[str, list[float]] = defaultdict(list)
    for path, forward in forwards.items():
        block = network.get_submodule(path)
        weights = sum(1 for _ in block.parameters())
        taken[f"{type(block).__name__}, {weights} weights"].append(microseconds(forward, block))
    for kind, values in taken.items():
        print(f"  {kind}: {statistics.median(values):.1f} us ({len(values)} blocks)")
    total = sum(map(sum, taken.values()))
    print(f"  mean {total / len(forwards):.1f} us, {total / 1000:.2f} ms a step")
    whole, before = recorded(network, patcher, name)
    print(f"  recorded: {whole / 1000:.2f} ms a step, {before / 1000:.2f} of it before the replay")


def microseconds(forward, block) -> float:
    """Return what a call of a region takes beside its graph."""
    x = torch.empty(2, width(block), 8, 12)
    if hasattr(block, "transformer_blocks"):
        context = torch.empty(2, 77, block.transformer_blocks[0].attn2.to_k.in_features)
        args, kwargs = (x,), {"context": context, "transformer_options": {}}
    else:
        args, kwargs = (x, torch.empty(2, block.emb_channels)), {}
    for entry in (entry for entries in forward._kind.graphs.values() for entry in entries):
        entry.graph.executable.results = [torch.empty(1) for wanted in entry.graph.spec.outputs if wanted]
    for _ in range(20):
        forward(*args, **kwargs)
    return timed(lambda: forward(*args, **kwargs))


def width(block) -> int:
    return block.in_channels if hasattr(block, "in_channels") else block.channels


def recorded(network, patcher, name: str) -> tuple[float, float]:
    """Return microseconds that a recorded step takes on the host, its replay taken out, and those until its replay."""
    from compiled_graphs.compiler.common.counters import Counters
    from compiled_graphs.compiler.hosts.comfy.rules.host import HOST
    from compiled_graphs.compiler.runtime.running_call import RunningCall
    from compiled_graphs.compiler.runtime.step_replay import StepReplay

    class Silent:
        def __init__(self, call, pool) -> None:
            call()

        def replay(self) -> None:
            replayed.append(time.perf_counter())

    begun: list[float] = []
    replayed: list[float] = []
    result = torch.ones(2, 4, 8, 12)
    recordings = StepReplay(network, HOST, torch.device("cpu"), Counters(), Silent)
    context = torch.empty(2, 1, models.CONFIGS[name]["context_dim"])  # to copy inputs is the GPU's work
    kwargs = {"context": context, "control": None, "transformer_options": dict(step.SAMPLING)}
    args = torch.empty(2, 4, 8, 12), torch.ones(2)

    def call() -> torch.Tensor:
        begun.append(time.perf_counter())
        return recordings.serve(lambda *args, **kwargs: result, args, kwargs, RunningCall(None))

    for _ in range(20):
        call()
    assert recordings.counters.replays, recordings.reason
    begun.clear()
    replayed.clear()
    return timed(call), statistics.median(end - start for start, end in zip(begun, replayed, strict=True)) * 1e6


def timed(call) -> float:
    """Return the median microseconds of a call, in rounds."""
    rounds = []
    for _ in range(9):
        start = time.perf_counter()
        for _ in range(REPEATS):
            call()
        rounds.append((time.perf_counter() - start) / REPEATS * 1e6)
    return statistics.median(rounds)


if __name__ == "__main__":
    main()
