"""Text encoders at their real sizes with random weights: eager and compiled, at several lengths of a prompt.

    python benchmarks/encoders.py --comfyui CHECKOUT [--dtype bfloat16] [--repeats 20] [--cast] [NAME ...]
    python benchmarks/encoders.py --comfyui CHECKOUT --write FILE NAME

A plain and a compiled `comfy.sd.CLIP` share the weights, which are made on the GPU, and encode the same tokens in turn:
what a node that encodes a prompt calls, so with ComfyUI's own work around the network. CLIP has rows of 77 tokens, and
a longer prompt has more of them. With --write, one encoder's weights are written to a file instead.
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import step
import torch
import vae

LENGTHS = (77, 128, 256, 512, 200)
ROW = 77
NAMES = ("z_image", "qwen_image", "t5_xxl", "sdxl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--dtype", default="bfloat16", help="of the weights; ComfyUI computes in float32")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--layers", type=int, default=0, help="only so many layers of each encoder, 3 or more")
    parser.add_argument("--cast", action="store_true", help="have graphs cast weights to float32, as ComfyUI does")
    parser.add_argument("--write", type=Path, help="where to write an encoder's weights, instead of timing it")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all if none is given")
    options = parser.parse_args()
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"there is no {unknown.pop()}; choose from {', '.join(NAMES)}")
    if options.write and len(options.names) != 1:
        parser.error("--write wants one encoder")
    models.use_comfyui(options.comfyui)
    if options.write:
        write(options.write, encoder(options.names[0], getattr(torch, options.dtype), options.layers))
        return
    if options.cast:
        from compiled_graphs.compiler.backends.inductor import artifacts

        artifacts.can_split = lambda device: False
    print(f"torch {torch.__version__}, {step.device_name()}, {options.dtype}, {options.backend}")
    for name in options.names or NAMES:
        measure(name, options)
        unload()


@torch.inference_mode()
def measure(name: str, options: argparse.Namespace) -> None:
    """Print a table for one text encoder."""
    from compiled_graphs.compiler.common.counters import totals
    from compiled_graphs.compiler.hosts.comfy import compile as host
    from compiled_graphs.compiler.registry.registry import Registry

    step.use_registry(Registry())
    plain = encoder(name, getattr(torch, options.dtype), options.layers)
    held = sum(p.nbytes for p in plain.cond_stage_model.parameters()) / 2**30
    start = time.perf_counter()
    compiled, text = host.compile_clip(plain, host.Request(options.backend))
    print(f"\n{name}, {held:.1f} GiB: {text}\n  node: {time.perf_counter() - start:.1f} s")
    print("  tokens | eager ms, GiB | ours ms, GiB, first call s, error | eager / ours | compiles")
    tokens = plain.tokenize("word " * 400)
    for length in LENGTHS:
        prompt = {key: cut(rows, length) for key, rows in tokens.items()}
        before = totals.compiles
        reference, _ = plain.encode_from_tokens(prompt, return_pooled=True)
        start = time.perf_counter()
        compiled.encode_from_tokens(prompt)
        first = time.perf_counter() - start
        error = ((compiled.encode_from_tokens(prompt) - reference).norm() / reference.norm()).item()
        eager, eager_peak = timed(plain, prompt, options.repeats)
        ours, peak = timed(compiled, prompt, options.repeats)
        print(f"  {length:>6} | {eager:>8.1f} {eager_peak:>4.2f} | {ours:>8.1f} {peak:>4.2f} {first:>8.2f} "
              f"{error:>12.1e} | {eager / ours:>12.2f} | {totals.compiles - before}")  # fmt: skip
    print(f"  uncompiled calls: {dict(totals.eager_calls)}, retired: {totals.retired}")


def write(path: Path, clip: Any) -> None:
    """Write an encoder's weights as CLIPLoader reads them: of one network, under its own names."""
    import safetensors.torch

    path.parent.mkdir(parents=True, exist_ok=True)
    state = clip.cond_stage_model.state_dict()
    names = {name: name.partition(".transformer.")[2] for name in state}
    state = {names[name]: tensor.cpu().contiguous() for name, tensor in state.items() if names[name]}
    safetensors.torch.save_file(state, str(path))


def cut(rows: list[list], length: int) -> list[list]:
    """Return rows of tokens of this length in all: one, or as many of CLIP's as it takes."""
    if len(rows) == 1:
        return [rows[0][:length]]
    return rows[: -(-length // ROW)]


def timed(clip: Any, prompt: dict[str, list], repeats: int) -> tuple[float, float]:
    """Return the median milliseconds of encoding a prompt, and its peak GiB over the weights."""
    for _ in range(2):  # loads this CLIP's patches
        clip.encode_from_tokens(prompt)
    return vae.timed_calls(lambda: clip.encode_from_tokens(prompt), repeats)


def encoder(name: str, dtype: torch.dtype, layers: int = 0) -> Any:
    """Return a `comfy.sd.CLIP` with every parameter filled; with `layers`, of so many only."""
    import comfy.model_management
    import comfy.sd

    network, tokenizer, configs = kinds(name, dtype)
    device = comfy.model_management.get_torch_device()
    changes = {f"{key}_model_config": {depth: layers} for key, depth in configs.items() if layers}
    target = SimpleNamespace(params={}, clip=network, tokenizer=tokenizer)
    clip = comfy.sd.CLIP(target, model_options={"dtype": dtype, "initial_device": device} | changes)
    models.fill(clip.cond_stage_model)
    return clip


def kinds(name: str, dtype: torch.dtype) -> tuple[type, type, dict[str, str]]:
    """Return the classes of an encoder and its tokenizer, and how each of its networks calls its depth."""
    if name == "sdxl":
        from comfy import sdxl_clip

        depth = "num_hidden_layers"
        return sdxl_clip.SDXLClipModel, sdxl_clip.SDXLTokenizer, {"clip_l": depth, "clip_g": depth}
    if name == "t5_xxl":
        from comfy.text_encoders import pixart_t5

        return pixart_t5.pixart_te(dtype_t5=dtype), pixart_t5.PixArtTokenizer, {"t5xxl": "num_layers"}
    if name == "z_image":
        from comfy.text_encoders import z_image

        return z_image.te(dtype_llama=dtype), z_image.ZImageTokenizer, {"qwen3_4b": "num_hidden_layers"}
    from comfy.text_encoders import qwen_image

    return qwen_image.te(dtype_llama=dtype), qwen_image.QwenImageTokenizer, {"qwen25_7b": "num_hidden_layers"}


def unload() -> None:
    import comfy.model_management

    comfy.model_management.unload_all_models()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
