"""Compile Report in a real server, and the picture that it draws."""

from __future__ import annotations

import importlib.util
import io
import sys
from pathlib import Path

import numpy
import pytest
from PIL import Image, ImageColor

SHADES = {"uncompiled": (154, 160, 166), "compiled": (26, 86, 176)}


def report(prompt, **inputs):
    """Add a report on the model, and a preview of its picture, to the workflow."""
    decoder = next(node for node, item in prompt.items() if item["class_type"] == "VAEDecode")
    prompt["40"] = {"class_type": "CG_CompileReport", "inputs": {"model": ["2", 0], "after": [decoder, 0], **inputs}}
    prompt["41"] = {"class_type": "PreviewImage", "inputs": {"images": ["40", 0]}}
    return prompt


def seen(server, outputs, node):
    (reference,) = outputs[node]["images"]
    return numpy.asarray(Image.open(io.BytesIO(server.image(reference))).convert("RGB"))


def areas(picture):
    return {name: int((picture == shade).all(-1).sum()) for name, shade in SHADES.items()}


def test_blocks_that_ran_have_bars_and_figures(server, workflow):
    outputs = server.run(report(workflow(64, 64, seed=51)))
    picture = seen(server, outputs, "40")
    assert min(areas(picture).values()) > 300
    assert (seen(server, outputs, "41") == picture).all()
    (text,) = outputs["40"]["text"]
    assert "UNetModel, its blocks" in text
    assert "3 of 3 block types compiled, 100% of" in text


def test_what_is_not_compiled_is_said(server, workflow):
    outputs = server.run(report(workflow(64, 64, seed=52, compiled=False), model=["1", 0]))
    assert "Model: Not compiled: connect what comes from Compile Model" in outputs["40"]["text"][0]
    assert seen(server, outputs, "40").std() > 1


def test_nothing_connected_is_no_fault(server):
    prompt = {"40": {"class_type": "CG_CompileReport", "inputs": {}}}
    outputs = server.run(prompt)
    assert outputs["40"]["text"][0].startswith("Compile Report: Not compiled")


@pytest.fixture(scope="module")
def drawing():
    """The module that draws, imported without the nodes, which need ComfyUI."""
    path = Path(__file__).resolve().parents[2] / "nodes" / "report_picture.py"
    name = "compiled_graphs.nodes.report_picture"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


def test_bars_are_as_long_as_their_times(drawing):
    row = drawing.Row("ResBlock (5 blocks)", 80.0, 20.0, "compiled, 2.1 s")
    picture = numpy.asarray(drawing.draw([drawing.Section("Model: UNetModel", ["a line"], [row])]))
    heights = {name: areas(picture)[name] - 15 * 15 for name in SHADES}  # without the legend
    assert heights["uncompiled"] / heights["compiled"] == pytest.approx(4, rel=0.05)
    assert ImageColor.getrgb(drawing.EAGER) == SHADES["uncompiled"]
    assert ImageColor.getrgb(drawing.COMPILED) == SHADES["compiled"]


def test_a_picture_grows_with_rows_and_cuts_long_texts(drawing):
    rows = [drawing.Row("A" * 200, None, None, "uncompiled: " + "because " * 60)] * 20
    picture = drawing.draw([drawing.Section("VAE", ["word " * 200], rows)])
    assert picture.width == drawing.WIDTH
    assert picture.height > 20 * drawing.ROW
    edge = numpy.asarray(picture)[:, -drawing.MARGIN // 2 :]
    assert (edge == 255).all()


def test_what_is_slower_says_so_and_a_missing_font_leaves_english(drawing, monkeypatch):
    assert drawing._factor(drawing.Row("a", 10.0, 20.0, "")) == "2.00x slower"
    assert drawing._factor(drawing.Row("a", 20.0, 10.0, "")) == "2.00x faster"
    sections = [drawing.Section("Model", ["a line"], [drawing.Row("a", 10.0, 20.0, "")])]
    monkeypatch.setattr(drawing, "FONTS", {"zh": ("no such font",)})
    assert (numpy.asarray(drawing.draw(sections, "zh")) == numpy.asarray(drawing.draw(sections))).all()
