"""The registry panel in ComfyUI's own frontend: its content, its buttons, and its automatic updates."""

from __future__ import annotations

import itertools
import re
import time

import comfy_browser
import pytest

SEEDS = itertools.count(1)
"""Each prompt gets a new seed, because ComfyUI does not repeat an equal prompt."""
TIMES = "\N{MULTIPLICATION SIGN}"
LIMIT = comfy_browser.LIMIT

pytestmark = pytest.mark.skipif(bool(comfy_browser.missing()), reason=comfy_browser.missing() or "-")


@pytest.fixture(scope="module")
def server(make_home, start_server):
    with start_server(make_home("tiny_sd15")) as server:
        yield server


@pytest.fixture(scope="module")
def shared_page(server):
    with comfy_browser.browse(server.address) as page:
        if page is None:
            pytest.skip("this ComfyUI's frontend has no sidebar")
        page.errors = []
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        yield page


@pytest.fixture
def page(server, shared_page):
    """The frontend with the panel open, and nothing in the registry."""
    for name in server.get("/compiled_graphs/registry")["workflows"]:
        shared_page.evaluate(
            "workflow => fetch('/compiled_graphs/drop', {method: 'POST', body: JSON.stringify({workflow}), "
            "headers: {'Content-Type': 'application/json'}})",
            name,
        )
    shared_page.unroute("**/compiled_graphs/**")
    shared_page.evaluate("app.extensionManager.sidebarTab.activeSidebarTabId = null")
    shared_page.click(".compiled-graphs-tab-button")
    return shared_page


@pytest.fixture
def panel(page):
    return page.locator(".compiled-graphs-panel")


@pytest.fixture
def load(page, workflow):
    """Return a function that loads the tiny workflow in the frontend, as one that was never opened before."""

    def load():
        page.evaluate(
            "async prompt => { await app.loadApiJson(prompt, 'my workflow'); app.graph.id = crypto.randomUUID(); }",
            workflow(),
        )

    return load


@pytest.fixture
def run(server, page, load):
    """Load the tiny workflow in the frontend. Return a function that queues it and waits for its end."""
    load()

    def run():
        page.evaluate(
            "seed => { app.graph.getNodeById(6).widgets.find(w => w.name === 'seed').value = seed }", next(SEEDS)
        )
        ended = len(server.get("/history"))
        page.evaluate("app.queuePrompt(0)")
        deadline = time.monotonic() + LIMIT / 1000
        while len(server.get("/history")) == ended:
            assert time.monotonic() < deadline, "the prompt did not end"
            page.wait_for_timeout(50)

    return run


def see(locator, text):
    from playwright.sync_api import expect

    expect(locator).to_contain_text(text, timeout=LIMIT)


def is_seen(locator, text):
    """Whether a text appears within ten seconds."""
    from playwright.sync_api import expect

    try:
        expect(locator).to_contain_text(text, timeout=10_000)
    except AssertionError:
        return False
    return True


def falls_quiet(page, address):
    """Whether two seconds pass without a request. It tries repeatedly, because a busy machine sends some late."""
    asked = []
    page.on("request", lambda request: asked.append(request.url) if address in request.url else None)
    for _ in range(20):
        asked.clear()
        page.wait_for_timeout(2000)
        if not asked:
            return True
    return False


def see_details(panel):
    """Open what is for developers. A network call appears there after the first prompt's undisturbed calls."""
    see(panel, "Details")
    if not panel.locator("details.cg-facts[open]").count():
        panel.get_by_text("Details", exact=True).click()
    see(panel, "Network call")


def see_machine(panel):
    """Open the section that says what this machine has."""
    see(panel, "This machine")
    if not panel.locator("details.cg-machine[open]").count():
        panel.get_by_text("This machine").click()


def reopen(page):
    """Close and open the panel, which then asks the server again."""
    page.click(".compiled-graphs-tab-button")
    page.click(".compiled-graphs-tab-button")


def wait_for_requests(page, requests, count):
    deadline = time.monotonic() + LIMIT / 1000
    while len(requests) < count:
        assert time.monotonic() < deadline, f"{len(requests)} of {count} requests have come"
        page.wait_for_timeout(50)


def fact(panel, name):
    return panel.locator(f"dt:text-is('{name}') + dd").inner_text()


def gain(factor):
    """What the panel says of a factor of speed."""
    if abs(factor - 1) < 0.05:
        return "same speed"
    return f"{factor:.2f}{TIMES} faster" if factor > 1 else f"{1 / factor:.2f}{TIMES} slower"


def role(server):
    (workflow,) = server.get("/compiled_graphs/registry")["workflows"].values()
    return workflow["roles"]["2:base UNet"]


def test_the_panel_shows_what_to_do_and_what_was_done(server, page, panel, run):
    see(panel, "Nothing is compiled yet. Put Compile Model between a loader and a sampler")
    run()
    see(panel, "3 of 3 block types compiled")
    see_details(panel)
    found = role(server)
    assert "my workflow" in panel.locator(".cg-name").inner_text()
    assert panel.locator(".cg-kind").inner_text() == "base UNet node 2"
    assert panel.locator(".cg-gain").inner_text() == gain(found["speed_up"])
    assert fact(panel, "Block calls") == str(found["calls"])
    assert TIMES.join(["2", "4", "16", "16"]) in fact(panel, "Network call")

    panel.get_by_text("3 graphs", exact=True).click()
    rows = panel.locator(".cg-graph").all_inner_texts()
    assert len(rows) == len(found["graphs"]) == 3
    for text, graph in zip(rows, found["graphs"], strict=True):
        assert graph["region"] in text
        assert gain(graph["timing"]["eager"] / graph["timing"]["graph"]) in text
        assert re.search(r"(<\s)?[\d.]+\sm?s uncompiled, (<\s)?[\d.]+\sm?s compiled", text)
    assert page.errors == []


def test_the_panel_follows_changes_without_polling(server, page, panel, run):
    shown = panel.locator("dt:text-is('Block calls') + dd")
    run()
    see_details(panel)
    before = role(server)["calls"]
    see(shown, str(before))
    panel.get_by_text("What the figures mean").click()
    run()
    assert role(server)["calls"] > before
    see(shown, str(role(server)["calls"]))
    assert panel.get_by_text("the median of the last 20 calls").is_visible(), "what was opened stays open"

    assert falls_quiet(page, "compiled_graphs")


def test_a_closed_panel_reads_nothing(page, panel, run):
    run()
    see_details(panel)
    page.click(".compiled-graphs-tab-button")
    assert falls_quiet(page, "graphs/registry")
    asked = []
    page.on("request", lambda request: asked.append(request.url) if "graphs/registry" in request.url else None)
    run()
    page.wait_for_timeout(1500)
    assert asked == []
    page.click(".compiled-graphs-tab-button")
    see(panel, "3 of 3 block types compiled")


def test_save_writes_a_file(server, page, panel, run):
    run()
    see_details(panel)
    panel.get_by_role("button", name="Write these graphs").click()
    see(panel.get_by_role("status"), "3 graphs saved to my_workflow")
    # The frontends of 2026 number workflows of one name.
    name = re.search(
        r"my_workflow(_\d+)?_base_UNet_00001_\.graph\.safetensors", panel.get_by_role("status").inner_text()
    )
    assert (server.home / "models/compiled_graphs" / name[0]).is_file()


def test_drop_empties_memory_and_graphs_load_from_disk(server, page, panel, run):
    run()
    see_details(panel)
    panel.get_by_role("button", name="Take the graphs of this workflow out of memory").click()
    see(panel.get_by_role("status"), "3 graphs freed.")
    see(panel, "Nothing is compiled yet")
    assert server.get("/compiled_graphs/registry")["memory"]["graphs"] == 0
    compiles = server.get("/compiled_graphs/registry")["totals"]["compiles"]
    run()
    see(panel, "3 of 3 block types compiled")
    assert server.get("/compiled_graphs/registry")["totals"]["compiles"] == compiles
    assert {graph["source"] for graph in role(server)["graphs"]} == {"disk"}


def test_what_the_server_refuses_is_shown(page, panel, run):
    run()
    see_details(panel)
    answer = {"status": 409, "json": {"error": "A prompt is running. Free the graphs when it has ended."}}
    page.route("**/compiled_graphs/drop", lambda route: route.fulfill(**answer))
    panel.get_by_role("button", name="Take the graphs").click()
    see(panel.get_by_role("status"), answer["json"]["error"])
    assert "cg-bad" in panel.get_by_role("status").get_attribute("class")


def test_help_is_drawn_from_its_markdown(page, panel, run):
    run()
    see_details(panel)
    panel.get_by_role("button", name="Open the help of the node that made this").first.click()
    text = panel.locator(".cg-help")
    see(text, "When to use it")
    assert text.locator("h1").inner_text() == "Compile Model"
    assert text.locator("li code").count() > 5
    assert "##" not in text.inner_text()
    assert "**" not in text.inner_text()
    panel.get_by_role("button", name="Back to the models").click()
    see(panel, "What the figures mean")


def test_markup_in_help_is_text(page, panel):
    page.route("**/docs/CG_CompileModel.md", lambda route: route.fulfill(body="# Help <b>of</b> `<i>` the node"))
    try:
        panel.get_by_role("button", name="Open the help of Compile Model").click()
        see(panel, "Help <b>of</b> <i> the node")
        panel.get_by_role("button", name="Back to the models").click()
    finally:
        page.unroute("**/docs/CG_CompileModel.md")


def test_a_reloaded_workflow_shows_what_its_nodes_said_last(page, panel, run):
    run()
    see(panel, "3 of 3 block types compiled")
    status = page.locator(".compiled-graphs-status")
    see(status, "Ready")
    told = status.inner_text()
    page.evaluate("async () => { await app.loadGraphData(app.graph.serialize()) }")
    see(status, told)
    assert status.count() == 1


def test_everything_is_there_in_chinese(page, panel, load, run):
    set_locale = "locale => app.extensionManager.setting.set('Comfy.Locale', locale)"
    page.evaluate(set_locale, "zh")
    try:
        see(page.locator("body"), "运行")
        for _ in range(3):  # a busy frontend redraws the workflow of before only after `load`
            load()
            run()
            if is_seen(page.locator(".compiled-graphs-status"), "就绪"):
                break
        see(page.locator(".compiled-graphs-status"), "就绪")
        see(panel, "3 种块中已编译 3 种")
        panel.get_by_role("button", name="打开“编译模型”的帮助").click()
        see(panel.locator(".cg-help"), "何时使用")
        panel.get_by_role("button", name="返回模型列表").click()
    finally:
        page.evaluate(set_locale, "en")


FACT = {"name": "a fact", "text": "", "ok": True, "remedy": "", "present": True}
MARKUP = "<img src=x onerror='window.broken = true'>"
HOSTILE_ROLE = {
    **{"regions": 2, "compiled": 1, "variants": 1, "eager": 1, "speed_up": 1.5, "calls": 3, "seconds": 1.0},
    **{"compiles": 1, "from_disk": 0, "from_file": 0, "from_memory": 0, "replays": 0, "recordings": 0},
    **{"reasons": {MARKUP: 2}, "paces": [{"method": "forward", "shape": [1, 2], "seconds": 0.1, "calls": 2}]},
    "graphs": [{"region": MARKUP, "blocks": 2, "state": "eager", "reason": MARKUP}],
}
HOSTILE = {
    "workflows": {MARKUP: {"roles": {f"{MARKUP}:{MARKUP}": HOSTILE_ROLE}}},
    "totals": HOSTILE_ROLE,
    "memory": {"graphs": 1, "bytes": 1},
    "disk": None,
    "explained": {MARKUP: MARKUP},
}


def test_markup_is_shown_as_text_and_facts_are_listed(page, panel):
    facts = [
        {"name": "torch", "text": "2.8.0", "ok": True, "remedy": "", "present": True},
        {"name": "oneflow", "text": "not here", "ok": True, "remedy": "", "present": False},
        {"name": "Triton", "text": MARKUP, "ok": False, "remedy": "pip install triton", "present": True},
    ]
    page.route("**/compiled_graphs/registry?*", lambda route: route.fulfill(json=HOSTILE))
    page.route("**/compiled_graphs/doctor?*", lambda route: route.fulfill(json=facts))
    reopen(page)
    see(panel, "1 thing to look at")
    see_machine(panel)
    see(panel, "pip install triton")
    icons = panel.locator(".cg-fact i").evaluate_all("found => found.map((icon) => icon.className)")
    assert icons == ["pi pi-check cg-good", "pi pi-minus cg-muted", "pi pi-times cg-bad"]
    panel.get_by_text("1 graph", exact=True).click()
    assert panel.get_by_text(MARKUP).count() >= 3
    assert panel.locator("img").count() == 0
    assert page.evaluate("window.broken") is None


def test_a_late_answer_does_not_replace_a_newer_one(page, panel):
    requests = []
    page.route("**/compiled_graphs/doctor?*", lambda route: requests.append(route))
    for _ in ("older", "newer"):
        reopen(page)
    wait_for_requests(page, requests, 2)
    older, newer = requests
    newer.fulfill(json=[{**FACT, "name": "newer"}])
    see_machine(panel)
    see(panel.locator(".cg-fact"), "newer")
    with page.expect_response("**/compiled_graphs/doctor?*"):
        older.fulfill(json=[{**FACT, "name": "older"}])
    page.wait_for_timeout(300)
    see(panel.locator(".cg-fact"), "newer")


def test_a_help_page_that_still_loads_does_not_open_after_going_back(page, panel):
    open_help, requests = panel.get_by_role("button", name="Open the help of Compile Model"), []
    open_help.click()
    back = panel.get_by_role("button", name="Back to the models")
    back.wait_for()
    page.route("**/docs/*.md", lambda route: requests.append(route))
    open_help.click()
    wait_for_requests(page, requests, 1)
    back.click()
    with page.expect_response("**/docs/*.md"):
        requests[0].fulfill(body="# Late")
    page.wait_for_timeout(300)
    assert back.count() == 0


def test_without_a_doctor_there_is_no_such_section(page, panel):
    page.route("**/compiled_graphs/doctor?*", lambda route: route.fulfill(status=404))
    reopen(page)
    see(panel, "What the figures mean")
    page.wait_for_timeout(300)
    assert "This machine" not in panel.inner_text()
