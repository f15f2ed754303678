"""What ComfyUI's frontend draws, in English and Chinese, on the canvas and in Nodes 2.0: nothing is cut or red."""

from __future__ import annotations

import json
import re

import comfy_browser
import pytest
import workflow_pictures
from workflow_pictures import WORKFLOWS

NAMES = sorted(path.stem for path in WORKFLOWS.glob("*.json"))
NODES_2 = "Comfy.VueNodes.Enabled"

ADD_OURS = """() => {
    for (const node of [...app.graph.nodes]) app.graph.remove(node);
    const types = Object.entries(LiteGraph.registered_node_types);
    const ours = types.filter(([, type]) => type.nodeData?.python_module?.endsWith("compiled-graphs"));
    for (const [place, [name]] of ours.entries()) {
        const node = LiteGraph.createNode(name);
        app.graph.add(node);
        node.pos = [600 * (place % 6), 450 * Math.floor(place / 6)];
        for (const widget of (node.widgets ?? []).filter((known) => String(known.value).endsWith(".safetensors"))) {
            widget.options.values = ["a file"]; // the names of files are people's own
            widget.value = "a file";
        }
    }
    return ours.length;
}"""
CUT = """() => {
    const drawn = [], pen = CanvasRenderingContext2D.prototype, fillText = pen.fillText;
    pen.fillText = function (text, ...place) {
        drawn.push(String(text));
        return fillText.call(this, text, ...place);
    };
    app.canvas.ds.scale = 1;
    const cut = app.graph.nodes.flatMap((node) => {
        app.canvas.ds.offset = [100 - node.pos[0], 100 - node.pos[1]];
        drawn.length = 0;
        app.canvas.draw(true, true);
        const combos = (node.widgets ?? []).filter((widget) => widget.type === "combo" && !widget.hidden);
        const wanted = combos.flatMap((widget) => [widget.label ?? widget.name, String(widget.value)]);
        return [node.getTitle(), ...wanted].filter((text) => !drawn.includes(text));
    });
    pen.fillText = fillText;
    return cut;
}"""
"""Titles, and names and values of choices, that are not drawn whole on the canvas."""
CUT_IN_NODES_2 = """() => [...document.querySelectorAll("[data-node-id] .truncate")]
    .filter((text) => text.scrollWidth > text.clientWidth + 1).map((text) => text.textContent)"""
RED_IN_NODES_2 = (
    "() => [...document.querySelectorAll('[data-node-id] [aria-invalid=true]')].map((one) => one.ariaLabel)"
)
SHOW_ALL = "() => { app.canvas.ds.scale = 0.2; app.canvas.ds.offset = [100, 200]; app.canvas.setDirty(true, true); }"
WIDGET_PLACE = """name => {
    const [node] = app.graph.nodes, widget = node.widgets.find((known) => known.name === name);
    const shown = app.canvas.canvas.getBoundingClientRect();
    const place = app.canvas.ds.convertOffsetToCanvas([node.pos[0] + 60, node.pos[1] + widget.last_y + 10]);
    return [place[0] + shown.left, place[1] + shown.top];
}"""


@pytest.fixture(scope="module", params=["en", "zh"])
def browser(request, listing_server):
    with comfy_browser.browse(listing_server.address, {"Comfy.Locale": request.param}) as page:
        if page is None:
            pytest.skip("this ComfyUI's frontend is older than 2025")
        page.language = request.param
        yield page


@pytest.fixture(scope="module")
def nodes_2(browser):
    """The browser with Nodes 2.0."""
    if browser.evaluate("name => app.extensionManager.setting.get(name)", NODES_2) is None:
        pytest.skip("this frontend has no Nodes 2.0")
    browser.evaluate("name => app.extensionManager.setting.set(name, true)", NODES_2)
    yield browser
    browser.evaluate("name => app.extensionManager.setting.set(name, false)", NODES_2)


def open_example(browser, name):
    workflow_pictures.open_workflow(browser, json.loads((WORKFLOWS / f"{name}.json").read_text()))


def test_the_tooltip_of_backend_is_in_the_persons_language(browser):
    comfy_browser.add_node(browser, "CG_CompileModel")
    workflow_pictures.settle(browser)
    tooltip, place = browser.locator(".node-tooltip"), browser.evaluate(WIDGET_PLACE, "backend")
    while not tooltip.is_visible():  # a frontend that has just started misses some moves
        browser.mouse.move(place[0] + 1, place[1])
        browser.mouse.move(*place)
        browser.wait_for_timeout(1000)
    lines = tooltip.inner_text().splitlines()
    assert len(lines) > 1, "this machine lacks no backend"
    assert [bool(re.search("[\u4e00-\u9fff]", line)) for line in lines] == [browser.language == "zh"] * len(lines)


def test_no_text_of_our_nodes_is_cut_on_the_canvas(browser):
    assert browser.evaluate(ADD_OURS) > 30
    workflow_pictures.settle(browser)
    assert browser.evaluate(CUT) == []


@pytest.mark.parametrize("name", NAMES)
def test_no_text_of_an_example_is_cut_on_the_canvas(browser, name):
    open_example(browser, name)
    assert browser.evaluate(CUT) == []


def test_no_text_of_our_nodes_is_cut_or_red_in_nodes_2(nodes_2):
    assert nodes_2.evaluate(ADD_OURS) > 30
    nodes_2.evaluate(SHOW_ALL)
    workflow_pictures.settle(nodes_2)
    assert nodes_2.evaluate(RED_IN_NODES_2) == []
    assert nodes_2.evaluate(CUT_IN_NODES_2) == []


@pytest.mark.parametrize("name", NAMES)
def test_no_text_of_an_example_is_cut_or_red_in_nodes_2(nodes_2, name):
    open_example(nodes_2, name)
    assert nodes_2.evaluate(RED_IN_NODES_2) == []
    assert nodes_2.evaluate(CUT_IN_NODES_2) == []
