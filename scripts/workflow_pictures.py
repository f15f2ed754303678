"""Take the pictures of the example workflows, as ComfyUI's frontend shows them, and draw their thumbnails.

`workflows/pictures/NAME.jpg` shows all nodes. NAME.jpg beside NAME.json is what ComfyUI's template browser shows: large
words, since a graph of that size cannot be read.

python scripts/workflow_pictures.py --comfyui CHECKOUT [NAME ...]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import comfy_browser
from comfy_server import EXTENSION, ComfyServer
from PIL import Image, ImageDraw, ImageFont

if TYPE_CHECKING:
    from playwright.sync_api import Page

WORKFLOWS = EXTENSION / "workflows"
FOLDERS = {
    "ckpt_name": "models/checkpoints",
    "clip_name1": "models/text_encoders",
    "clip_name2": "models/text_encoders",
    "control_net_name": "models/controlnet",
    "lora_name": "models/loras",
    "unet_name": "models/diffusion_models",
    "vae_name": "models/vae",
}
"""Where ComfyUI looks for the file that an input names."""
PLAIN = {
    "Comfy.Graph.CanvasInfo": False,
    "Comfy.Graph.CanvasMenu": False,
    "Comfy.Minimap.Visible": False,
    "Comfy.Workflow.WorkflowTabsPosition": "Sidebar",
}
MENU_BUTTON = ".comfy-menu-hamburger, .no-drag.fixed"
"""What stays in a corner of the graph without the menu, in frontends of 2025 and of 2026."""
WIDTH, HEIGHT, MARGIN = 1500, 950, 24
"""Largest size of a picture and its border, in pixels."""
QUALITY = 80
THUMBNAIL = 640, 480
"""Its size, twice as large as a card in the template browser."""
SHOWN = ("Checkpoint", "UNET", "Lora", "ControlNetApply", "KSampler", "VAEDecode")
"""Parts of the types of nodes that tell what a workflow does, besides ours."""
MOST_SHOWN = 6
BACKGROUND, TEXT, OURS, OTHERS = "#1b1c1f", "#f1f3f4", "#1a56b0", "#3c4043"


def main() -> int:
    """Take the pictures; the result is the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", required=True, help="a checkout of 2025 or newer")
    parser.add_argument("names", nargs="*", default=sorted(path.stem for path in WORKFLOWS.glob("*.json")))
    options = parser.parse_args()
    if reason := comfy_browser.missing():
        sys.exit(f"error: {reason}")
    with tempfile.TemporaryDirectory() as folder:
        place_files(Path(folder))
        with ComfyServer(options.comfyui, Path(folder)) as server, comfy_browser.browse(server.address, PLAIN) as page:
            if page is None:
                sys.exit(f"error: the frontend of {options.comfyui} is older than 2025")
            page.evaluate("app.extensionManager.command.execute('Workspace.ToggleFocusMode')")
            page.add_style_tag(content=f"{MENU_BUTTON} {{ display: none !important; }}")
            for name in options.names:
                workflow = json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8"))
                open_workflow(page, workflow)
                take_picture(page, WORKFLOWS / "pictures" / f"{name}.jpg")
                draw_thumbnail(name, titles(page, workflow), WORKFLOWS / f"{name}.jpg")
    return 0


def titles(page: Page, workflow: dict[str, Any]) -> list[tuple[str, bool]]:
    """Return the nodes that tell what a workflow does, from left to right, each once, and whether they are ours."""
    found: dict[str, bool] = {}
    for node in sorted(workflow["nodes"], key=lambda node: node["pos"][0]):
        is_ours = node["type"].startswith("CG_")
        if is_ours or any(part in node["type"] for part in SHOWN):
            title = page.evaluate("type => LiteGraph.registered_node_types[type].title", node["type"])
            found[title] = is_ours
    ours = sum(found.values())
    others = [title for title, is_ours in found.items() if not is_ours][: MOST_SHOWN - ours]
    return [(title, is_ours) for title, is_ours in found.items() if is_ours or title in others]


def draw_thumbnail(name: str, nodes: list[tuple[str, bool]], path: Path) -> None:
    """Write a JPEG with a workflow's title, and the nodes in their order. Ours are blue."""
    width, height = THUMBNAIL
    image = Image.new("RGB", THUMBNAIL, BACKGROUND)
    draw = ImageDraw.Draw(image)
    title = name.partition(" ")[2]
    draw.text((32, 62), title, TEXT, fitting_font(draw, title, 56, width - 64), anchor="lm")
    step = (height - 130) / len(nodes)
    for number, (text, is_ours) in enumerate(nodes):
        top = 112 + number * step
        box = (32, top, width - 32, top + step - 14)
        draw.rounded_rectangle(box, 12, OURS if is_ours else OTHERS)
        font = fitting_font(draw, text, min(34, step * 0.5), width - 112)
        draw.text((56, (box[1] + box[3]) / 2), text, TEXT, font, anchor="lm")
    image.save(path, quality=QUALITY)


def fitting_font(draw: ImageDraw.ImageDraw, text: str, size: float, width: float) -> Any:
    """Return the font of this size, or of the next smaller one that writes the text no wider than this."""
    while draw.textlength(text, ImageFont.load_default(size)) > width:
        size -= 2
    return ImageFont.load_default(size)


def api_name(name: str) -> str:
    """Return the name in `api/` of the workflow "06 Save and load": "save_and_load"."""
    return name.partition(" ")[2].lower().replace(" ", "_")


def place_files(home: Path) -> None:
    """Put files with the names that the workflows name where ComfyUI lists them: empty models, a grey picture."""
    for path in (WORKFLOWS / "api").glob("*.json"):
        inputs = [pair for node in json.loads(path.read_text()).values() for pair in node["inputs"].items()]
        for key, name in inputs:
            if folder := FOLDERS.get(key):
                (home / folder).mkdir(parents=True, exist_ok=True)
                (home / folder / name).touch()
    (home / "input").mkdir(exist_ok=True)
    Image.new("RGB", (768, 512), "grey").save(home / "input" / "example.png")


def open_workflow(page: Page, workflow: dict[str, Any]) -> None:
    """Open a workflow and wait until its nodes are drawn and what they fetch is there."""
    page.evaluate("async workflow => { await app.loadGraphData(workflow); }", workflow)
    settle(page)


def settle(page: Page) -> None:
    """Wait until the frontend has fetched what it wants and has drawn twice since."""
    page.wait_for_load_state("networkidle")
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def take_picture(page: Page, path: Path) -> None:
    """Write a JPEG of all nodes, as large as they are or smaller, to fit."""
    left, top, right, bottom = page.evaluate(
        """() => {
            const bounds = app.graph.nodes.map((node) => node.getBounding());
            const least = (values) => Math.min(...values), most = (values) => Math.max(...values);
            return [
                least(bounds.map((b) => b[0])), least(bounds.map((b) => b[1])),
                most(bounds.map((b) => b[0] + b[2])), most(bounds.map((b) => b[1] + b[3])),
            ];
        }"""
    )
    scale = min(1.0, (WIDTH - 2 * MARGIN) / (right - left), (HEIGHT - 2 * MARGIN) / (bottom - top))
    width, height = ((high - low) * scale + 2 * MARGIN for low, high in ((left, right), (top, bottom)))
    page.set_viewport_size({"width": round(width), "height": round(height)})
    page.evaluate(
        """([scale, left, top, margin]) => {
            app.canvas.ds.scale = scale;
            app.canvas.ds.offset = [margin / scale - left, margin / scale - top];
            app.canvas.setDirty(true, true);
        }""",
        [scale, left, top, MARGIN],
    )
    settle(page)
    page.screenshot(path=path, type="jpeg", quality=QUALITY)


if __name__ == "__main__":
    sys.exit(main())
