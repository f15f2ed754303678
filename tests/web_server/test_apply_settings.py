"""The values that people choose in ComfyUI's settings dialog."""

from __future__ import annotations

import json
import time
import urllib.request

import comfy_browser
import make_locales
import pytest
from compiled_graphs.compiler.hosts.comfy.settings import STORE_LIMIT
from compiled_graphs.compiler.storage.store import DEFAULT_LIMIT

LIMIT, BACKGROUND, VERIFY = STORE_LIMIT, "CompiledGraphs.Background", "CompiledGraphs.Verify"


@pytest.fixture(scope="module")
def own(make_home, start_server):
    """A server that shares its settings with no other one, and whose store is where ComfyUI keeps a user's files."""
    with start_server(make_home("tiny_sd15"), COMPILED_GRAPHS_STORE="") as server:
        yield server


def choose(server, setting, value):
    """Send the request that the dialog sends when somebody changes a value."""
    request = urllib.request.Request(
        f"{server.address}/settings/{setting}", json.dumps(value).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=60).close()


def stored(server):
    return list((server.home / "user" / "compiled_graphs").glob("*.graph.safetensors"))


def test_the_next_prompt_applies_the_chosen_store_size(own, workflow):
    own.run(workflow(seed=1))
    assert len(stored(own)) == 3
    choose(own, LIMIT, 1)
    own.run(workflow(seed=1, steps=3))  # ComfyUI does not run Compile Model: it has the node's output
    assert len(stored(own)) == 3
    choose(own, LIMIT, 1e-9)
    prompt = workflow(seed=1)
    prompt["2"]["inputs"]["verify"] = False
    own.run(prompt)
    wait_until(lambda: stored(own) == [])
    choose(own, LIMIT, None)


def test_the_dialog_starts_with_the_codes_defaults(own):
    inputs = own.get("/object_info/CG_CompileModel")["CG_CompileModel"]["input"]
    default = {name: kind[1].get("default") for name, kind in {**inputs["required"], **inputs["optional"]}.items()}
    chosen = {setting["id"]: setting["defaultValue"] for setting in make_locales.settings()}
    assert chosen == {
        LIMIT: DEFAULT_LIMIT / 10**9,
        BACKGROUND: default["when"] == "in background",
        VERIFY: default["verify"],
    }


@pytest.fixture
def browser(own):
    if reason := comfy_browser.missing():
        pytest.skip(reason)
    with comfy_browser.browse(own.address, {BACKGROUND: False, VERIFY: True}) as page:
        if page is None:
            pytest.skip("this ComfyUI's frontend has no settings of extensions")
        yield page


def test_new_nodes_start_with_the_chosen_values(own, browser):
    assert comfy_browser.add_node(browser, "CG_CompileModel")["when"] == "before sampling"
    browser.keyboard.press("Control+,")
    browser.get_by_text("Compiled Graphs", exact=True).click()
    for setting in (BACKGROUND, VERIFY):
        browser.locator(f"[id='{setting}'] input, button[id='{setting}']").click()  # in the frontends of 2025 and 2026
    limit = browser.locator(f"[id='{LIMIT}'] input")
    limit.select_text()
    limit.press_sequentially("3")
    limit.press("Tab")
    wait_for(own, {BACKGROUND: True, VERIFY: False, LIMIT: 3})
    model, vae = (comfy_browser.add_node(browser, kind) for kind in ("CG_CompileModel", "CG_VAESpeedup"))
    chosen = {"backend": "auto", "verify": False, "cuda_graphs": True, "when": "in background", "lora_branch": False}
    assert model == chosen
    assert vae == {"encode": False, "backend": "auto", "verify": False}


def test_a_workflow_keeps_its_own_values(own, browser):
    browser.evaluate(
        """async settings => {
            for (const [id, value] of settings) await app.extensionManager.setting.set(id, value);
        }""",
        [[BACKGROUND, True], [VERIFY, False]],
    )
    node = {"id": 1, "type": "CG_CompileModel", "pos": [0, 0], "size": [300, 150], "flags": {}, "order": 0, "mode": 0}
    values = ["inductor", True, False, "before sampling"]
    graph = {"version": 0.4, "last_node_id": 1, "last_link_id": 0, "links": [], "nodes": []}
    loaded = browser.evaluate(
        "async graph => { await app.loadGraphData(graph); return app.graph.nodes[0].widgets.map((w) => w.value); }",
        {**graph, "nodes": [{**node, "widgets_values": values}]},
    )
    assert loaded[:4] == values


def wait_for(server, expected):
    """Wait until the frontend has stored the values that it shows."""
    wait_until(lambda: expected.items() <= server.get("/settings").items())


def wait_until(holds):
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)
