"""Compile Model under everything that people put between a loader and a sampler.

Each cell of the matrix compares compiled with eager from the same seed, for two prompts with different values;
the second may compile nothing, and each region call that ran eagerly must have one of the row's reasons.
Set COMPILED_GRAPHS_COVERAGE to a file to have the table of docs/compatibility.md written there.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path

import pytest
import torch
from compiled_graphs.compiler.counters import totals
from compiled_graphs.compiler.hosts import comfy as host
from compiled_graphs.compiler.registry import Registry
from rows import ALL, ROWS, Missing

BOUND = 5e-2 if torch.cuda.is_available() else 2e-4
"""Relative error of a sampled latent; GPUs sample in half precision."""
CELLS = [(column, row) for column in ALL for row in ROWS if column in row.columns]
COVERAGE: dict[str, dict[str, float]] = {}


@pytest.fixture(scope="module")
def graphs() -> Registry:
    return Registry()


@pytest.fixture(scope="module")
def column(load, graphs):
    """A tiny model, and what compiles it with the graphs that this file shares."""

    @cache
    def make(name):
        return load(name)

    return make


@pytest.fixture(autouse=True)
def _shared_graphs(graphs, monkeypatch):
    monkeypatch.setattr(host, "registry", lambda: graphs)


@pytest.fixture(scope="module", autouse=True)
def _report():
    yield
    if path := os.environ.get("COMPILED_GRAPHS_COVERAGE"):
        Path(path).write_text(json.dumps(COVERAGE, indent=1))


def compiled(model):
    return host.compile_model(model, host.Request("eager", verify=False))[0]


def draw(sample, name, row, model, value):
    torch.manual_seed(0)  # some patches draw numbers of their own
    return sample(model, name, **row.arguments(model, value))


def relative(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize(("name", "row"), CELLS, ids=[f"{row.name}-{name}" for name, row in CELLS])
def test_cell(name, row, column, sample):
    model = column(name)
    fast = compiled(model)
    try:
        expected = [draw(sample, name, row, row.change(model, value), value) for value in row.values]
    except Missing as missing:
        pytest.skip(f"this ComfyUI has no {missing}")
    plain = draw(sample, name, row, model, row.values[0])
    if row.change.__name__ != "unchanged" and row.acts:
        assert relative(expected[0], plain) > 1e-3, "the row does nothing"
    draw(
        sample, name, row, row.change(fast, row.values[0]), row.values[0]
    )  # a structure that nobody foresaw may compile once
    calls, before = totals.calls, totals.eager_calls.copy()
    with totals.expect(compiles=0, retired=0):
        for value, theirs in zip(reversed(row.values), reversed(expected), strict=True):
            assert theirs.isfinite().all()
            patched_after = row.change(fast, value)
            patched_before = compiled(row.change(model, value))
            for changed in (patched_after, patched_before):
                assert relative(draw(sample, name, row, changed, value), theirs) <= BOUND
        eager = totals.eager_calls - before
        COVERAGE.setdefault(row.name, {})[name] = 1 - eager.total() / (totals.calls - calls)
        assert set(eager) == row.eager
        calls, before = totals.calls, totals.eager_calls.copy()
        assert relative(draw(sample, name, row, fast, row.values[0]), plain) <= BOUND
    if row.change.__name__ != "unchanged":
        assert totals.calls > calls
        assert totals.eager_calls == before, "a patch that is gone still keeps regions eager"
