"""What it costs to see that a network has not changed: a look before each sampling, and a canary in many steps.

    python benchmarks/watch.py --comfyui CHECKOUT NAME ...

*Look* is the time in which everything that the regions' code can read is compared with what it was. *Canary* is what
one comparison of a block with eager adds, by the share of steps that have one. On a CPU only the look is measured.
"""

from __future__ import annotations

import argparse
import statistics
import time

import models
import step
import torch

LOOKS = 50
STEPS = 40
SIZES = {"sd15": (2, 64, 64), "sdxl": (2, 128, 128), "sd3": (2, 128, 128), "flux": (1, 128, 128)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", required=True)
    parser.add_argument("names", nargs="+", choices=list(SIZES))
    options = parser.parse_args()
    models.use_comfyui(options.comfyui)
    if not torch.cuda.is_available():
        models.fill = lambda network: None  # 5 GB that are never read need not be written
    for name in options.names:
        patcher = models.patcher(name, torch.float16)
        print(f"torch {torch.__version__}, {step.device_name()}, {name}")
        looks(patcher.model.diffusion_model)
        if torch.cuda.is_available():
            canary(name, patcher)


def looks(network: torch.nn.Module) -> None:
    """Print the milliseconds of a look at a network, and of describing it."""
    from compiled_graphs.compiler.hosts.comfy.rules.host import HOST
    from compiled_graphs.compiler.identity.fingerprint import Describer
    from compiled_graphs.compiler.identity.regions import find_regions

    regions = find_regions(network)

    def describe() -> Describer:
        describer = Describer(HOST)
        for region in regions:
            describer.describe(region.module)
        return describer

    first, describer = milliseconds(describe)
    again, _ = milliseconds(describe)
    taken = sorted(milliseconds(describer.watch.holds)[0] for _ in range(LOOKS))
    print(f"  {len(regions)} regions, {sum(1 for _ in network.modules())} modules")
    print(
        f"  look: median {statistics.median(taken):.2f} ms, least {taken[0]:.2f}, most {taken[-1]:.2f}, {LOOKS} times"
    )
    print(f"  describe: first {first:.0f} ms, again {again:.0f} ms")


def canary(name: str, patcher) -> None:
    """Print what a step takes with and without a comparison, called and replayed, and the share of that."""
    from compiled_graphs.compiler.hosts.comfy import compile as host
    from compiled_graphs.compiler.registry.registry import Registry
    from compiled_graphs.compiler.runtime import canary

    step.use_registry(Registry())
    inputs = step.sized(name, SIZES[name], patcher)
    for label, record in (("called", False), ("replayed", True)):
        ours, text = host.compile_model(patcher, host.Request("inductor", record=record))
        plain = step.timed(ours, inputs, STEPS).ms
        every = canary.REPLAYS if record else canary.CALLS / len(host.compiled_model(ours).forwards())
        kept = canary.CALLS, canary.REPLAYS
        canary.CALLS = canary.REPLAYS = 1e-9
        try:
            compared = step.timed(ours, inputs, STEPS).ms
        finally:
            canary.CALLS, canary.REPLAYS = kept
        share = (compared - plain) / every / plain
        print(f"  {label}: {plain:.2f} ms a step, {compared:.2f} with a comparison; one in {every:.0f}: {share:.2%}")
        print(f"  {text.splitlines()[0]}; {host.compiled_model(ours).counters.verifications} comparisons, "
              f"{host.compiled_model(ours).counters.replays} replays")  # fmt: skip


def milliseconds(call):
    start = time.perf_counter()
    result = call()
    return 1000 * (time.perf_counter() - start), result


if __name__ == "__main__":
    main()
