"""How far compiling is, in the words that a person is shown."""

from __future__ import annotations

import logging
import math

import comfy.utils
import pytest
from compiled_graphs.compiler.hosts.comfy import compile as host
from compiled_graphs.compiler.hosts.comfy import progress
from compiled_graphs.compiler.hosts.comfy.progress import BEGINNING, ProgressReport, progress_text
from compiled_graphs.compiler.runtime.summary import Progress


@pytest.mark.parametrize(
    ("done", "compiles", "elapsed", "text"),
    [
        (0, False, 0.0, "Preparing 4 block types (compiled once per model type)"),
        (1, True, 10.0, "Compiling 4 block types, 1 done, about 30 s left (once per model type)"),
        (3, True, 600.0, "Compiling 4 block types, 3 done, about 3 min left (once per model type)"),
        (4, True, 40.0, "Compiling 4 block types, 4 done (once per model type)"),
        (1, False, 0.2, "Loading 4 block types, 1 done"),
    ],
)
def test_a_long_compile_says_how_long_it_will_be(done, compiles, elapsed, text):
    assert progress_text(done, 4, compiles, elapsed) == text


def test_each_graph_moves_the_bar_is_told_and_makes_one_line_of_the_log(monkeypatch, caplog):
    moved, told, times = [], [], iter([100.0, 100.0, 108.0, 116.0])
    monkeypatch.setattr(comfy.utils.ProgressBar, "update_absolute", lambda self, *values: moved.append(values))
    caplog.set_level(logging.INFO)
    report = ProgressReport("7", told.append, lambda: next(times))
    report.begin()
    report(Progress(0, 2, "", "", 0.0))
    for done in (1, 2):
        report(Progress(done, 2, "ResBlock (a)", "compiled", 8.0))
    assert moved == [(0, 2), (1, 2), (2, 2)]
    assert told == [
        BEGINNING,
        "Preparing 2 block types (compiled once per model type)",
        "Compiling 2 block types, 1 done, about 8 s left (once per model type)",
        "Compiling 2 block types, 2 done (once per model type)",
    ]
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert lines == [("INFO", f"[{done}/2] ResBlock (a): compiled, 8.0 s") for done in (1, 2)]


def test_compiling_a_model_tells_each_region_and_prints_nothing(load, registry, capsys, monkeypatch):
    told = []
    monkeypatch.setattr(progress, "WORTH_ESTIMATING", math.inf)  # on any machine
    _, text = host.compile_model(load("tiny_sd15"), host.Request("eager", on_progress=told.append))
    assert text.startswith("Ready: 3 of 3 block types compiled (")
    assert told[0] == BEGINNING
    assert [line.split(" (")[0] for line in told[1:]] == [
        "Preparing 3 block types",
        "Compiling 3 block types, 1 done",
        "Compiling 3 block types, 2 done",
        "Compiling 3 block types, 3 done",
    ]
    assert capsys.readouterr().out == ""
