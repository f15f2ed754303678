"""SDXL's base and refiner, which share a VAE and a text encoder: both compiled, saved and loaded."""

from __future__ import annotations

import pipelines
from common import arguments, provide_graphs, seeded, timed


def main() -> None:
    options = arguments(__doc__).parse_args()
    base = pipelines.sdxl()
    refiner = pipelines.sdxl_refiner(base)
    provide_graphs(base, options.graphs / "base", options.backend)
    provide_graphs(refiner, options.graphs / "refiner", options.backend)
    for height, width in ((64, 64), (64, 96)):
        latents = timed(
            f"base, {height}x{width}",
            lambda size={"height": height, "width": width}: (
                base(
                    "a cat", **size, num_inference_steps=4, denoising_end=0.5, output_type="latent", generator=seeded()
                ).images
            ),
        )
        timed(
            f"refiner, {height}x{width}",
            lambda latents=latents: refiner(
                "a cat", image=latents, num_inference_steps=4, denoising_start=0.5, generator=seeded()
            ),
        )


if __name__ == "__main__":
    main()
