"""Many images over a Ray cluster, from graphs in one store: over all workers each graph is compiled once.

python diffusers_examples/batch.py --store /mnt/graphs --images 64    # on the cluster of RAY_ADDRESS, or here
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from compiled_graphs.fleet import map_prompts


def make_pipe():  # noqa: ANN201  a pipeline of diffusers, which workers import
    import pipelines

    pipe = pipelines.sd15()  # with a real one: StableDiffusionXLPipeline.from_pretrained("...", torch_dtype=...)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", required=True, help="a folder that all machines see, or a URL")
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("images"))
    parser.add_argument("--workers", type=int, help="by default one for each GPU")
    parser.add_argument("--backend", default="auto")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    size = {"height": 64, "width": 64, "num_inference_steps": 2}
    prompts = [{"prompt": "a red fox", "seed": seed, **size} for seed in range(options.images)]
    outcomes = map_prompts(make_pipe, prompts, store=options.store, workers=options.workers, backend=options.backend,
                           on_progress=lambda progress: print(progress, file=sys.stderr))  # fmt: skip
    failed = 0
    for outcome in outcomes:
        if outcome.error:
            failed += 1
            print(f"{outcome.index}: {outcome.error}")
            continue
        outcome.result[0].save(options.out / f"{outcome.index:04}.png")
    print(f"{options.images - failed} images in {options.out}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
