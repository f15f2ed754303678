"""README shows the figures that were measured, and every page that it or the results name is there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CURRENT = json.loads((ROOT / "benchmarks" / "current.json").read_text())
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])


@pytest.mark.parametrize("page", ["README.md", "benchmarks/RESULTS.md"])
@pytest.mark.parametrize("table", CURRENT)
def test_a_page_shows_the_figures_that_were_measured(page, table):
    text, unit = (ROOT / page).read_text(), CURRENT[table]["unit"]
    for row in CURRENT[table]["rows"]:
        normal, compiled, gain = re.search(
            rf"^\| {re.escape(row['model'])} \| ([\d.]+) {unit} \| ([\d.]+) {unit} \| ([\d.]+)x \|", text, re.M
        ).groups()
        assert float(normal) == pytest.approx(row["normal"], rel=0.006)
        assert float(compiled) == pytest.approx(row["compiled"], rel=0.007)
        assert float(gain) == pytest.approx(row["normal"] / row["compiled"], abs=0.05)


@pytest.mark.parametrize("table", CURRENT)
def test_each_figure_names_the_run_that_it_is_from(table):
    for row in CURRENT[table]["rows"]:
        run = (ROOT / "benchmarks" / "history" / f"{row['run']}.md").read_text()
        assert re.search(rf"\b{row['normal']:g}\d*\b", run), row
        assert re.search(rf"\b{row['compiled']:g}0*\b", run), row


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_readme_can_be_read_in_five_minutes():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
