"""Whole prompts in a real ComfyUI server with its own default flags: seconds, memory, LoRAs, eviction, restarts.

    python benchmarks/server.py --comfyui CHECKOUT [--home FOLDER] [--steps 20] [--pause 0] RUN ...

A RUN is MODEL:WAYS[:FLAGS]. MODEL is sdxl (fp16), flux6 (Flux with 6 + 12 blocks, bf16) or kl (the VAE of SDXL). A
format after the model quantises its blocks: flux6-float8_e4m3fn, flux6-int8_tensorwise, or flux6-gguf_Q4_K if
HOME/custom_nodes has ComfyUI-GGUF and Python has gguf. One server takes WAYS in turn, with commas between: eager, ours
(Compile Model or VAE Speedup), branch (ours with `lora_branch`: LoRAs beside quantised weights) and core
(TorchCompileModel).
FLAGS are ComfyUI's, with + between: sdxl:eager,ours:vram-headroom=75+fast-disk. Each RUN starts a server. Graphs and
weights stay in --home, so a second RUN of `ours` is one after a restart.

Weights are random. Seconds are the server's own, from a prompt's start to its end, the loader's result cached. A
latent is compared with that of `eager`, from the same RUN or an earlier one. One of a quantised model is also compared
with that of the unquantised one, with the same LoRA (`from unquantised`), if `flux6:eager` has run in the same --home:
with `eager` and `ours` that shows what merging a LoRA costs, and with `branch` what its place beside the weights does.
GGUF weights are not those of flux6. `used` is of the whole GPU: while the first RUN of `ours` compiles, worker
processes take 0.7 GiB each. `resident` is GiB of streamed weights that are on the GPU after a sampling, and `pinned`
counts their pages that are still pinned.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from comfy_server import ComfyServer, PromptFailed  # noqa: E402

TEXT = {"sdxl": {"tokens": 77, "width": 2048, "pooled": 1280}, "flux6": {"tokens": 256, "width": 4096, "pooled": 768}}
SIZE, OTHER_SIZE = (1024, 1024), (832, 1216)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--home", type=Path, help="folder for weights, graphs and latents; a new one by default")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds from a server's start to its first prompt")
    parser.add_argument("--json", type=Path, help="append the figures to this file")
    parser.add_argument("--make", help=argparse.SUPPRESS)
    parser.add_argument("runs", nargs="*")
    options = parser.parse_args()
    options.home = options.home or Path(tempfile.mkdtemp())
    if options.make:
        make(options)
        return
    for text in options.runs:
        model, ways, *flags = text.split(":")
        make_missing(options, model)
        measure(options, text, model, ways.split(","), flags[0] if flags else "")


def measure(options: argparse.Namespace, text: str, model: str, ways: list[str], flags: str) -> None:
    """Start a server and run the prompts of each way."""
    nodes = options.home / "custom_nodes" / "bench"
    shutil.copytree(ROOT / "benchmarks" / "server_nodes", nodes, dirs_exist_ok=True)
    arguments = [part for flag in flags.split("+") if flag for part in f"--{flag}".split("=")]
    arguments += ["--disable-api-nodes", "--preview-method", "none", "--disable-auto-launch"]
    if (front := options.home / "front").exists():
        arguments += ["--front-end-root", str(front)]
    try:
        with ComfyServer(str(options.comfyui), options.home, tuple(arguments)) as server:
            time.sleep(options.pause)
            for way in ways:
                row = {"run": text, "way": way, **prompts(options, server, model, way)}
                print(json.dumps(row), flush=True)
                if options.json:
                    with options.json.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    except (RuntimeError, PromptFailed) as error:
        print(json.dumps({"run": text, "failed": str(error)[-1500:]}), flush=True)


def prompts(options: argparse.Namespace, server: ComfyServer, model: str, way: str) -> dict[str, Any]:
    """Run the prompts of one way; return seconds, memory and differences."""

    def run(seed: int, size: tuple[int, int] = SIZE, lora: float | None = None) -> dict[str, Any]:
        kept = options.home / f"{model}-{way}-{seed}.pt"
        build = vae_prompt if model == "kl" else model_prompt
        made = run_prompt(server, build(model, way, seed, options.steps, size, lora, kept))
        differences = {
            "differs": difference(kept, options.home / f"{model}-eager-{seed}.pt"),
            "from unquantised": None
            if model == base_of(model) or is_gguf(model)
            else difference(kept, options.home / f"{base_of(model)}-eager-{seed}.pt"),
        }
        return {**made, **differences}

    first = run(1)
    again = [run(seed) for seed in (2, 3, 4, 5)]
    other = [run(seed, OTHER_SIZE) for seed in (6, 7)]
    loras = [] if model == "kl" else [run(8, lora=1.0), run(9, lora=1.0), run(10, lora=0.5), run(11)]
    plain, changed = [first, *again, *other, *loras[3:]], loras[:3]
    everything = [*plain, *changed]
    row = {
        "first": first["seconds"],
        "again": statistics.median(each["seconds"] for each in again[1:]),
        "other size": [each["seconds"] for each in other],
        "lora on, same, changed, off": [each["seconds"] for each in loras],
        "used": round(again[-1]["used"], 2),
        "resident": round(again[-1]["resident"], 2),
        "pinned": max(each["pinned"] for each in everything),
        "finite": all(each["finite"] for each in everything),
        **{name: largest(plain, name) for name in ("differs", "from unquantised")},
        **{f"lora {name}": largest(changed, name) for name in ("differs", "from unquantised")},
    }
    if way in ("ours", "branch"):
        totals = server.get("/compiled_graphs/registry")["totals"]
        counted = ("compiles", "verifications", "retired", "recordings", "replays", "calls", "reasons")
        row |= {"text": first["text"], **{name: totals[name] for name in counted}}
    return row


def run_prompt(server: ComfyServer, prompt: dict[str, Any]) -> dict[str, Any]:
    """Run a prompt; return its seconds, what Compile Model said, and what BenchKeep saw."""
    entry = server.wait(server.queue(prompt))
    times = {name: message.get("timestamp") for name, message in entry["status"]["messages"]}
    bench = next(output["bench"][0] for output in entry["outputs"].values() if "bench" in output)
    text = next((output["text"] for output in entry["outputs"].values() if "text" in output), None)
    return {"seconds": (times["execution_success"] - times["execution_start"]) / 1000, "text": text, **bench}


def make_missing(options: argparse.Namespace, model: str) -> None:
    """Write a model's weights and a LoRA for it, in another process, unless they are there."""
    if not weights_of(options, model).exists() or not lora_of(options, model).exists():
        command = [sys.executable, str(ROOT / "benchmarks" / "server.py"), "--comfyui", str(options.comfyui)]
        subprocess.run([*command, "--home", str(options.home), "--make", model], check=True)


def largest(runs: list[dict[str, Any]], name: str) -> float | None:
    return max((each[name] for each in runs if each[name] is not None), default=None)


def model_prompt(
    model: str, way: str, seed: int, steps: int, size: tuple[int, int], lora: float | None, kept: Path
) -> dict[str, Any]:
    """Return an API prompt: sampling, with a LoRA or without."""
    base = base_of(model)
    prompt = {
        "1": loader(model),
        "2": node("BenchConditioning", **TEXT[base], seed=1),
        "3": node("BenchConditioning", **TEXT[base], seed=2),
        "4": node(
            "EmptyLatentImage" if base == "sdxl" else "EmptySD3LatentImage",
            width=size[0],
            height=size[1],
            batch_size=1,
        ),
    }
    link = ["1", 0]
    if lora is not None:
        prompt["5"] = node("LoraLoaderModelOnly", model=link, lora_name=f"{base}.safetensors", strength_model=lora)
        link = ["5", 0]
    if way != "eager":
        kind = "TorchCompileModel" if way == "core" else "CG_CompileModel"
        prompt["6"] = node(kind, model=link, backend="inductor", **({"lora_branch": True} if way == "branch" else {}))
        link = ["6", 0]
    sampler = {"seed": seed, "steps": steps, "cfg": 6.0 if base == "sdxl" else 1.0, "denoise": 1.0}
    links = {"model": link, "positive": ["2", 0], "negative": ["3", 0], "latent_image": ["4", 0]}
    prompt["7"] = node("KSampler", **links, **sampler, sampler_name="euler", scheduler="normal")
    prompt["8"] = node("BenchKeep", latent=["7", 0], path=str(kept))
    return prompt


def vae_prompt(
    model: str, way: str, seed: int, steps: int, size: tuple[int, int], lora: float | None, kept: Path
) -> dict[str, Any]:
    """Return an API prompt: decoding of a random latent."""
    prompt = {
        "1": node("VAELoader", vae_name=f"{model}.safetensors"),
        "2": node("BenchLatent", width=size[0], height=size[1], seed=seed),
    }
    link = ["1", 0]
    if way in ("ours", "branch"):
        prompt["6"] = node("CG_VAESpeedup", vae=link)
        link = ["6", 0]
    prompt["7"] = node("VAEDecode", samples=["2", 0], vae=link)
    prompt["8"] = node("BenchKeep", image=["7", 0], path=str(kept))
    return prompt


def loader(model: str) -> dict[str, Any]:
    if is_gguf(model):
        return node("UnetLoaderGGUF", unet_name=f"{model}.gguf")
    return node("UNETLoader", unet_name=f"{model}.safetensors", weight_dtype="default")


def is_gguf(model: str) -> bool:
    return model.partition("-")[2].startswith("gguf_")


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def difference(kept: Path, theirs: Path) -> float | None:
    """Return the relative difference of one latent from another; None if that is not there, or is the same file."""
    import torch

    if kept == theirs or not theirs.exists():
        return None
    ours, expected = torch.load(kept), torch.load(theirs)
    return float((ours - expected).norm() / expected.norm())


def base_of(model: str) -> str:
    """Return the model that another one is, quantised."""
    return model.partition("-")[0]


def lora_of(options: argparse.Namespace, model: str) -> Path:
    return options.home / "models" / "loras" / f"{base_of(model)}.safetensors"


def weights_of(options: argparse.Namespace, model: str) -> Path:
    folder = "vae" if model == "kl" else "diffusion_models"
    return options.home / "models" / folder / f"{model}.{'gguf' if is_gguf(model) else 'safetensors'}"


def make(options: argparse.Namespace) -> None:
    """Write random weights of a model, and a LoRA for it."""
    import models
    import torch

    model = options.make
    base, _, format_ = model.partition("-")
    models.use_comfyui(options.comfyui)
    import safetensors.torch

    if model == "kl":
        network, dtype = models.vae("kl", torch.float32).first_stage_model, torch.float32
    else:
        dtype = torch.float16 if base == "sdxl" else torch.bfloat16
        network = models.patcher(base, dtype).model.diffusion_model
    path = weights_of(options, model)
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in network.state_dict().items()}
    if is_gguf(model):
        write_gguf(path, state, format_.removeprefix("gguf_"))
    else:
        safetensors.torch.save_file(quantized(state, format_) if format_ else state, str(path))
    lora = lora_of(options, model)
    lora.parent.mkdir(parents=True, exist_ok=True)
    if not lora.exists():
        safetensors.torch.save_file(low_rank(state), str(lora))


def quantized(state: dict[str, Any], format_: str) -> dict[str, Any]:
    """Return a checkpoint whose blocks' matrices are in a format of `comfy.quant_ops.QUANT_ALGOS`."""
    import torch
    from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor

    layout = QUANT_ALGOS[format_]["comfy_tensor_layout"]
    options = {"scale": "recalculate"} if format_.startswith("float8") else {}
    note = torch.tensor(list(json.dumps({"format": format_}).encode()), dtype=torch.uint8)
    made = {}
    for name, weight in state.items():
        if weight.ndim != 2 or "block" not in name or not name.endswith(".weight"):
            made[name] = weight
            continue
        parts = QuantizedTensor.from_float(weight, layout, **options).state_dict(name)
        made |= {key: part.contiguous() for key, part in parts.items()}
        made[f"{name.removesuffix('weight')}comfy_quant"] = note.clone()
    return made


def write_gguf(path: Path, state: dict[str, Any], kind: str) -> None:
    """Write a GGUF file whose blocks' matrices are of a type such as Q4_K: random values within a small scale."""
    import gguf
    import numpy as np

    type_ = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[type_]
    scales = {"Q8_0": [0], "Q4_0": [0], "Q5_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [size - 2]}[kind]
    small = np.frombuffer(np.float16(2e-4).tobytes(), np.uint8)
    generator, writer = np.random.default_rng(0), gguf.GGUFWriter(str(path), "flux")
    for name, weight in state.items():
        if weight.ndim != 2 or "block" not in name or not name.endswith(".weight"):
            writer.add_tensor(name, weight.float().numpy().astype(np.float16))
            continue
        data = generator.integers(0, 256, (weight.shape[0], weight.shape[1] // block, size), dtype=np.uint8)
        for place in scales:
            data[..., place : place + 2] = small
        writer.add_tensor(name, data.reshape(weight.shape[0], -1), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def low_rank(state: dict[str, Any], rank: int = 8) -> dict[str, Any]:
    """Return a LoRA for the layers that make queries, keys and values."""
    import torch

    made = {}
    for name, weight in state.items():
        if weight.ndim == 2 and any(part in name for part in ("to_q.", "to_v.", "img_attn.qkv.", "linear1.")):
            base = f"diffusion_model.{name.removesuffix('.weight')}"
            made[f"{base}.lora_up.weight"] = (torch.randn(weight.shape[0], rank) * 0.02).half()
            made[f"{base}.lora_down.weight"] = (torch.randn(rank, weight.shape[1]) * 0.02).half()
    return made


if __name__ == "__main__":
    main()
