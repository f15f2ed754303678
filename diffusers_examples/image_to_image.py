"""SDXL image to image with the LCM scheduler at three sizes, from the graphs of text to image."""

from __future__ import annotations

import pipelines
import torch
from common import arguments, provide_graphs, seeded, timed
from diffusers import LCMScheduler, StableDiffusionXLImg2ImgPipeline


def main() -> None:
    options = arguments(__doc__).parse_args()
    pipe = pipelines.sdxl()
    provide_graphs(pipe, options.graphs, options.backend)
    timed("text to image, 64x64", lambda: pipe("a cat", height=64, width=64, num_inference_steps=2))
    scheduler = LCMScheduler.from_config(pipe.scheduler.config)
    other = StableDiffusionXLImg2ImgPipeline(**pipe.components | {"scheduler": scheduler}, add_watermarker=False)
    other.set_progress_bar_config(disable=True)
    for height, width in ((64, 64), (64, 72), (32, 128)):
        image = torch.rand(1, 3, height, width, generator=seeded())
        timed(
            f"image to image, {height}x{width}",
            lambda image=image: other("a cat", image=image, strength=0.5, num_inference_steps=4, generator=seeded()),
        )


if __name__ == "__main__":
    main()
