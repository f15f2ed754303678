"""The help for a node: its page, its tooltips, and its search words."""

from __future__ import annotations

import re
from pathlib import Path

import comfy_browser
import pytest
from compiled_graphs.compiler.common.reason import ReasonCode

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "web" / "docs"
HEADINGS = {
    "": ["When to use it", "Inputs", "Outputs", "What runs at normal speed, and why", "Troubleshooting"],
    "zh": ["何时使用", "输入", "输出", "哪些部分以正常速度运行以及原因", "疑难解答"],
}


def page(node: str, language: str) -> str:
    """Return the page that ComfyUI's frontend shows: NODE/LANGUAGE.md, or else NODE.md."""
    return (DOCS / node / f"{language}.md" if language else DOCS / f"{node}.md").read_text(encoding="utf-8")


def every_page(language: str) -> str:
    names = [path.stem for path in DOCS.glob("*.md")]
    return " ".join("\n".join(page(name, language) for name in names).split())


def quoted(text: str) -> list[str]:
    """Return what a page quotes from the program: reasons, values, names."""
    return [" ".join(code.split()) for code in re.findall("`([^`]+)`", text)]


def fixed_part(code: ReasonCode) -> str:
    """Return the longest part of a reason's note that does not depend on the detail."""
    return max((part.strip() for part in re.split("[{}():]", code.value)), key=len)


@pytest.mark.parametrize("language", HEADINGS)
def test_every_node_has_a_page_that_names_its_sockets(server, language):
    nodes = {name: node for name, node in server.get("/object_info").items() if name.startswith("CG_")}
    assert nodes.keys() == {path.stem for path in DOCS.glob("*.md")}
    for name, node in nodes.items():
        text = page(name, language)
        assert re.findall(r"^## (.*)", text, re.MULTILINE)[:3] == HEADINGS[language][:3]
        assert set(HEADINGS[language]) <= set(re.findall(r"^## (.*)", text, re.MULTILINE))
        inputs, outputs = (text.split(f"## {title}\n")[1].split("\n## ")[0] for title in HEADINGS[language][1:3])
        wanted = [*node["input"].get("required", {}), *node["input"].get("optional", {})]
        assert sorted(re.findall(r"^- `(\w+)`", inputs, re.MULTILINE)) == sorted(wanted)
        assert re.findall(r"^- `(\w+)`", outputs, re.MULTILINE) == node["output"]


@pytest.mark.parametrize("language", HEADINGS)
def test_every_reason_to_run_eagerly_is_explained(language):
    texts = every_page(language)
    wanted = {fixed_part(code) for code in ReasonCode if code is not ReasonCode.HOST_SILENT}  # ComfyUI's host speaks
    assert sorted(note for note in wanted if note not in texts) == []


def test_both_languages_explain_the_same():
    for name in (path.stem for path in DOCS.glob("*.md")):
        english, chinese = (sorted(quoted(page(name, language))) for language in HEADINGS)
        assert english == chinese


def test_every_node_has_a_description_and_aliases(described_nodes):
    ours = {name: node for name, node in described_nodes["definitions"].items() if name.startswith("CG_")}
    assert len(ours) >= 5
    for node in ours.values():
        assert node["SEARCH_ALIASES"]
        assert len(node.get("OUTPUT_TOOLTIPS", [])) == len(node["RETURN_TYPES"])
        assert node["DESCRIPTION"]


def test_a_server_serves_the_pages(server):
    from urllib.request import urlopen

    for place in ("CG_SaveGraph.md", "CG_SaveGraph/zh.md"):
        with urlopen(f"{server.address}/extensions/compiled-graphs/docs/{place}", timeout=60) as answer:
            assert answer.read().decode() == (DOCS / place).read_text(encoding="utf-8")


@pytest.mark.skipif(bool(comfy_browser.missing()), reason=comfy_browser.missing())
@pytest.mark.parametrize("language", HEADINGS)
def test_a_nodes_info_button_opens_its_page(server, language):
    locale = language or "en"
    with comfy_browser.browse(server.address, {"Comfy.Locale": locale}) as browser:
        if browser is None:
            pytest.skip("this ComfyUI's frontend has no help pages")
        button = browser.get_by_test_id("info-button")
        comfy_browser.click_until(browser, "CG_CompileModel", button)
        button.dispatch_event("click")
        text = browser.locator(".node-help-content .markdown-content")
        text.wait_for()
        shown = text.locator("h1, h2").all_inner_texts()
        assert shown == re.findall(r"^##? (.*)", page("CG_CompileModel", language), re.MULTILINE)
