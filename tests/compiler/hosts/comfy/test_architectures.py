"""Every architecture in the table is compiled whole, and once for all sizes; or says why it is not."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import comfy.supported_models
import pytest
import torch
from architectures import ELSEWHERE, TABLE, At, after_first_frame
from compiled_graphs.compiler.common.counters import totals
from compiled_graphs.compiler.hosts.comfy import compile as host
from plain_process import PlainProcess

pytestmark = pytest.mark.usefixtures("traced_once")

FIRST, OTHER = At(1, 3, 16, 24, 20), At(1, 5, 24, 16, 33)
BATCH = At(2, 3, 16, 24, 20)
BOUND = 5e-2 if torch.cuda.is_available() else 1e-5
NEWEST = "MiniMaxH3"
"""A class that came with the ComfyUI for which the table says when graphs are made."""


@pytest.fixture(scope="module")
def plain_process(tmp_path_factory):
    process = PlainProcess(tmp_path_factory.mktemp("plain"))
    yield process
    process.stop()


@pytest.mark.parametrize("architecture", TABLE, ids=lambda architecture: architecture.name)
def test_architecture(architecture, registry, plain_process):
    for cls in (architecture.cls, architecture.since or architecture.cls):
        if not hasattr(comfy.supported_models, cls):
            pytest.skip(f"this ComfyUI has no {cls}")
    first, *others = sizes = (FIRST, OTHER, BATCH) if architecture.batches else (FIRST, OTHER)
    expected = dict(zip(sizes, plain_process.sample(architecture.name, sizes), strict=True))
    ours, text = host.compile_model(architecture.patcher(), host.Request("eager", verify=False))
    compiled = ours.object_patches["diffusion_model.forward"].compiled
    counters, ahead = compiled.counters, compiled.counters.compiles
    assert _error(architecture.sample(ours, first), expected[first]) < BOUND, text
    if hasattr(comfy.supported_models, NEWEST):  # an older ComfyUI may make other calls
        assert (0 < ahead == counters.compiles) == architecture.ahead
        assert compiled.summary().waiting == architecture.idle or not architecture.share
    with nullcontext() if not architecture.sizes else totals.expect(compiles=0, retired=0):
        for at in others:
            assert _error(architecture.sample(ours, at), expected[at]) < BOUND
    uncompiled = sum(counters.eager_calls.values())
    assert counters.calls > 0
    assert round(100 * (1 - uncompiled / counters.calls)) == architecture.share
    assert {reason.code for reason in counters.eager_calls} == set(architecture.reasons)


def right_half(at):
    """The part of each frame that is painted anew."""
    return (torch.arange(at.width) >= at.width // 2).float().expand(1, 1, at.frames, at.height, at.width)


def first_frame_and_half(at):
    return after_first_frame(at) * right_half(at)


@pytest.mark.parametrize("name", ["LTX-2", "LTX-Video"])
@pytest.mark.parametrize("begins_with", [None, right_half, after_first_frame])
def test_masks_come_and_go_in_one_model(name, begins_with, registry):
    """The network looks at a mask's values, and calls its blocks in another way for each kind of mask."""
    architecture = next(row for row in TABLE if row.name == name)
    if not hasattr(comfy.supported_models, architecture.cls):
        pytest.skip(f"this ComfyUI has no {architecture.cls}")
    plain, fast = architecture.patcher(), host.compile_model(architecture.patcher(), host.Request("eager"))[0]

    def check(mask, at):
        row = replace(architecture, mask=mask)
        assert _error(row.sample(fast, at), row.sample(plain, at)) < BOUND

    for mask in (begins_with, None, right_half, after_first_frame):
        check(mask, FIRST)
    with totals.expect(compiles=0, retired=0):
        for at in (OTHER, FIRST):
            for mask in (after_first_frame, None, first_frame_and_half, right_half):
                check(mask, at)
    assert host.compiled_model(fast).counters.eager_calls == {}


def test_every_class_has_a_row_or_a_reason_to_have_none():
    named = {row.cls for row in TABLE} | {name for names in ELSEWHERE.values() for name in names}
    assert {cls.__name__ for cls in comfy.supported_models.models} <= named


def test_the_page_about_compatibility_has_the_same_rows():
    page = (Path(__file__).parents[4] / "docs" / "compatibility.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", page.partition("## Models")[2].partition("\n## ")[0], re.M))
    names = {row.name for row in TABLE}
    assert {row.name: row.cell for row in TABLE} == {name: cell for name, cell in rows.items() if name in names}


def _error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert torch.isfinite(theirs).all()
    return ((ours - theirs).norm() / theirs.norm()).item()
