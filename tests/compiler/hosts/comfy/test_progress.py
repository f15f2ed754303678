"""How far compiling is, in the words that a person is shown."""

from __future__ import annotations

import logging

import comfy.utils
import pytest
from compiled_graphs.compiler.hosts.comfy import compile as host
from compiled_graphs.compiler.hosts.comfy.progress import BEGINNING, ProgressReport, in_words, progress_text
from compiled_graphs.compiler.runtime.summary import Progress


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("SpatialTransformer (input_blocks.4.1)", "spatial transformer, input blocks 4 1"),
        ("ResBlock (middle_block.0)", "res block, middle block 0"),
        ("AutoencoderKL", "autoencoder kl"),
    ],
)
def test_regions_in_words(label, words):
    assert in_words(label) == words


@pytest.mark.parametrize(
    ("done", "source", "elapsed", "text"),
    [
        (1, "compiled", 10.0, "1 of 4: res block, a: compiled in 9.0 s; about 30 s left"),
        (3, "compiled", 600.0, "3 of 4: res block, a: compiled in 9.0 s; about 3 min left"),
        (4, "compiled", 40.0, "4 of 4: res block, a: compiled in 9.0 s"),
        (1, "disk", 0.2, "1 of 4: res block, a: loaded from disk"),
        (2, "eager", 1.0, "2 of 4: res block, a: stays uncompiled"),
    ],
)
def test_a_long_compile_says_how_long_it_will_be(done, source, elapsed, text):
    assert progress_text(Progress(done, 4, "ResBlock (a)", source, 9.0), elapsed) == text


def test_each_graph_moves_the_bar_is_told_and_makes_one_line_of_the_log(monkeypatch, caplog):
    moved, told, times = [], [], iter([100.0, 108.0, 116.0])
    monkeypatch.setattr(comfy.utils.ProgressBar, "update_absolute", lambda self, *values: moved.append(values))
    caplog.set_level(logging.INFO)
    report = ProgressReport("7", told.append, lambda: next(times))
    report.begin()
    for done in (1, 2):
        report(Progress(done, 2, "ResBlock (a)", "compiled", 8.0))
    assert moved == [(1, 2), (2, 2)]
    assert told == [
        BEGINNING,
        "1 of 2: res block, a: compiled in 8.0 s; about 8 s left",
        "2 of 2: res block, a: compiled in 8.0 s",
    ]
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert lines == [("INFO", f"[{done}/2] ResBlock (a): compiled, 8.0 s") for done in (1, 2)]


def test_compiling_a_model_tells_each_region_and_prints_nothing(load, registry, capsys):
    told = []
    _, text = host.compile_model(load("tiny_sd15"), host.Request("eager", on_progress=told.append))
    assert text.startswith("3 regions, 3 compiled")
    assert told[0] == BEGINNING
    assert [line.split(": ")[0] for line in told[1:]] == ["1 of 3", "2 of 3", "3 of 3"]
    assert all("res block" in line or "spatial transformer" in line for line in told[1:])
    assert capsys.readouterr().out == ""
