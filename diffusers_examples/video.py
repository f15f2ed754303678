"""Stable Video Diffusion: the frames of a video, whose VAE is compiled for chunks of one length."""

from __future__ import annotations

import pipelines
from common import arguments, provide_graphs, seeded, timed
from PIL import Image


def main() -> None:
    options = arguments(__doc__).parse_args()
    pipe = pipelines.svd()
    provide_graphs(pipe, options.graphs, options.backend)
    for height, width in ((64, 64), (64, 96)):
        image = Image.effect_noise((width, height), 64).convert("RGB")
        size = {"height": height, "width": width, "num_frames": 14, "decode_chunk_size": 14}
        timed(
            f"14 frames, {height}x{width}",
            lambda image=image, size=size: pipe(image, **size, num_inference_steps=2, generator=seeded()),
        )


if __name__ == "__main__":
    main()
