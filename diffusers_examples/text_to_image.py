"""Text to image at several sizes, from graphs that the first run saves and the next one loads.

python diffusers_examples/text_to_image.py sdxl        # compiles, saves to ./graphs
python diffusers_examples/text_to_image.py sdxl        # loads
"""

from __future__ import annotations

import pipelines
from common import arguments, provide_graphs, seeded, timed

SIZES = [(64, 64, 1), (64, 96, 1), (128, 32, 1), (64, 64, 4)]
"""Height and width in pixels, and batch: of the narrow models here. Real ones take 1024, 1152, 1536 ..."""


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("model", choices=("sd15", "sdxl", "sd3", "flux"))
    options = parser.parse_args()
    pipe = getattr(pipelines, options.model)()
    provide_graphs(pipe, options.graphs, options.backend)
    for number, (height, width, batch) in enumerate(SIZES):
        size = {"height": height, "width": width, "num_inference_steps": 2, "generator": seeded()}
        if options.model == "flux":
            prompt = pipelines.embeddings(pipe, batch=batch)
        else:
            prompt = {"prompt": "a cat", "num_images_per_prompt": batch}
        label = "first image" if number == 0 else "image"
        timed(f"{label}, {height}x{width}, batch {batch}", lambda size=size, prompt=prompt: pipe(**prompt, **size))


if __name__ == "__main__":
    main()
