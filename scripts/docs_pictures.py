"""Take the pictures of README: Compile Model after a run, and the sidebar tab, of a tiny model on this machine.

python scripts/docs_pictures.py --comfyui CHECKOUT
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import comfy_browser
from comfy_server import EXTENSION, ComfyServer
from quickstart import MODEL, make_model
from workflow_pictures import PLAIN, WORKFLOWS, open_workflow, settle

if TYPE_CHECKING:
    from playwright.sync_api import Page

DOCS = EXTENSION / "docs"
WORKFLOW = WORKFLOWS / "01 Text to image.json"
PROMPTS = 3
"""The first one compiles and is checked. The gain is known after calls that do neither."""
LIMIT = 900.0
"""Seconds for a prompt."""
VALUES = {"width": 256, "height": 256, "steps": 6}
PAGE = {"width": 1500, "height": 820}
NODE = {"x": 60, "y": 50, "width": 1037, "height": 490}
PANEL = {"x": 0, "y": 0, "width": 1040, "height": 820}


def main() -> int:
    """Take the pictures; the result is the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", required=True, help="a checkout of 2025 or newer")
    options = parser.parse_args()
    if reason := comfy_browser.missing():
        sys.exit(f"error: {reason}")
    with tempfile.TemporaryDirectory() as folder:
        make_model(options.comfyui, Path(folder))
        with ComfyServer(options.comfyui, Path(folder)) as server, comfy_browser.browse(server.address, PLAIN) as page:
            if page is None:
                sys.exit(f"error: the frontend of {options.comfyui} is older than 2025")
            page.set_viewport_size(PAGE)
            open_workflow(page, with_tiny_model(json.loads(WORKFLOW.read_text())))
            for seed in range(PROMPTS):
                run(page, server, seed)
            take_pictures(page)
    return 0


def with_tiny_model(workflow: dict[str, Any]) -> dict[str, Any]:
    """Return a workflow that names the tiny model. The frontend marks nodes that name one that is not there."""
    for node in workflow["nodes"]:
        node.get("properties", {}).pop("models", None)
        if node["type"] == "CheckpointLoaderSimple":
            node["widgets_values"] = [f"{MODEL}.ckpt"]
    return workflow


def run(page: Page, server: ComfyServer, seed: int) -> None:
    """Queue the workflow that is open, with the tiny model, and wait for its end."""
    page.evaluate(
        """values => {
            for (const widget of app.graph.nodes.flatMap((node) => node.widgets ?? []))
                if (widget.name in values) widget.value = values[widget.name];
        }""",
        VALUES | {"seed": seed},
    )
    ended = len(server.get("/history"))
    page.evaluate("app.queuePrompt(0)")
    deadline = time.monotonic() + LIMIT
    while len(server.get("/history")) == ended:
        if time.monotonic() > deadline:
            sys.exit("error: the prompt did not end")
        page.wait_for_timeout(200)


def take_pictures(page: Page) -> None:
    """Write both pictures: the graph with the sidebar closed, then with our tab open."""
    show(page, 0.9, 90, 90)
    page.screenshot(path=DOCS / "compile_model.png", clip=NODE)
    page.click(".compiled-graphs-tab-button")
    page.get_by_text("Details", exact=True).first.click()
    show(page, 0.8, 420, 120)
    page.screenshot(path=DOCS / "registry_panel.png", clip=PANEL)


def show(page: Page, scale: float, left: int, top: int) -> None:
    """Move the graph so that its first node is at this place of the canvas, in pixels."""
    page.evaluate(
        """([scale, left, top]) => {
            const bounds = app.graph.nodes.map((node) => node.getBounding());
            const [x, y] = [0, 1].map((axis) => Math.min(...bounds.map((box) => box[axis])));
            app.canvas.deselectAll();
            app.canvas.ds.scale = scale;
            app.canvas.ds.offset = [left / scale - x, top / scale - y];
            app.canvas.setDirty(true, true);
        }""",
        [scale, left, top],
    )
    settle(page)
    page.wait_for_timeout(1000)


if __name__ == "__main__":
    sys.exit(main())
