"""A diffusers pipeline at real size: compile and save, then load in a new process, at several resolutions.

    python benchmarks/pipe.py [--steps 8] [--decodes 50]

SDXL's own configuration with random weights in float16, embeddings in place of text encoders. Eager and compiled
run in one process on the same weights; loading runs in another, with empty Inductor caches.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel

SIZES = [(1024, 1024, 1), (1024, 1152, 1), (1536, 1536, 1), (512, 2048, 1), (2048, 512, 1), (1024, 1024, 4)]
"""Height and width in pixels, and batch; guidance doubles the batch."""

IGNORES = ("vae.encoder",)
"""Text to image encodes nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--decodes", type=int, default=50, help="random sizes over which memory is watched")
    parser.add_argument("--load", type=Path, help="(the second process) load from here")
    options = parser.parse_args()
    if options.load:
        load(options.load)
        return
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, float16")
    with tempfile.TemporaryDirectory() as folder:
        compile_and_save(Path(folder, "graphs"), options)
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "TRITON_CACHE_DIR": f"{folder}/triton",
        }
        environment |= {"COMPILED_GRAPHS_STORE": f"{folder}/store"}
        command = [sys.executable, __file__, "--load", f"{folder}/graphs"]
        print(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def compile_and_save(folder: Path, options: argparse.Namespace) -> None:
    """Print times of eager and compiled images, and of compiling."""
    from compiled_graphs.compiler.common.counters import totals
    from compiled_graphs.diffusers import compile_pipe, restore_pipe, save_pipe

    os.environ.setdefault("COMPILED_GRAPHS_STORE", str(folder.with_name("store")))
    pipe = pipeline()
    start = time.perf_counter()
    saved = save_pipe(compile_pipe(pipe, ignores=IGNORES), folder, ignores=IGNORES)
    print(f"compile and save: {time.perf_counter() - start:.1f} s, {sum(part.graphs for part in saved)} graphs, "
          f"{sum(part.size for part in saved) / 1e6:.1f} MB, {totals.compiles} compiled")  # fmt: skip
    print("  height, width, batch |  eager s |   ours s, first call s | eager / ours | compiles | relative error")
    for size in SIZES:
        compile_pipe(pipe, ignores=IGNORES)
        before = totals.compiles
        first, _ = timed(pipe, size, options.steps)
        ours = statistics.median(timed(pipe, size, options.steps)[0] for _ in range(3))
        image = timed(pipe, size, options.steps)[1]
        compiled = totals.compiles - before
        restore_pipe(pipe)
        timed(pipe, size, options.steps)
        eager = statistics.median(timed(pipe, size, options.steps)[0] for _ in range(3))
        reference = timed(pipe, size, options.steps)[1]
        error = ((image - reference).norm() / reference.norm()).item()
        print(f"  {size!s:>20} | {eager:>8.3f} | {ours:>8.3f} {first:>8.3f} | {eager / ours:>8.2f} | {compiled} | "
              f"{error:.1e}")  # fmt: skip
    compile_pipe(pipe, ignores=IGNORES)
    sizes, held = random.Random(0), []
    for _ in range(options.decodes):
        timed(pipe, (sizes.randint(32, 128) * 8, sizes.randint(32, 128) * 8, 1), 1)
        held.append(torch.cuda.memory_allocated() / 2**30)
    print(f"  {options.decodes} random sizes: held {held[4]:.3f} GiB after 5, {held[-1]:.3f} at the end")
    print(f"  eager calls: {dict(totals.eager_calls)}, retired: {totals.retired}")


def load(folder: Path) -> None:
    """Print how long it takes to load and to make the first image, in a process that has done neither."""
    from compiled_graphs.compiler.common.counters import totals
    from compiled_graphs.diffusers import load_pipe

    pipe = pipeline()
    start = time.perf_counter()
    parts = load_pipe(pipe, folder, ignores=IGNORES)
    loaded = time.perf_counter() - start
    first, _ = timed(pipe, SIZES[0], 1)
    second, _ = timed(pipe, SIZES[1], 1)
    print(f"new process: load {loaded:.2f} s, first image of one step {first:.2f} s, another size {second:.2f} s, "
          f"{totals.compiles} compiled, {totals.from_file} from file, {parts}")  # fmt: skip


def timed(pipe: StableDiffusionXLPipeline, size: tuple[int, int, int], steps: int) -> tuple[float, torch.Tensor]:
    """Return the seconds of an image from embeddings, and the image."""
    height, width, batch = size
    make = {"device": "cuda", "dtype": torch.float16, "generator": torch.Generator("cuda").manual_seed(0)}
    text, pooled = torch.randn(batch, 77, 2048, **make), torch.randn(batch, 1280, **make)
    torch.cuda.synchronize()
    start = time.perf_counter()
    image = pipe(
        prompt_embeds=text, pooled_prompt_embeds=pooled,
        negative_prompt_embeds=-text, negative_pooled_prompt_embeds=-pooled,
        height=height, width=width, num_inference_steps=steps, generator=make["generator"], output_type="pt",
    ).images  # fmt: skip
    torch.cuda.synchronize()
    return time.perf_counter() - start, image.float()


def pipeline() -> StableDiffusionXLPipeline:
    """Return SDXL's networks in float16 on the GPU, every parameter filled."""
    torch.set_default_dtype(torch.float16)
    with torch.device("cuda"):
        unet = UNet2DConditionModel(
            sample_size=128,
            block_out_channels=(320, 640, 1280),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=(1, 2, 10),
            attention_head_dim=(5, 10, 20),
            cross_attention_dim=2048,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
        )
        vae = AutoencoderKL(
            block_out_channels=(128, 256, 512, 512),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=2,
            scaling_factor=0.13025,
            force_upcast=True,
        )
    torch.set_default_dtype(torch.float32)
    pipe = StableDiffusionXLPipeline(
        vae=vae, unet=unet, scheduler=EulerDiscreteScheduler(steps_offset=1), text_encoder=None, text_encoder_2=None,
        tokenizer=None, tokenizer_2=None, add_watermarker=False,
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


if __name__ == "__main__":
    main()
