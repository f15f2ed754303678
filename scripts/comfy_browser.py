"""ComfyUI's frontend in a headless Chromium, for tests and pictures."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page, Route

ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
LIMIT = 180_000
"""Milliseconds that the frontend may take to come up."""


def missing() -> str:
    """Return what is missing for a browser, or nothing."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is not installed"
    return "" if _chromium() else "there is no chromium; CHROMIUM may name one"


@contextmanager
def browse(address: str, settings: Mapping[str, Any] | None = None) -> Iterator[Page | None]:
    """Open a server's frontend with these of its settings, once it is up; None if it is one of before 2025.

    The settings are this page's: the server's stay as they are. Nothing but the server can be reached.
    """
    from playwright.sync_api import sync_playwright

    chosen = {"Comfy.TutorialCompleted": True, "Comfy.Locale": "en", **(settings or {})}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_chromium(), args=ARGUMENTS)
        try:
            page = browser.new_page(viewport={"width": 1500, "height": 950})
            page.route(lambda url: not url.startswith(address), lambda route: route.abort())
            page.route("**/api/settings", lambda route: _add(route, chosen))
            page.goto(address)
            page.wait_for_function("Boolean(window.app?.graph)", timeout=LIMIT)
            if not page.evaluate("Boolean(window.app.extensionManager?.setting)"):
                yield None
                return
            page.wait_for_function(
                "'CG_CompileModel' in LiteGraph.registered_node_types && app.vueAppReady", timeout=LIMIT
            )
            yield page
        finally:
            browser.close()


def add_node(page: Page, kind: str) -> dict[str, Any]:
    """Put a node alone on the canvas, select it, and return the values of its widgets.

    The nodes before it are removed one by one: after a `clear` it would get a number that was in use, and the
    frontend of 2026 gives it the values that the node of that number had.
    """
    return page.evaluate(
        """kind => {
            for (const other of [...app.graph.nodes]) app.graph.remove(other);
            app.canvas.ds.reset();
            const node = LiteGraph.createNode(kind);
            node.pos = [600, 300];
            app.graph.add(node);
            app.canvas.selectNode(node);
            app.canvas.setDirty(true, true);
            return Object.fromEntries((node.widgets ?? []).map((widget) => [widget.name, widget.value]));
        }""",
        kind,
    )


def click_until(page: Page, kind: str, shown: Locator) -> None:
    """Click a node until this is shown: newer frontends show at a click what goes with a selected node.

    A frontend that has just started misses clicks, and may load its first workflow over the node.
    AssertionError: it was not shown in a minute; the message says what is on the canvas.
    """
    for attempt in range(60):
        if attempt % 10 == 0:
            add_node(page, kind)
        _click_first_node(page)
        page.wait_for_timeout(1000)
        if shown.count():
            return
    canvas = page.evaluate(
        "[app.graph.nodes.map(({ type }) => type), ...app.canvas.ds.offset, app.canvas.selectedItems?.size]"
    )
    raise AssertionError(f"clicks on {kind} did not show {shown}: {canvas}")


def _click_first_node(page: Page) -> None:
    place = page.evaluate(
        """() => {
            const [x, y] = app.graph.nodes[0].pos, shown = app.canvas.canvas.getBoundingClientRect();
            const [left, top] = app.canvas.ds.convertOffsetToCanvas([x + 60, y - 15]);
            return [left + shown.left, top + shown.top];
        }"""
    )
    page.mouse.click(*place)


def _add(route: Route, chosen: Mapping[str, Any]) -> None:
    if route.request.method != "GET":
        route.continue_()
        return
    answer = route.fetch()
    route.fulfill(response=answer, json={**answer.json(), **chosen})


def _chromium() -> str | None:
    return os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
