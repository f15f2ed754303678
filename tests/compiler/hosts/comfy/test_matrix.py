"""Compile Model under everything that people put between a loader and a sampler.

Each cell of the matrix compares compiled with eager from the same seed, for two prompts with different values;
the second may compile nothing, and each region call that ran eagerly must have one of the row's reasons.
Set COMPILED_GRAPHS_BACKEND for another backend, COMPILED_GRAPHS_STEPS=9 to have steps recorded and replayed, and
COMPILED_GRAPHS_COVERAGE to a file to have the share of compiled calls in each cell written there:
docs/compatibility.md shows it.
"""

from __future__ import annotations

import inspect
import json
import os
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from comfy.ldm.modules import attention
from compiled_graphs.compiler.common.counters import totals
from compiled_graphs.compiler.hosts.comfy import compile as host
from compiled_graphs.compiler.hosts.comfy import process, sampling_hooks
from compiled_graphs.compiler.registry.registry import Registry
from compiled_graphs.compiler.runtime.step_replay import StepReplay
from recorders import repeat
from rows import COLUMNS, ROWS, Missing, unchanged

BOUND = 5e-2 if torch.cuda.is_available() else 2e-4
"""Relative error of a sampled latent; GPUs sample in half precision."""
STEPS = int(os.environ.get("COMPILED_GRAPHS_STEPS", "1"))
BACKEND = os.environ.get("COMPILED_GRAPHS_BACKEND", "eager")
CELLS = [(column, row) for column in COLUMNS for row in ROWS if column in row.columns]
LIMITS = frozenset()
if "_override" not in inspect.getsource(attention):
    LIMITS = {
        "sizes outside of what the graph was traced for",
        "what it computes depends on values (aten._local_scalar_dense.default)",
    }
"""Where attention cannot be an operator, a CPU's is traced with the sizes of its chunks."""
COVERAGE: dict[str, dict[str, float]] = {}


@pytest.fixture(scope="module")
def graphs() -> Registry:
    return Registry()


@pytest.fixture(scope="module")
def column(load, graphs):
    """Return a tiny model and its compiled clone by name, each made once."""

    @cache
    def make(name):
        model = load(name)
        return model, compiled(model)

    return make


@pytest.fixture(autouse=True)
def _shared_graphs(graphs, monkeypatch):
    monkeypatch.setattr(process, "registry", lambda: graphs)


@pytest.fixture(scope="module", autouse=True)
def _recorded():
    """Without a GPU a stand-in repeats what CUDA graphs would."""
    with pytest.MonkeyPatch.context() as patch:
        if STEPS > 1 and not torch.cuda.is_available():
            patch.setattr(sampling_hooks, "can_capture", lambda device: True)
            patch.setattr(sampling_hooks, "StepReplay", partial(StepReplay, capture=repeat))
        yield


@pytest.fixture(scope="module", autouse=True)
def _report():
    yield
    if path := os.environ.get("COMPILED_GRAPHS_COVERAGE"):
        Path(path).write_text(json.dumps(COVERAGE, indent=1))


def compiled(model):
    return host.compile_model(model, host.Request(BACKEND, verify=False))[0]


def draw(sample, name, row, model, value):
    torch.manual_seed(0)  # some patches draw numbers of their own
    arguments = {"width": 12} | row.arguments(model, value)  # the rows' masks are of this size
    return sample(model, name, **{**arguments, "steps": max(STEPS, arguments.get("steps", 1))})


def relative(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize(("name", "row"), CELLS, ids=[f"{row.name}-{name}" for name, row in CELLS])
def test_cell(name, row, column, sample):
    model, fast = column(name)
    try:
        expected = [draw(sample, name, row, row.change(model, value), value) for value in row.values]
    except Missing as missing:
        pytest.skip(f"this ComfyUI has no {missing}")
    plain = draw(sample, name, row, model, row.values[0])
    if row.change is not unchanged and row.acts:
        assert relative(expected[0], plain) > 1e-3, "the row does nothing"
    # A signature that nobody foresaw may compile once.
    draw(sample, name, row, row.change(fast, row.values[0]), row.values[0])
    calls, before = totals.calls, totals.eager_calls.copy()
    with totals.expect(compiles=0, retired=0):
        for value, theirs in zip(reversed(row.values), reversed(expected), strict=True):
            assert theirs.isfinite().all()
            assert relative(draw(sample, name, row, row.change(fast, value), value), theirs) <= BOUND
        if row.change is not unchanged:
            patched_before = compiled(row.change(model, row.values[1]))
            assert relative(draw(sample, name, row, patched_before, row.values[1]), expected[1]) <= BOUND
        eager = totals.eager_calls - before
        COVERAGE.setdefault(row.name, {})[name] = 1 - eager.total() / (totals.calls - calls)
        assert {str(reason) for reason in eager} - LIMITS == row.eager
        if row.change is not unchanged:
            calls, before = totals.calls, totals.eager_calls.copy()
            assert relative(draw(sample, name, row, fast, row.values[0]), plain) <= BOUND
            assert totals.calls > calls
            assert totals.eager_calls == before, "a patch that is gone still keeps regions eager"
