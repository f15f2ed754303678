"""The example workflows and one of OneDiff in ComfyUI's frontend: they open, have a clear layout, and can be queued."""

from __future__ import annotations

import itertools
import json
import urllib.error
import urllib.request
from urllib.parse import quote

import comfy_browser
import numpy
import pytest
import workflow_pictures
from PIL import Image
from workflow_pictures import WORKFLOWS

NAMES = sorted(path.stem for path in WORKFLOWS.glob("*.json"))
TEMPLATES = "/workflow_templates"
EXTENSION = "compiled-graphs"
USUAL = "Ready: 14 of 14 block types compiled (55 s, once per model type). About 1.6x faster per step."
LONG = "a text of many words " * 40
"""More than a status box shows at once."""
LARGEST_PICTURE = 150_000
"""In bytes."""

FAULTS = """() => app.graph.nodes.flatMap((node) => {
    const stray = (node.widgets ?? []).filter((widget) => {
        const values = widget.type === "combo" ? widget.options.values : undefined;
        const known = typeof values === "function" ? values(widget, node) : values;
        return known && !known.includes(widget.value);
    });
    return [
        ...(node.type in LiteGraph.registered_node_types ? [] : [`there is no node ${node.type}`]),
        ...(node.has_errors ? [`${node.type} is red`] : []),
        ...stray.map((widget) => `${node.type} has no ${widget.name} "${widget.value}"`),
    ];
})"""
QUEUE = """async (prompt) => {
    const answer = await app.api.fetchApi("/prompt", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ prompt, client_id: "another" }),
    });
    const { error, node_errors } = await answer.json();
    return { error: error?.message ?? "", node_errors };
}"""
SHOW = """(text) => {
    for (const node of app.graph.nodes.filter((node) => node.type.startsWith("CG_"))) {
        app.api.dispatchCustomEvent("compiled_graphs.status", { node: String(node.id), text });
    }
}"""
BOXES = "() => app.graph.nodes.map((node) => [node.title, [...node.getBounding()]])"
DRAWN_BOXES = """() => [...document.querySelectorAll("[data-node-id]")].map((drawn) => {
    const { x, y, width, height } = drawn.getBoundingClientRect(), { scale } = app.canvas.ds;
    return [app.graph.getNodeById(drawn.dataset.nodeId).title, [x, y, width, height].map((value) => value / scale)];
})"""
"""In Nodes 2.0, whose nodes are elements of the page."""
CUT = """() => [...document.querySelectorAll(".compiled-graphs-status")]
    .filter((box) => box.scrollHeight > box.clientHeight + 1).map((box) => box.textContent)"""
NODES_2 = "Comfy.VueNodes.Enabled"
PROMPT = "async () => (await app.graphToPrompt()).output"


@pytest.fixture(scope="module")
def browser(listing_server):
    with comfy_browser.browse(listing_server.address) as page:
        if page is None:
            pytest.skip("this ComfyUI's frontend is older than 2025")
        yield page


@pytest.fixture
def errors(browser):
    """The errors that the page logs from now on, except for missing files.

    ComfyUI's own templates are missing if their pictures, which take hundreds of megabytes, are not installed.
    """
    found, missing = [], ("Failed to load resource", "Error loading core workflow templates")

    def hear(message):
        if message.type == "error" and not message.text.startswith(missing):
            found.append(message.text)

    listeners = {"pageerror": lambda error: found.append(str(error)), "console": hear}
    for event, listener in listeners.items():
        browser.on(event, listener)
    yield found
    for event, listener in listeners.items():
        browser.remove_listener(event, listener)


def without_titles(prompt):
    return {number: {key: node[key] for key in ("class_type", "inputs")} for number, node in prompt.items()}


def in_api_format(name):
    path = WORKFLOWS / "api" / f"{workflow_pictures.api_name(name)}.json"
    return without_titles(json.loads(path.read_text()))


def overlaps(boxes):
    """Return the pairs of nodes that overlap. A box is left, top, width, height."""

    def apart(one, other, axis):
        return one[axis] + one[axis + 2] <= other[axis] or other[axis] + other[axis + 2] <= one[axis]

    pairs = itertools.combinations(boxes, 2)
    return [(a, b) for (a, one), (b, other) in pairs if not apart(one, other, 0) and not apart(one, other, 1)]


@pytest.mark.parametrize("name", NAMES)
def test_a_workflow_opens_and_queues_its_api_prompt(browser, errors, name):
    workflow_pictures.open_workflow(browser, json.loads((WORKFLOWS / f"{name}.json").read_text()))
    assert browser.evaluate(FAULTS) == []
    prompt = browser.evaluate(PROMPT)
    assert without_titles(prompt) == in_api_format(name)
    assert browser.evaluate(QUEUE, prompt) == {"error": "", "node_errors": {}}
    assert errors == []


@pytest.fixture(scope="module", params=["canvas", "Nodes 2.0"])
def boxes(request, browser):
    """Both ways in which the frontend draws nodes; what returns the boxes of the nodes."""
    if request.param == "canvas":
        yield lambda: browser.evaluate(BOXES)
        return
    if browser.evaluate("name => app.extensionManager.setting.get(name)", NODES_2) is None:
        pytest.skip("this frontend has no Nodes 2.0")
    browser.evaluate("name => app.extensionManager.setting.set(name, true)", NODES_2)
    yield lambda: browser.evaluate(DRAWN_BOXES)
    browser.evaluate("name => app.extensionManager.setting.set(name, false)", NODES_2)


@pytest.mark.parametrize("name", NAMES)
def test_no_text_is_cut_and_no_nodes_overlap_when_ours_show_text(browser, boxes, name):
    workflow_pictures.open_workflow(browser, json.loads((WORKFLOWS / f"{name}.json").read_text()))
    for text in (USUAL, LONG):
        browser.evaluate(SHOW, text)
        workflow_pictures.settle(browser)
        assert browser.get_by_text(text.strip()).count() > 0, "no node shows the text"
        assert browser.evaluate(CUT) == [] or text == LONG
        assert overlaps(boxes()) == []


def test_a_text_for_another_workflow_is_not_shown(browser):
    workflow_pictures.open_workflow(browser, json.loads((WORKFLOWS / f"{NAMES[0]}.json").read_text()))
    told = {"node": "2", "workflow": "another", "text": "not for this one", "translations": {}}
    browser.evaluate("told => app.api.dispatchCustomEvent('compiled_graphs.status', told)", told)
    workflow_pictures.settle(browser)
    assert browser.get_by_text("not for this one").count() == 0


def test_a_graph_file_that_is_not_there_yet_is_no_missing_model(browser, errors):
    (name,) = (name for name in NAMES if name.endswith("Save and load"))
    workflow = json.loads((WORKFLOWS / f"{name}.json").read_text())
    (loader,) = (node for node in workflow["nodes"] if node["type"] == "CG_LoadGraph")
    for choice in ("sd15 (newest)", "older_00001_.graph.safetensors"):
        loader["widgets_values"][0] = choice
        workflow_pictures.open_workflow(browser, workflow)
        assert browser.evaluate(FAULTS) == []
        chosen = browser.evaluate("() => app.graph.getNodeById(2).widgets[0].value")
        assert chosen == choice.removesuffix(".graph.safetensors")
        assert browser.get_by_text("is missing").count() == 0
    assert errors == []


@pytest.mark.parametrize("name", NAMES)
def test_the_frontend_can_offer_every_model(name):
    nodes = json.loads((WORKFLOWS / f"{name}.json").read_text())["nodes"]
    named = {value for node in nodes for value in node["widgets_values"] if str(value).endswith(".safetensors")}
    offered = [model for node in nodes for model in node["properties"].get("models", [])]
    assert {model["name"] for model in offered} == named
    for model in offered:
        assert model["url"].startswith(("https://huggingface.co/", "https://civitai.com/"))
        assert f"models/{model['directory']}" in workflow_pictures.FOLDERS.values()


def test_a_template_opens_from_the_template_browser(browser, errors):
    browser.evaluate("app.extensionManager.command.execute('Comfy.BrowseTemplates')")
    browser.get_by_role("dialog").get_by_text(EXTENSION, exact=True).click()
    cards = browser.locator("[data-testid^='template-workflow-']")
    cards.nth(len(NAMES) - 1).wait_for(state="attached")
    assert cards.count() == len(NAMES)
    card = browser.get_by_test_id("template-workflow-03 LoRA swap")
    card.scroll_into_view_if_needed()
    browser.wait_for_function("image => image.naturalWidth > 0", arg=card.locator("img").first.element_handle())
    card.click()
    browser.wait_for_function("app.graph.nodes.some((node) => node.type === 'LoraLoader')")
    assert without_titles(browser.evaluate(PROMPT)) == in_api_format("03 LoRA swap")
    assert errors == []


def test_comfyui_offers_templates_with_pictures(server):
    try:
        listed = server.get(TEMPLATES)
    except urllib.error.HTTPError:
        pytest.skip("this ComfyUI has no templates")
    assert sorted(listed[EXTENSION]) == NAMES
    for name in NAMES:
        place = f"/api{TEMPLATES}/{EXTENSION}/{quote(name)}"
        assert server.get(f"{place}.json") == json.loads((WORKFLOWS / f"{name}.json").read_text())
        with urllib.request.urlopen(f"{server.address}{place}.jpg", timeout=60) as answer:
            picture = answer.read()
        assert picture[:2] == b"\xff\xd8"
        assert len(picture) <= LARGEST_PICTURE


@pytest.mark.parametrize("name", ["07 Short", f"07 {'A title of many words ' * 3}"])
def test_a_thumbnail_has_its_texts_whole(tmp_path, name):
    path = tmp_path / "thumbnail.png"
    workflow_pictures.draw_thumbnail(name, [("A node with a title that is much longer than others", True)], path)
    picture = numpy.asarray(Image.open(path).convert("L")).astype(int)
    right = workflow_pictures.THUMBNAIL[0] - 32
    assert picture[:, right:].max() < 128, "a text goes beyond the box"
    assert picture[:, :right].max() > 128


def test_the_readme_has_each_workflow():
    readme = (WORKFLOWS / "README.md").read_text()
    for name in NAMES:
        nodes = json.loads((WORKFLOWS / f"{name}.json").read_text())["nodes"]
        (note,) = (node["widgets_values"][0] for node in nodes if node["type"] == "Note")
        assert note in " ".join(readme.split("\n"))
        assert f"]({quote(name)}.json)" in readme
        assert f"](pictures/{quote(name)}.jpg)" in readme


# A workflow that was saved with OneDiff's nodes.

CACHE = [3, 0, 1, 0, 1000]
"""cache_interval, cache_layer_id, cache_block_id, start_step, end_step."""


def node(number, kind, widgets, inputs=(), outputs=()):
    """Return a node in the form of a 2024 frontend: it identifies widget values only by their order."""
    return {
        "id": number,
        "type": kind,
        "pos": [320 * (number % 6), 260 * (number // 6)],
        "size": [300, 200],
        "flags": {},
        "order": number,
        "mode": 0,
        "inputs": [{"name": name, "type": kind, "link": link} for name, kind, link in inputs],
        "outputs": [{"name": kind, "type": kind, "links": list(links), "slot_index": i} for i, (kind, links) in
                    enumerate(outputs)],
        "properties": {"Node name for S&R": kind},
        "widgets_values": widgets,
    }  # fmt: skip


ONEDIFF = {
    "last_node_id": 12,
    "last_link_id": 12,
    "nodes": [
        node(1, "OneDiffCheckpointLoaderSimple", ["v1-5-pruned-emaonly.safetensors", "enable"],
             [("custom_booster", "CUSTOM_BOOSTER", 1)], [("MODEL", [2]), ("CLIP", []), ("VAE", [3])]),
        node(2, "OneFlowDeepcacheBooster", CACHE, outputs=[("DeepCacheBooster", [4])]),
        node(3, "OneDiffModelBooster", [], [("quantization_booster", "QuantizationBooster", 6),
             ("deepcache_booster", "DeepCacheBooster", 4), ("torchcompile_booster", "TorchCompileBooster", 7)],
             [("CUSTOM_BOOSTER", [1])]),
        node(4, "BatchSizePatcher", [], [("model", "MODEL", 2), ("latent_image", "LATENT", 8)], [("MODEL", [9])]),
        node(5, "OneDiffOnlineQuantizationBooster", [100, 100, 100, 300], outputs=[("QuantizationBooster", [6])]),
        node(6, "OneDiffTorchCompileBooster", [False, None, "inductor", "default", False, ""],
             outputs=[("TorchCompileBooster", [7])]),
        node(7, "EmptyLatentImage", [512, 512, 1], outputs=[("LATENT", [8, 10])]),
        node(8, "ModelSpeedup", [True], [("model", "MODEL", 9), ("custom_booster", "CUSTOM_BOOSTER", None)],
             [("MODEL", [11])]),
        node(9, "ModuleDeepCacheSpeedup", ["enable", *CACHE], [("model", "MODEL", 11)], [("MODEL", [12])]),
        node(10, "SVDSpeedup", [False, "svd"], [("model", "MODEL", 12), ("custom_booster", "CUSTOM_BOOSTER", None)],
             [("MODEL", [])]),
        node(11, "VaeSpeedup", [False], [("vae", "VAE", 3), ("custom_booster", "CUSTOM_BOOSTER", None)],
             [("VAE", [])]),
        node(12, "ModelGraphSaver", ["unet"], [("samples", "LATENT", 10), ("model", "MODEL", None)]),
    ],
    "links": [
        [1, 3, 0, 1, 0, "CUSTOM_BOOSTER"], [2, 1, 0, 4, 0, "MODEL"], [3, 1, 2, 11, 0, "VAE"],
        [4, 2, 0, 3, 1, "DeepCacheBooster"], [6, 5, 0, 3, 0, "QuantizationBooster"],
        [7, 6, 0, 3, 2, "TorchCompileBooster"], [8, 7, 0, 4, 1, "LATENT"], [9, 4, 0, 8, 0, "MODEL"],
        [10, 7, 0, 12, 0, "LATENT"], [11, 8, 0, 9, 0, "MODEL"], [12, 9, 0, 10, 0, "MODEL"],
    ],
    "groups": [], "config": {}, "extra": {}, "version": 0.4,
}  # fmt: skip


def test_a_workflow_of_onediff_opens_with_its_values(browser, errors):
    workflow_pictures.open_workflow(browser, ONEDIFF)
    assert browser.evaluate(FAULTS) == []
    prompt = browser.evaluate(PROMPT)
    inputs = {node["class_type"]: node["inputs"] for node in prompt.values()}
    assert inputs["OneDiffTorchCompileBooster"]["dynamic"] == "auto"
    steps = {"cache_interval": 3, "cache_layer_id": 0, "cache_block_id": 1, "start_step": 0, "end_step": 1000}
    assert inputs["OneFlowDeepcacheBooster"] == steps
    assert inputs["ModuleDeepCacheSpeedup"] == {"model": ["8", 0], "static_mode": "enable", **steps}
    assert inputs["OneDiffCheckpointLoaderSimple"] == {
        "ckpt_name": "v1-5-pruned-emaonly.safetensors",
        "vae_speedup": "enable",
        "custom_booster": ["3", 0],
    }
    assert inputs["OneDiffModelBooster"] == {
        "quantization_booster": ["5", 0],
        "deepcache_booster": ["2", 0],
        "torchcompile_booster": ["6", 0],
    }
    assert inputs["OneDiffOnlineQuantizationBooster"]["linear_compute_density_threshold"] == 300
    assert inputs["ModelSpeedup"] == {"model": ["4", 0], "inplace": True}
    assert inputs["SVDSpeedup"] == {"model": ["9", 0], "inplace": False, "cache_name": "svd"}
    assert inputs["VaeSpeedup"] == {"vae": ["1", 2], "inplace": False}
    assert inputs["ModelGraphSaver"] == {"samples": ["7", 0], "filename_prefix": "unet"}
    assert errors == []


OLDER = {
    "last_node_id": 6,
    "last_link_id": 4,
    "nodes": [
        node(1, "OneDiffQuantCheckpointLoaderSimpleAdvanced",
             ["v1-5-pruned-emaonly.safetensors", "sd15.pt", "enable", "disable"],
             outputs=[("MODEL", [1]), ("CLIP", [2]), ("VAE", [])]),
        node(2, "ModelSpeedup", ["enable"], [("model", "MODEL", 1)], [("MODEL", [3])]),
        node(3, "SVDSpeedup", ["enable"], [("model", "MODEL", 3)], [("MODEL", [4])]),
        node(4, "Quant8Model", ["int8", "enable", "disable"], [("model", "MODEL", 4)]),
        node(5, "CLIPTextEncodePromptStyle", ["a lighthouse", "ships", "Watercolor", False, True, True],
             [("clip", "CLIP", 2)], [("CONDITIONING", []), ("CONDITIONING", [])]),
        node(6, "ControlNetSpeedup", ["enable"], [("control_net", "CONTROL_NET", None)], [("CONTROL_NET", [])]),
    ],
    "links": [[1, 1, 0, 2, 0, "MODEL"], [2, 1, 1, 5, 0, "CLIP"], [3, 2, 0, 3, 0, "MODEL"], [4, 3, 0, 4, 0, "MODEL"]],
    "groups": [], "config": {}, "extra": {}, "version": 0.4,
}  # fmt: skip
"""Of versions before April 2024, which have `static_mode` where `inplace` is now."""


def test_a_workflow_of_an_older_onediff_opens_and_is_accepted(browser, errors):
    workflow_pictures.open_workflow(browser, OLDER)
    assert browser.evaluate(FAULTS) == []
    prompt = browser.evaluate(PROMPT)
    inputs = {node["class_type"]: node["inputs"] for node in prompt.values()}
    assert inputs["SVDSpeedup"] == {"model": ["2", 0], "inplace": "enable", "cache_name": "svd"}
    assert inputs["Quant8Model"] == {"model": ["3", 0], "output_dir": "int8", "conv": "enable", "linear": "disable"}
    assert inputs["CLIPTextEncodePromptStyle"] == {
        **{"text_positive": "a lighthouse", "text_negative": "ships", "style": "Watercolor", "clip": ["1", 1]},
        **{"log_prompt": False, "style_positive": True, "style_negative": True},
    }
    assert inputs["OneDiffQuantCheckpointLoaderSimpleAdvanced"]["model_path"] == "sd15.pt"
    assert browser.evaluate(QUEUE, prompt) == {"error": "", "node_errors": {}}
    assert errors == []
