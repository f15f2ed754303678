"""Whole prompts in a real ComfyUI server with its own default flags: seconds, memory, LoRAs, eviction, restarts.

    python benchmarks/server.py --comfyui CHECKOUT [--home FOLDER] [--steps 20] [--pause 0] [--depth N|whole]
        [--sizes SIZE,OTHER] [--again 4] [--long STEPS] [--no-lora] [--encode] [--control]
        [--attention NAME] [--backend inductor] [--json FILE] RUN ...

A RUN is MODEL:WAYS[:FLAGS]. MODEL is one of these:

    sdxl        fp16, whole                     z_image     Z-Image, whole
    flux6       Flux, 6 + 12 of 19 + 38 blocks  klein       FLUX.2 Klein 4B, whole
    chroma      6 + 12 of 19 + 38 blocks        qwen_image  Qwen-Image, 15 of 60 blocks
    wan22       Wan 2.2 14B, one expert of text to video, 10 of 40 blocks
    ltx2        LTX-2, video and sound as in core's workflow, 12 of 48 blocks; ltx2_video is the video alone

    kl, wan_vae, ltx2_vae, hunyuan_vae, hunyuan15_vae: a decode, of images of SDXL or of videos

The models but sdxl are in bf16, every layer has its real width, and the weights are at most 11.5 GiB. --depth gives
all but sdxl another number of blocks of each kind, and --depth whole all that people have, up to 38 GiB. A format
after the model quantises the attention and feed-forward matrices of its blocks, and of sdxl and flux6 all matrices of
the blocks: flux6-float8_e4m3fn, flux6-int8_tensorwise, or flux6-gguf_Q4_K if HOME/custom_nodes has ComfyUI-GGUF and
Python has gguf. One server takes WAYS in turn, with commas between: eager, ours (Compile Model or VAE Speedup),
branch (ours with `lora_branch`: LoRAs beside quantised weights) and core (TorchCompileModel).
FLAGS are ComfyUI's, with + between: sdxl:eager,ours:vram-headroom=75+fast-disk. Each RUN starts a server. Graphs and
weights stay in --home, so a second RUN of `ours` is one after a restart.

Sizes, the number of tokens and cfg are in `server_models.py`. Images have 1024x1024 and then 832x1216, videos another
number of frames; --sizes 832x480x81,832x480x49 are others. Where a model has guidance and a negative prompt of another
length (Qwen-Image and Chroma do not pad their text), ComfyUI calls it twice a step instead of with a batch of two.

Weights are random. Seconds are the server's own, from a prompt's start to when its result is on the CPU, the loader's
result cached. In older results the time to write it to a file is a part of them. A latent is compared with that of
`eager`, from the same RUN or an earlier one. One of a quantised model is also compared with that of the unquantised
one, with the same LoRA (`from unquantised`), if `flux6:eager` has run in the same --home: with `eager` and `ours` that
shows what merging a LoRA costs, and with `branch` what its place beside the weights does. GGUF weights are not those of
flux6. With --long 100, prompts of 100 steps give `step ms`, without what a prompt takes besides its steps. With
--encode, an encoder makes the text of z_image and qwen_image, another text for each prompt; for `ours`, CLIP Speedup
compiles it. With --control, sdxl has a ControlNet; for `ours`, ControlNet Speedup compiles it. With --attention sage, a
node chooses that function of ComfyUI's for the model, as KJNodes' SageAttention does. `lora changes` is how far a LoRA
moves a latent. `used` is of the whole GPU: while the first RUN of `ours` compiles, worker processes take 0.7 GiB each.
`reserved` is what PyTorch has of it. `resident` is GiB of streamed weights that are on the GPU after a sampling, and
`pinned` counts their pages that are still pinned.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server_models import (
    MODELS,
    VAES,
    Model,
    Size,
    base_of,
    depth_of,
    file_of,
    format_of,
    is_gguf,
    name_of,
    sizes_of,
    with_depth,
)

ROOT = Path(__file__).resolve().parents[1]
CONTROL_NET = "sdxl_control"
"""The name of its file of weights."""
sys.path.insert(0, str(ROOT / "scripts"))

from comfy_server import ComfyServer, PromptFailed  # noqa: E402


@dataclass(frozen=True)
class Wanted:
    """What a prompt is to do, and where its latent goes."""

    model: str
    way: str
    seed: int
    steps: int
    size: Size
    kept: Path
    lora: float | None = None
    backend: str = "inductor"
    encodes: bool = False
    """Whether a text encoder makes the text."""
    controlled: bool = False
    """Whether there is a ControlNet."""
    attention: str = ""
    """The attention function that a node chooses, by ComfyUI's name for it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--home", type=Path, help="folder for weights, graphs and latents; a new one by default")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds from a server's start to its first prompt")
    parser.add_argument("--depth", type=depth, help='blocks of each kind, or "whole"; see above for the default')
    parser.add_argument("--sizes", type=sizes, help="a first size and another one, such as 512x512,256x768")
    parser.add_argument(
        "--again", type=int, default=4, help="prompts after the first one, 2 or more: the first of them is not counted"
    )
    parser.add_argument("--long", type=int, help="run prompts of so many steps too, which tell what a step takes")
    parser.add_argument("--encode", action="store_true", help="have a text encoder make the text of each prompt")
    parser.add_argument("--no-lora", action="store_true", help="leave out the prompts with a LoRA")
    parser.add_argument("--control", action="store_true", help="give sdxl a ControlNet")
    parser.add_argument("--attention", default="", help="have a node choose this attention function, such as sage")
    parser.add_argument("--backend", default="inductor", help="of Compile Model; eager runs graphs without a compiler")
    parser.add_argument("--json", type=Path, help="append the figures to this file")
    parser.add_argument("--make", help=argparse.SUPPRESS)
    parser.add_argument("runs", nargs="*")
    options = parser.parse_args()
    if options.long is not None and options.long <= options.steps:
        parser.error("--long is to be more than --steps")
    if options.again < 2:
        parser.error("--again is to be 2 or more: the first of them is not counted")
    if options.sizes and len(options.sizes) != 2:
        parser.error("--sizes wants two sizes, with a comma between")
    options.home = options.home or Path(tempfile.mkdtemp())
    if options.make:
        make(options)
        return
    for text in options.runs:
        model, ways, *flags = text.split(":")
        if options.encode and not (name_of(model) in MODELS and MODELS[name_of(model)].text.encoder):
            parser.error(f"--encode is for z_image and qwen_image, not for {model}")
        if options.control and model != "sdxl":
            parser.error(f"--control is for sdxl, not for {model}")
        if options.sizes and any(len(size) != len(sizes_of(model)[0]) for size in options.sizes):
            parser.error(f"--sizes of {model} are like those of {sizes_of(model)}")
        model = with_depth(model, options.depth)
        make_missing(options, model)
        if options.encode:
            make_encoder(options, model)
        if options.control:
            make_missing(options, CONTROL_NET)
        measure(options, text, model, ways.split(","), flags[0] if flags else "")


def depth(text: str) -> int | str:
    return text if text == "whole" else int(text)


def sizes(text: str) -> tuple[Size, ...]:
    return tuple(tuple(int(side) for side in size.split("x")) for size in text.split(","))


def measure(options: argparse.Namespace, text: str, model: str, ways: list[str], flags: str) -> None:
    """Start a server and run the prompts of each way."""
    arguments = [part for flag in flags.split("+") if flag for part in f"--{flag}".split("=")]
    try:
        with started(options, *arguments) as server:
            time.sleep(options.pause)
            for way in ways:
                tell(options, {"run": text, "way": way, **prompts(options, server, model, way)})
    except (RuntimeError, PromptFailed) as error:
        print(json.dumps({"run": text, "failed": str(error)[-1500:]}), flush=True)


@contextmanager
def started(options: argparse.Namespace, *flags: str) -> Iterator[ComfyServer]:
    """Start a server with these flags and the nodes of the benchmarks."""
    nodes = options.home / "custom_nodes" / "bench"
    shutil.copytree(ROOT / "benchmarks" / "server_nodes", nodes, dirs_exist_ok=True)
    with ComfyServer(str(options.comfyui), options.home, (*flags, *flags_of(options.home))) as server:
        yield server


def flags_of(home: Path) -> list[str]:
    """Return what each ComfyUI is started with. The folder may have a frontend, for where none is installed."""
    front = ["--front-end-root", str(home / "front")] if (home / "front").exists() else []
    return ["--disable-api-nodes", "--preview-method", "none", "--disable-auto-launch", *front]


def tell(options: argparse.Namespace, row: dict[str, Any]) -> None:
    """Print a row, and append it to the file of `--json`."""
    print(json.dumps(row), flush=True)
    if options.json:
        with options.json.open("a") as file:
            file.write(json.dumps(row) + "\n")


def prompts(options: argparse.Namespace, server: ComfyServer, model: str, way: str) -> dict[str, Any]:
    """Run the prompts of one way; return seconds, memory and differences."""

    size, other_size = options.sizes or sizes_of(model)

    def kept(of: str, way: str, seed: int, size: Size, lora: float | None, steps: int) -> Path:
        named = {"encoded": options.encode, "controlled": options.control, options.attention: options.attention}
        asked = [name for name, is_asked in named.items() if is_asked]
        parts = (of, way, seed, f"{steps}steps", "x".join(map(str, size)), lora, *asked)
        return options.home / f"{'-'.join(str(part) for part in parts if part is not None)}.pt"

    def run(seed: int, size: Size = size, lora: float | None = None, steps: int = options.steps) -> dict[str, Any]:
        path = kept(model, way, seed, size, lora, steps)
        build = vae_prompt if model in VAES else model_prompt
        extras = {"encodes": options.encode, "controlled": options.control, "attention": options.attention}
        wanted = Wanted(model, way, seed, steps, size, path, lora, options.backend, **extras)
        made = run_prompt(server, build(wanted))
        differences = {
            "differs": difference(path, kept(model, "eager", seed, size, lora, steps)),
            "from unquantised": None
            if model == base_of(model) or is_gguf(model)
            else difference(path, kept(base_of(model), "eager", seed, size, lora, steps)),
        }
        return {**made, **differences, "path": path}

    first = run(1)
    again = [run(seed) for seed in range(20, 20 + options.again)]
    other = [run(seed, other_size) for seed in (6, 7)]
    long = [run(seed, steps=options.long) for seed in (11, 12, 13)] if options.long and model not in VAES else []
    loras = [] if model in VAES or options.no_lora else [run(8, lora=1.0), run(9, lora=1.0), run(10, lora=0.5), run(10)]
    plain, changed = [first, *again, *other, *loras[3:]], loras[:3]
    everything = [*plain, *changed]
    row = {
        "first": first["seconds"],
        "again": median_seconds(again[1:]),
        "other size": [each["seconds"] for each in other],
        "lora on, same, changed, off": [each["seconds"] for each in loras],
        "used": round(again[-1]["used"], 2),
        "reserved": round(again[-1]["reserved"], 2),
        "resident": round(again[-1]["resident"], 2),
        "pinned": max(each["pinned"] for each in everything),
        "finite": all(each["finite"] for each in everything),
        **{name: largest(plain, name) for name in ("differs", "from unquantised")},
        **{f"lora {name}": largest(changed, name) for name in ("differs", "from unquantised")},
        "lora changes": difference(loras[2]["path"], loras[3]["path"]) if loras else None,
    }
    if long:
        row["step ms"] = 1000 * (median_seconds(long) - row["again"]) / (options.long - options.steps)
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
    return {"seconds": bench["at"] - times["execution_start"] / 1000, "text": text, **bench}


def make_missing(options: argparse.Namespace, model: str) -> None:
    """Write a model's weights and a LoRA for it, in another process, unless they are there."""
    wanted = [weights_of(options, model), *([lora_of(options, model)] if name_of(model) in MODELS else [])]
    if not all(path.exists() for path in wanted):
        command = [sys.executable, str(ROOT / "benchmarks" / "server.py"), "--comfyui", str(options.comfyui)]
        subprocess.run([*command, "--home", str(options.home), "--make", model], check=True)


def make_encoder(options: argparse.Namespace, model: str) -> None:
    """Write random weights of a model's text encoder, in another process, unless they are there."""
    if not encoder_of(options, model).exists():
        command = [sys.executable, str(ROOT / "benchmarks" / "encoders.py"), "--comfyui", str(options.comfyui)]
        subprocess.run([*command, "--write", str(encoder_of(options, model)), name_of(model)], check=True)


def median_seconds(runs: list[dict[str, Any]]) -> float:
    return statistics.median(each["seconds"] for each in runs)


def largest(runs: list[dict[str, Any]], name: str) -> float | None:
    return max((each[name] for each in runs if each[name] is not None), default=None)


def model_prompt(wanted: Wanted) -> dict[str, Any]:
    """Return an API prompt: sampling, with a LoRA or without."""
    model = MODELS[name_of(wanted.model)]
    prompt = {
        "1": loader(wanted.model),
        **(encoded_text(wanted) if wanted.encodes else random_text(model)),
        "4": node(model.latent, **dict(zip(("width", "height", "length"), wanted.size)), batch_size=1),
    }
    latent = ["4", 0]
    if model.has_sound:
        prompt["10"] = node("BenchSound", length=wanted.size[2])
        prompt["11"] = node("LTXVConcatAVLatent", video_latent=latent, audio_latent=["10", 0])
        latent = ["11", 0]
    link = ["1", 0]
    if wanted.lora is not None:
        lora = f"{base_of(file_of(wanted.model))}.safetensors"
        prompt["5"] = node("LoraLoaderModelOnly", model=link, lora_name=lora, strength_model=wanted.lora)
        link = ["5", 0]
    if wanted.attention:
        prompt["9"] = node("BenchAttention", model=link, name=wanted.attention)
        link = ["9", 0]
    if wanted.way == "core":
        prompt["6"] = node("TorchCompileModel", model=link, backend="inductor")
        link = ["6", 0]
    elif wanted.way != "eager":
        branch = {"lora_branch": True} if wanted.way == "branch" else {}
        prompt["6"] = node("CG_CompileModel", model=link, backend=wanted.backend, **branch)
        link = ["6", 0]
    positive, negative = ["2", 0], ["3", 0]
    if wanted.controlled:
        prompt |= control(wanted)
        positive, negative = ["15", 0], ["15", 1]
    sampler = {"seed": wanted.seed, "steps": wanted.steps, "cfg": model.cfg, "denoise": 1.0}
    links = {"model": link, "positive": positive, "negative": negative, "latent_image": latent}
    prompt["7"] = node("KSampler", **links, **sampler, sampler_name="euler", scheduler="normal")
    made = ["7", 0]
    if model.has_sound:
        prompt["12"] = node("LTXVSeparateAVLatent", av_latent=made)
        made = ["12", 0]
    prompt["8"] = node("BenchKeep", latent=made, path=str(wanted.kept))
    return prompt


def control(wanted: Wanted) -> dict[str, Any]:
    """Return nodes that apply a ControlNet, the last of which is 15."""
    width, height, *_ = wanted.size
    nodes = {
        "13": node("ControlNetLoader", control_net_name=f"{CONTROL_NET}.safetensors"),
        "14": node("EmptyImage", width=width, height=height, batch_size=1, color=0x336699),
    }
    link = ["13", 0]
    if wanted.way in ("ours", "branch"):
        nodes["16"] = node("CG_ControlNetSpeedup", control_net=link, backend=wanted.backend)
        link = ["16", 0]
    applied = {"positive": ["2", 0], "negative": ["3", 0], "control_net": link, "image": ["14", 0]}
    range_ = {"strength": 0.5, "start_percent": 0.0, "end_percent": 1.0}
    return {**nodes, "15": node("ControlNetApplyAdvanced", **applied, **range_)}


def random_text(model: Model) -> dict[str, Any]:
    """Return the nodes 2 and 3 with random numbers for the text."""
    return {
        "2": node("BenchConditioning", **model.text.inputs(is_negative=False), seed=1),
        "3": node("BenchConditioning", **model.text.inputs(is_negative=True), seed=2),
    }


def encoded_text(wanted: Wanted) -> dict[str, Any]:
    """Return the nodes 2 and 3 with a text of this seed, and the text encoder they want."""
    name = name_of(wanted.model)
    nodes = {"20": node("CLIPLoader", clip_name=f"{name}.safetensors", type=MODELS[name].text.encoder)}
    link = ["20", 0]
    if wanted.way in ("ours", "branch"):
        nodes["21"] = node("CG_CLIPSpeedup", clip=link, backend=wanted.backend)
        link = ["21", 0]
    words = f"{wanted.seed}: {'a lighthouse at the sea in the evening, ' * 6}"
    return {
        **nodes,
        "2": node("CLIPTextEncode", clip=link, text=words),
        "3": node("CLIPTextEncode", clip=link, text="blurred"),
    }


def vae_prompt(wanted: Wanted) -> dict[str, Any]:
    """Return an API prompt: decoding of a random latent."""
    prompt = {
        "1": node("VAELoader", vae_name=f"{wanted.model}.safetensors"),
        "2": node("BenchLatent", shape=json.dumps(VAES[wanted.model].latent_shape(wanted.size)), seed=wanted.seed),
    }
    link = ["1", 0]
    if wanted.way in ("ours", "branch"):
        prompt["6"] = node("CG_VAESpeedup", vae=link, backend=wanted.backend)
        link = ["6", 0]
    prompt["7"] = node("VAEDecode", samples=["2", 0], vae=link)
    prompt["8"] = node("BenchKeep", image=["7", 0], path=str(wanted.kept))
    return prompt


def loader(model: str) -> dict[str, Any]:
    if is_gguf(model):
        return node("UnetLoaderGGUF", unet_name=f"{file_of(model)}.gguf")
    return node("UNETLoader", unet_name=f"{file_of(model)}.safetensors", weight_dtype="default")


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def difference(kept: Path, theirs: Path) -> float | None:
    """Return the relative difference of one latent from another; None if that is not there, or is the same file."""
    import torch

    if kept == theirs or not theirs.exists():
        return None
    ours, expected = torch.load(kept), torch.load(theirs)
    return float((ours - expected).norm() / expected.norm())


def lora_of(options: argparse.Namespace, model: str) -> Path:
    return options.home / "models" / "loras" / f"{base_of(file_of(model))}.safetensors"


def encoder_of(options: argparse.Namespace, model: str) -> Path:
    return options.home / "models" / "text_encoders" / f"{name_of(model)}.safetensors"


def weights_of(options: argparse.Namespace, model: str) -> Path:
    folder = "vae" if model in VAES else "controlnet" if model == CONTROL_NET else "diffusion_models"
    return options.home / "models" / folder / f"{file_of(model)}.{'gguf' if is_gguf(model) else 'safetensors'}"


def make(options: argparse.Namespace) -> None:
    """Write random weights of a model, and a LoRA for it."""
    import models
    import torch

    models.use_comfyui(options.comfyui)
    import safetensors.torch

    path = weights_of(options, options.make)
    path.parent.mkdir(parents=True, exist_ok=True)
    if options.make in VAES or options.make == CONTROL_NET:
        network = (
            models.control_net(torch.float16)
            if options.make == CONTROL_NET
            else models.vae(VAES[options.make].network, torch.float32).first_stage_model
        )
        state = {name: tensor.cpu().contiguous() for name, tensor in network.state_dict().items()}
        safetensors.torch.save_file(state, str(path))
        return
    name, format_ = name_of(file_of(options.make)), format_of(options.make)
    model, dtype = MODELS[name], getattr(torch, MODELS[name].dtype)
    network = models.patcher(name, dtype, depth_of(options.make)).model.diffusion_model
    state = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in network.state_dict().items()}
    if is_gguf(options.make):
        write_gguf(path, state, model.quantised, format_.removeprefix("gguf_"))
    else:
        made = quantized(state, model.quantised, format_) if format_ else state
        safetensors.torch.save_file(made, str(path), models.metadata(name))
    lora = lora_of(options, options.make)
    lora.parent.mkdir(parents=True, exist_ok=True)
    if not lora.exists():
        safetensors.torch.save_file(low_rank(state, model.adapted), str(lora))


def quantized(state: dict[str, Any], which: str, format_: str) -> dict[str, Any]:
    """Return a checkpoint with matrices in a format of `comfy.quant_ops.QUANT_ALGOS`: those that a pattern fits."""
    import torch
    from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor

    layout = QUANT_ALGOS[format_]["comfy_tensor_layout"]
    options = {"scale": "recalculate"} if format_.startswith("float8") else {}
    note = torch.tensor(list(json.dumps({"format": format_}).encode()), dtype=torch.uint8)
    made = {}
    for name, weight in state.items():
        if not is_matrix(name, weight, which):
            made[name] = weight
            continue
        parts = QuantizedTensor.from_float(weight, layout, **options).state_dict(name)
        made |= {key: part.contiguous() for key, part in parts.items()}
        made[f"{name.removesuffix('weight')}comfy_quant"] = note.clone()
    return made


def is_matrix(name: str, weight: Any, which: str) -> bool:
    return weight.ndim == 2 and name.endswith(".weight") and re.search(which, name) is not None


def write_gguf(path: Path, state: dict[str, Any], which: str, kind: str) -> None:
    """Write a GGUF file with matrices of a type such as Q4_K: random values within a small scale."""
    import gguf
    import numpy as np

    type_ = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[type_]
    scales = {"Q8_0": [0], "Q4_0": [0], "Q5_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [size - 2]}[kind]
    small = np.frombuffer(np.float16(2e-4).tobytes(), np.uint8)
    generator, writer = np.random.default_rng(0), gguf.GGUFWriter(str(path), "flux")
    for name, weight in state.items():
        if not is_matrix(name, weight, which):
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


def low_rank(state: dict[str, Any], which: str, rank: int = 8) -> dict[str, Any]:
    """Return a LoRA for the matrices that a pattern fits: layers that make queries and values.

    It is so strong that another strength, or none, is another image for every model.
    """
    import torch

    made = {}
    for name, weight in state.items():
        if is_matrix(name, weight, which):
            base = f"diffusion_model.{name.removesuffix('.weight')}"
            made[f"{base}.lora_up.weight"] = (torch.randn(weight.shape[0], rank) * 0.04).half()
            made[f"{base}.lora_down.weight"] = (torch.randn(rank, weight.shape[1]) * 0.04).half()
    return made


if __name__ == "__main__":
    main()
