"""A whole prompt through ComfyUI's executor: load, text, sampling, decoding, picture; eager and compiled.

    python benchmarks/prompt.py --comfyui CHECKOUT [--backend inductor] [--steps 20] [--size 512] [--json FILE]

A checkpoint of SD1.5's real sizes with random weights goes through ComfyUI's own nodes, each workflow in turn:
the first prompt, the same with another seed, another size, another text. *Compiled* has Compile Model and VAE
Speedup; its first prompt compiles what the store lacks, so a second run with --store FOLDER is one after a restart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import models
import torch

SAMPLER = {"cfg": 7.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--store", type=Path, help="folder of compiled graphs; an empty one by default")
    parser.add_argument("--json", type=Path, help="append the figures to this file")
    options = parser.parse_args()
    models.use_comfyui(options.comfyui)
    from compiled_graphs.compiler.common.counters import totals

    home = Path(tempfile.mkdtemp())
    executor = prepare(home, options)
    rows = {}
    for label in ("eager", "compiled"):
        prompts = [
            ("first", workflow(label, options, seed=1)),
            *[(f"seed {seed}", workflow(label, options, seed=seed)) for seed in range(2, 2 + options.repeats)],
            ("another size", workflow(label, options, seed=1, width=options.size + 128, height=options.size - 64)),
            ("another text", workflow(label, options, seed=1, text="a lighthouse in a storm, " * 40)),
        ]
        seconds = {name: run(executor, prompt) for name, prompt in prompts}
        again = [value for name, value in seconds.items() if name.startswith("seed")]
        rows[label] = {name: value for name, value in seconds.items() if not name.startswith("seed")}
        rows[label]["again (median)"] = statistics.median(again)
        print(f"{label}: { ({name: round(value, 3) for name, value in rows[label].items()}) }")
    print(f"{totals.compiles} compiles, {totals.captures} recordings, {totals.replays} replays")
    print(f"again: {rows['eager']['again (median)'] / rows['compiled']['again (median)']:.2f}x")
    if options.json:
        with options.json.open("a") as file:
            file.write(json.dumps({"steps": options.steps, "size": options.size, **rows}) + "\n")


def prepare(home: Path, options: argparse.Namespace):
    """Make a checkpoint, point ComfyUI and our store at it, and return an executor."""
    import compiled_graphs
    import execution
    import folder_paths
    from compiled_graphs.compiler.compile_cache.graph_cache import GraphCache
    from compiled_graphs.compiler.compile_cache.worker_pool import Workers
    from compiled_graphs.compiler.hosts.comfy import process, worker_setup
    from compiled_graphs.compiler.hosts.comfy.rules.host import HOST
    from compiled_graphs.compiler.registry.registry import Registry
    from compiled_graphs.compiler.storage.store import FolderStore

    import nodes

    store = options.store or home / "store"
    store.mkdir(parents=True, exist_ok=True)
    home_registry = Registry(GraphCache(FolderStore(str(store)), workers=Workers(worker_setup.setup, HOST)))
    process.registry = lambda: home_registry
    nodes.NODE_CLASS_MAPPINGS.update(compiled_graphs.nodes.NODE_CLASS_MAPPINGS)
    folder_paths.add_model_folder_path("checkpoints", str(home), is_default=True)
    folder_paths.set_output_directory(str(home))
    write_checkpoint(home / "sd15.safetensors")
    server = SimpleNamespace(client_id=None, last_node_id=None, last_prompt_id=None, send_sync=lambda *args: None)
    return execution.PromptExecutor(server)


@torch.no_grad()
def write_checkpoint(path: Path) -> None:
    """Save SD1.5's UNet, VAE and text encoder, at their sizes and with random weights, in half precision."""
    import comfy.sd1_clip
    import comfy.utils

    unet = models.patcher("sd15", torch.float16).model.diffusion_model
    vae = models.vae("kl", torch.float16).first_stage_model
    text = comfy.sd1_clip.SD1ClipModel(device="cpu", dtype=torch.float32)
    models.fill(text)
    state = {f"model.diffusion_model.{name}": tensor for name, tensor in unet.state_dict().items()}
    state |= {f"first_stage_model.{name}": tensor for name, tensor in vae.state_dict().items()}
    for name, tensor in text.state_dict().items():
        if name.startswith("clip_l.transformer.text_model."):
            state[name.replace("clip_l.", "cond_stage_model.", 1)] = tensor
    comfy.utils.save_torch_file({name: tensor.half().cpu().contiguous() for name, tensor in state.items()}, str(path))


def workflow(
    label: str,
    options: argparse.Namespace,
    seed: int,
    width: int | None = None,
    height: int | None = None,
    text: str = "a lighthouse",
) -> dict:
    """Return an API prompt: text to image, with or without this extension's nodes."""
    size = {"width": width or options.size, "height": height or options.size, "batch_size": 1}
    sampler = {"seed": seed, "steps": options.steps, **SAMPLER}
    model, vae = ["1", 0], ["1", 2]
    prompt = {"1": node("CheckpointLoaderSimple", ckpt_name="sd15.safetensors")}
    if label == "compiled":
        prompt["2"] = node("CG_CompileModel", model=model, backend=options.backend)
        prompt["3"] = node("CG_VAESpeedup", vae=vae, backend=options.backend)
        model, vae = ["2", 0], ["3", 0]
    prompt["4"] = node("CLIPTextEncode", clip=["1", 1], text=text)
    prompt["5"] = node("CLIPTextEncode", clip=["1", 1], text="")
    prompt["6"] = node("EmptyLatentImage", **size)
    links = {"model": model, "positive": ["4", 0], "negative": ["5", 0], "latent_image": ["6", 0]}
    prompt["7"] = node("KSampler", **links, **sampler)
    prompt["8"] = node("VAEDecode", samples=["7", 0], vae=vae)
    prompt["9"] = node("SaveImage", images=["8", 0], filename_prefix=label)
    return prompt


def node(class_type: str, **inputs: object) -> dict:
    return {"class_type": class_type, "inputs": inputs}


def run(executor, prompt: dict) -> float:
    """Return the seconds that a prompt takes. Raises RuntimeError with ComfyUI's message if it fails."""
    start = time.perf_counter()
    executor.execute(prompt, "prompt", {}, ["9"])
    seconds = time.perf_counter() - start
    if not executor.success:
        raise RuntimeError(executor.status_messages[-1][1].get("exception_message"))
    return seconds


if __name__ == "__main__":
    main()
