"""What it takes to look at a whole network before a sampling: `python benchmarks/watch.py` with COMFYUI_PATH set.

SDXL's UNet at its real size, without weights. Prints the milliseconds of one look, and of describing it anew.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

sys.argv = sys.argv[:1]  # ComfyUI parses the command line on import
if os.environ.get("COMFYUI_PATH"):
    sys.path.insert(0, os.environ["COMFYUI_PATH"])

import comfy.cli_args  # noqa: E402
import torch  # noqa: E402

comfy.cli_args.args.cpu = not torch.cuda.is_available()
import comfy.ops  # noqa: E402
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel  # noqa: E402
from compiled_graphs.compiler.fingerprint import Describer  # noqa: E402
from compiled_graphs.compiler.hosts.comfy import HOST  # noqa: E402
from compiled_graphs.compiler.region import find_regions  # noqa: E402

SDXL = {
    "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 320, "num_res_blocks": [2, 2, 2],
    "channel_mult": [1, 2, 4], "transformer_depth": [0, 0, 2, 2, 10, 10], "transformer_depth_middle": 10,
    "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10], "context_dim": 2048, "num_head_channels": 64,
    "num_heads": -1, "use_spatial_transformer": True, "use_linear_in_transformer": True, "num_classes": "sequential",
    "adm_in_channels": 2816, "use_checkpoint": False, "legacy": False, "use_temporal_attention": False,
}  # fmt: skip
TIMES = 50


def milliseconds(call) -> float:
    start = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - start)


def main() -> None:
    network = UNetModel(**SDXL, dtype=torch.float16, device="meta", operations=comfy.ops.disable_weight_init)
    regions = find_regions(network)

    def describe() -> Describer:
        describer = Describer(HOST)
        for region in regions:
            describer.describe(region.module)
        return describer

    first = milliseconds(describe)
    again = milliseconds(describe)
    watch = describe().watch
    assert watch.holds()
    looks = sorted(milliseconds(watch.holds) for _ in range(TIMES))
    print(f"{len(regions)} regions, {sum(1 for _ in network.modules())} modules, torch {torch.__version__}")
    print(f"look: median {statistics.median(looks):.2f} ms, least {looks[0]:.2f}, most {looks[-1]:.2f} of {TIMES}")
    print(f"describe: first {first:.0f} ms, again {again:.0f} ms")


if __name__ == "__main__":
    main()
