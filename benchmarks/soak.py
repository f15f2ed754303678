"""Random prompts in a real ComfyUI server: are images right, does anything compile twice, is memory held?

    python benchmarks/soak.py [--comfyui CHECKOUT] [--prompts 1000] [--minutes 60] [--check 20] [--backend eager]

Each prompt has its own checkpoint, size, batch, seed, steps and sampler, and up to two of the nodes that people put
before or after Compile Model. Every so often the same prompt runs without our nodes, and the images are compared.
The exit status is 1 if an image differs, a prompt fails, a structure seen before compiles or memory grows.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import psutil
from safetensors.numpy import save_file

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from comfy_server import ComfyServer, PromptFailed  # noqa: E402
from quickstart import TOLERANCE, WORKFLOW, run  # noqa: E402

CHECKPOINTS = ("tiny_sd15.ckpt", "tiny_sd15_other.ckpt")
LORA = "soak.safetensors"
SIDES = range(128, 257, 64)
SAMPLERS = ("euler", "euler_ancestral", "heun", "dpmpp_2m", "ddim", "lcm")
TEXTS = ("a lighthouse on a cliff, evening light", ", ".join(["a lighthouse on a cliff, evening light"] * 12))
"""One that fits into the 77 tokens of the text encoder, and one that takes more."""
LOADER, COMPILE, POSITIVE, NEGATIVE, LATENT, SAMPLER, DECODE, IMAGES = map(str, range(1, 9))
"""The nodes of the workflow."""
OURS = {"CG_CompileModel": "model", "CG_VAESpeedup": "vae"}
"""Our nodes, and the input that takes their place where they are bypassed."""
WARM_UP, WINDOW = 100, 50
"""After how many prompts memory is to be flat, and how many of them one figure is the median of: while a checkpoint
is read there is less or more for a moment."""
GROWTH = 1.05
SERVER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # at these sizes threads mostly wait for one another
    # Glibc keeps most of what is freed, more with every size that is new. Without that, resident memory is memory held.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}
SAID_EVERY = 50

Link = list[Any]
"""A node's id and the number of its output."""


@dataclass
class Draft:
    """A prompt in the making."""

    nodes: dict[str, Any]
    dice: random.Random
    size: tuple[int, int]
    """Width and height in pixels."""

    def add(self, name: str, **inputs: Any) -> Link:
        """Add a node and return the link to its output."""
        key = str(1 + max(map(int, self.nodes)))
        self.nodes[key] = {"class_type": name, "inputs": inputs}
        return [key, 0]

    def insert(self, name: str, takes: str, before: str, socket: str, **inputs: Any) -> None:
        """Put a node into the link that ends at a socket of another node."""
        end = self.nodes[before]["inputs"]
        end[socket] = self.add(name, **{takes: end[socket]}, **inputs)

    def number(self, low: float, high: float) -> float:
        """Return a number in between, as a person would type it."""
        return round(self.dice.uniform(low, high), 2)

    def area(self) -> dict[str, int]:
        """Return a part of the picture, in sizes that the networks do not halve evenly too."""
        width, height = (self.dice.randrange(64, side + 1, 8) for side in self.size)
        x, y = (self.dice.randrange(0, side + 1, 8) for side in (self.size[0] - width, self.size[1] - height))
        return {"width": width, "height": height, "x": x, "y": y}

    def mask(self) -> Link:
        """Add the nodes that mask a part of the picture."""
        area = self.area()
        nothing = self.add("SolidMask", value=0.0, width=self.size[0], height=self.size[1])
        part = self.add("SolidMask", value=1.0, width=area["width"], height=area["height"])
        return self.add("MaskComposite", destination=nothing, source=part, x=area["x"], y=area["y"], operation="add")

    def other_model(self) -> Link:
        """Add a loader for the checkpoint that the prompt does not have yet."""
        used = self.nodes[LOADER]["inputs"]["ckpt_name"]
        return self.add("CheckpointLoaderSimple", ckpt_name=next(name for name in CHECKPOINTS if name != used))


@dataclass(frozen=True)
class Row:
    """A node that people put into a workflow, with random values."""

    name: str
    inputs: Callable[[Draft], dict[str, Any]]
    takes: str = "model"
    """The input that takes what the node changes."""
    socket: str = "model"
    """The sampler's input that takes it otherwise."""
    needs: tuple[str, ...] = ()
    """Other nodes that `inputs` adds."""
    only_with: str = ""
    """Another row, without which it does nothing."""


MASKS = ("SolidMask", "MaskComposite")
ROWS = [
    Row("FreeU", lambda d: {"b1": d.number(1, 2), "b2": d.number(1, 2), "s1": 0.9, "s2": 0.2}),
    Row("FreeU_V2", lambda d: {"b1": d.number(1, 2), "b2": d.number(1, 2), "s1": 0.9, "s2": 0.2}),
    Row("PerturbedAttentionGuidance", lambda d: {"scale": d.number(0.5, 3)}),
    Row("SelfAttentionGuidance", lambda d: {"scale": d.number(0.1, 1), "blur_sigma": d.number(1, 3)}),
    Row(
        "HyperTile",
        lambda d: {
            "tile_size": d.dice.choice((64, 128, 256)),
            "swap_size": d.dice.choice((1, 2, 3)),
            "max_depth": 0,
            "scale_depth": d.dice.random() < 0.5,
        },
    ),
    Row("TomePatchModel", lambda d: {"ratio": d.number(0.1, 0.6)}),
    Row("RescaleCFG", lambda d: {"multiplier": d.number(0, 1)}),
    Row(
        "ModelSamplingDiscrete",
        lambda d: {"sampling": d.dice.choice(("eps", "v_prediction", "lcm")), "zsnr": d.dice.random() < 0.5},
    ),
    Row(
        "PatchModelAddDownscale",
        lambda d: {
            "block_number": d.dice.choice((1, 2)),
            "downscale_factor": d.number(1.2, 2),
            "start_percent": 0.0,
            "end_percent": d.dice.choice((0.35, 1.0)),
            "downscale_after_skip": d.dice.random() < 0.5,
            "downscale_method": "bilinear",
            "upscale_method": "bicubic",
        },
    ),
    Row("LoraLoaderModelOnly", lambda d: {"lora_name": LORA, "strength_model": d.number(-1, 1)}),
    Row("ModelMergeSimple", lambda d: {"model2": d.other_model(), "ratio": d.number(0, 1)}, takes="model1"),
    Row("DifferentialDiffusion", lambda d: {}, only_with="SetLatentNoiseMask"),
    Row(
        "ConditioningSetArea",
        lambda d: {**d.area(), "strength": d.number(0.5, 1.5)},
        takes="conditioning",
        socket="positive",
    ),
    Row(
        "ConditioningSetMask",
        lambda d: {
            "mask": d.mask(),
            "strength": d.number(0.5, 1.5),
            "set_cond_area": d.dice.choice(("default", "mask bounds")),
        },
        takes="conditioning",
        socket="positive",
        needs=MASKS,
    ),
    Row(
        "ConditioningSetTimestepRange",
        lambda d: {"start": d.dice.choice((0.0, 0.0, 0.3)), "end": d.dice.choice((0.5, 1.0))},
        takes="conditioning",
        socket="positive",
    ),
    Row("SetLatentNoiseMask", lambda d: {"mask": d.mask()}, takes="samples", socket="latent_image", needs=MASKS),
]


@dataclass(frozen=True)
class Prompt:
    """A prompt in API format, and what of it may decide what is compiled."""

    number: int
    nodes: dict[str, Any]
    structure: tuple[str, ...]


def random_prompt(number: int, seed: int, known: Collection[str], backend: str) -> Prompt:
    """Return the prompt of this number, made of nodes that ComfyUI knows. A prompt does not depend on others."""
    dice = random.Random(f"{seed}, {number}")
    size = (dice.choice(SIDES), dice.choice(SIDES))
    draft = Draft(json.loads(WORKFLOW.read_text()), dice, size)
    fill_in(draft, number, backend)
    structure = [put(draft, row) for row in choose(dice, known)]
    if dice.random() < 0.5:
        draft.insert("CG_VAESpeedup", "vae", DECODE, "vae", backend=backend)
        structure.append("VAE Speedup")
    return Prompt(number, draft.nodes, tuple(sorted(structure)))


def fill_in(draft: Draft, number: int, backend: str) -> None:
    """Choose values for the nodes of the workflow."""
    dice, nodes = draft.dice, draft.nodes
    nodes[LOADER]["inputs"]["ckpt_name"] = dice.choice(CHECKPOINTS)
    nodes[COMPILE]["inputs"]["backend"] = backend
    nodes[POSITIVE]["inputs"]["text"] = dice.choice(TEXTS)
    nodes[LATENT]["inputs"] = {"width": draft.size[0], "height": draft.size[1], "batch_size": dice.randint(1, 3)}
    nodes[SAMPLER]["inputs"] |= {
        "seed": dice.randrange(2**32),
        "steps": dice.randint(1, 2),
        "cfg": dice.choice((1.0, 4.0, 7.0)),
        "sampler_name": dice.choice(SAMPLERS),
        "scheduler": dice.choice(("normal", "karras", "simple")),
    }
    if dice.random() < 0.5:
        nodes[IMAGES] = {"class_type": "PreviewImage", "inputs": {"images": [DECODE, 0]}}
    else:
        nodes[IMAGES]["inputs"]["filename_prefix"] = f"soak_{number}"


def choose(dice: random.Random, known: Collection[str]) -> list[Row]:
    """Return up to two rows, and what they do nothing without."""
    rows = {row.name: row for row in ROWS if {row.name, *row.needs} <= {*known}}
    chosen = dice.sample([*rows], min(len(rows), dice.randint(0, 2)))
    chosen += [rows[name].only_with for name in chosen if rows[name].only_with in rows]
    return [rows[name] for name in dict.fromkeys(chosen)]


def put(draft: Draft, row: Row) -> str:
    """Add a row to a prompt, and say what was put where."""
    end, place = SAMPLER, ""
    if row.socket == "model":
        end, place = draft.dice.choice(((COMPILE, " before"), (SAMPLER, " after")))
    draft.insert(row.name, row.takes, end, row.socket, **row.inputs(draft))
    return row.name + place


def plain(nodes: dict[str, Any]) -> dict[str, Any]:
    """Bypass our nodes as ComfyUI does: what took their output takes what they were given."""
    nodes = copy.deepcopy(nodes)
    for key in [key for key, node in nodes.items() if node["class_type"] in OURS]:
        ours = nodes.pop(key)
        source = ours["inputs"][OURS[ours["class_type"]]]
        for node in nodes.values():
            node["inputs"] = {n: source if value == [key, 0] else value for n, value in node["inputs"].items()}
    return nodes


@dataclass
class Soak:
    """A run: what it is to do, and what it has seen so far."""

    server: ComfyServer
    known: Collection[str]
    """The names of ComfyUI's nodes."""
    options: argparse.Namespace
    start: float = field(default_factory=time.monotonic)
    prompts: int = 0
    checked: int = 0
    largest: int = 0
    """The largest difference between two images, of 255."""
    mismatches: int = 0
    failures: int = 0
    recompiles: int = 0
    """Compiles where there should have been none."""
    compiles: int = 0
    last_compile: int = 0
    """The number of the last prompt that compiled."""
    totals: dict[str, Any] = field(default_factory=dict)
    """The server's own counts."""
    structures: set[tuple[str, ...]] = field(default_factory=set)
    resident: list[float] = field(default_factory=list)
    """Mebibytes of the server's process, after each prompt."""

    def run(self) -> None:
        """Queue prompts until there were enough of them, the time is up, or the server is gone."""
        for number in range(1, self.options.prompts + 1):
            if self.minutes() > self.options.minutes:
                break
            prompt = random_prompt(number, self.options.seed, self.known, self.options.backend)
            self.prompts = number
            try:
                self.turn(prompt)
            except (RuntimeError, OSError) as error:
                self.failures += 1
                self.complain(prompt, f"the server does not answer: {error}")
                break
            self.resident.append(resident_mebibytes(self.server))
            if number % SAID_EVERY == 0:
                print(self.progress(), flush=True)

    def turn(self, prompt: Prompt) -> None:
        """Queue one prompt, with its comparison if it is time for one."""
        seen = "of a structure seen before" if prompt.structure in self.structures else ""
        try:
            images, _, _ = run(self.server, prompt.nodes)
        except PromptFailed as error:
            self.failures += 1
            self.complain(prompt, f"failed, {self.blame(prompt)}: {error}")
            self.count_compiles(prompt, seen)
            return
        self.count_compiles(prompt, seen)
        self.structures.add(prompt.structure)
        if self.options.check and prompt.number % self.options.check == 0:
            self.check(prompt, images)

    def check(self, prompt: Prompt, images: list[numpy.ndarray]) -> None:
        """Queue the same prompt without our nodes and compare the images."""
        try:
            reference, _, _ = run(self.server, plain(prompt.nodes))
        except PromptFailed as error:
            self.failures += 1
            self.complain(prompt, f"failed without our nodes: {error}")
            return
        difference = largest_difference(reference, images)
        self.checked += 1
        self.largest = max(self.largest, difference)
        if difference > TOLERANCE:
            self.mismatches += 1
            self.complain(prompt, f"an image differs by {difference}/255")
        self.count_compiles(prompt, "without our nodes")

    def blame(self, prompt: Prompt) -> str:
        """Say whether a prompt that failed does so without our nodes too."""
        try:
            run(self.server, plain(prompt.nodes))
        except PromptFailed:
            return "and without our nodes too"
        return "but not without our nodes"

    def count_compiles(self, prompt: Prompt, fault: str) -> None:
        """Add what was compiled since the last time, which is a fault if there is something to say about it."""
        self.totals = self.server.get("/compiled_graphs/registry")["totals"]
        added = self.totals["compiles"] - self.compiles
        if added == 0:
            return
        self.compiles += added
        self.last_compile = prompt.number
        if fault:
            self.recompiles += added
            self.complain(prompt, f"{added} compiles {fault}")

    def complain(self, prompt: Prompt, what: str) -> None:
        """Print what is wrong with a prompt, and the prompt."""
        rows = ", ".join(prompt.structure) or "no rows"
        print(f"FAULT: prompt {prompt.number} ({rows}): {what}\n  {json.dumps(prompt.nodes)}", flush=True)

    def minutes(self) -> float:
        """Return how long the run has taken."""
        return (time.monotonic() - self.start) / 60

    def memory(self) -> tuple[float, float] | None:
        """Return mebibytes after the warm-up and at the end, or None if the run was too short to tell."""
        if len(self.resident) < WARM_UP + WINDOW:
            return None
        return statistics.median(self.resident[WARM_UP - WINDOW : WARM_UP]), statistics.median(self.resident[-WINDOW:])

    def faults(self) -> int:
        """Return the number of things that are not as they should be."""
        memory = self.memory()
        grown = memory is not None and memory[1] > GROWTH * memory[0]
        return self.mismatches + self.failures + self.recompiles + grown

    def progress(self) -> str:
        """Return a line on the run so far."""
        return (
            f"{self.prompts:>6} prompts, {self.compiles} compiles, {self.faults()} faults, "
            f"{self.resident[-1]:.0f} MiB, {self.prompts / self.minutes() / 60:.2f} prompts per second"
        )

    def summary(self) -> str:
        """Return the closing lines."""
        memory, reasons = self.memory(), self.totals.get("reasons", {})
        lines = [
            f"{self.prompts} prompts in {self.minutes():.1f} minutes, {len(self.structures)} structures, "
            f"{self.failures} failures",
            f"{self.checked} checked: largest difference {self.largest}/255, {self.mismatches} mismatches",
            f"{self.compiles} compiles, the last in prompt {self.last_compile}; {self.recompiles} where none "
            f"should be; {self.totals.get('retired', 0)} graphs retired",
            f"{self.totals.get('calls', 0)} region calls, {sum(reasons.values())} of them uncompiled",
            *(f"  {count:>8} {reason}" for reason, count in reasons.items()),
        ]
        if memory:
            lines.append(f"memory after {WARM_UP} prompts {memory[0]:.0f} MiB, at the end {memory[1]:.0f} MiB")
        else:
            lines.append(f"memory at the end {self.resident[-1] if self.resident else 0:.0f} MiB, too early to judge")
        return "\n".join([*lines, f"{self.faults()} faults"])


def main() -> int:
    """Start a server and run; the result is the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", default="", help="a checkout; empty if ComfyUI is an installed package")
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--check", type=int, default=20, help="compare the images of each n-th prompt")
    parser.add_argument("--backend", choices=("eager", "inductor", "auto"), default="eager")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name, value in SERVER_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_models(options.comfyui, home / "models")
        with ComfyServer(options.comfyui, home) as server:
            soak = Soak(server, [*server.get("/object_info")], options)
            print(versions(server), flush=True)
            soak.run()
            print(soak.summary())
    return 1 if soak.faults() else 0


def write_models(comfyui: str, folder: Path) -> None:
    """Write the checkpoints, in a process of its own, and a LoRA for them."""
    command = [sys.executable, str(SCRIPTS / "tiny_models.py"), "--comfyui", comfyui, "--out", str(folder)]
    command += [Path(name).stem for name in CHECKPOINTS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: the tiny models could not be written:\n{done.stderr[-2000:]}")
    (folder / "loras").mkdir(parents=True, exist_ok=True)
    save_file(lora_weights(), folder / "loras" / LORA)


def lora_weights() -> dict[str, numpy.ndarray]:
    """Return a LoRA for attention in three places of the tiny UNet."""
    generator = numpy.random.default_rng(0)
    weights = {}
    for place in ("input_blocks_1_1", "middle_block_1", "output_blocks_3_1"):
        for layer, width in (("attn1_to_q", 320), ("attn1_to_v", 320), ("attn2_to_k", 768)):
            key = f"lora_unet_{place}_transformer_blocks_0_{layer}"
            for name, shape in (("up", (320, 4)), ("down", (4, width))):
                weights[f"{key}.lora_{name}.weight"] = generator.normal(0, 0.1, shape).astype("float32")
            weights[f"{key}.alpha"] = numpy.array(4.0, "float32")
    return weights


def largest_difference(ones: list[numpy.ndarray], others: list[numpy.ndarray]) -> int:
    """Return the largest difference between two batches of images, which is 255 if their shapes differ."""
    if [image.shape for image in ones] != [image.shape for image in others]:
        return 255
    return max(int(numpy.abs(one - other).max()) for one, other in zip(ones, others, strict=True))


def resident_mebibytes(server: ComfyServer) -> float:
    """Return the memory of the server's process."""
    return psutil.Process(server._process.pid).memory_info().rss / 2**20


def versions(server: ComfyServer) -> str:
    """Say what runs. A ComfyUI of 2024 does not tell its version; an installed one has it in its metadata."""
    told = server.get("/system_stats")["system"]
    try:
        comfyui = told.get("comfyui_version") or importlib.metadata.version("comfyui")
    except importlib.metadata.PackageNotFoundError:
        comfyui = "of unknown version"
    return f"torch {told.get('pytorch_version') or importlib.metadata.version('torch')}, ComfyUI {comfyui}"


if __name__ == "__main__":
    sys.exit(main())
