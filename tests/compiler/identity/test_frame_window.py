"""What a block leaves in a list of frames, and which of its arguments it reads."""

from __future__ import annotations

import json

import pytest
import torch
from compiled_graphs.compiler.common.reason import Unsupported
from compiled_graphs.compiler.common.torch_compat import pytree
from compiled_graphs.compiler.identity.frame_window import FrameWrites, bind_read
from torch import nn


def test_entries_come_from_outputs_the_list_the_result_or_are_plain():
    result, new, old = torch.ones(1), torch.ones(2), torch.ones(3)
    left = [old, new, "Rep", None, (result, (new, False), ()), 3]
    writes, kept = FrameWrites.of([None, old], left, 6, result)
    assert len(kept) == 2
    read = FrameWrites.from_text(writes.to_text())
    assert read == writes
    assert read.moved == 6
    values = read.values([None, old], result, kept)
    (ours, spec), (theirs, other) = (pytree.tree_flatten(entries) for entries in (values, left))
    assert spec == other
    assert all(one is other or one == other for one, other in zip(ours, theirs, strict=True))


def test_what_stood_before_may_be_a_tuple():
    old, result = torch.ones(3), torch.ones(1)
    given = [((None, old),), ()]
    writes, kept = FrameWrites.of(given, [((old, True),), (result,)], 0, result)
    assert kept == []
    assert FrameWrites.from_text(writes.to_text()).values(given, result, []) == [((old, True),), (result,)]


@pytest.mark.parametrize("left", [1.5, [1], torch.float32])
def test_other_values_are_refused(left):
    with pytest.raises(Unsupported):
        FrameWrites.of([None], [left], 1, None)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "[1]", "[[], 1]", '["1", []]', '[1, [["kept", "x"]]]', '[1, [["given", null]]]', '[1, [["x", 1]]]']
    + ['[1, [["tuple", null]]]', '[1, [["tuple", [1]]]]', '[1, [["tuple", [["x", 1]]]]]', f"[1, {'[' * 10**4}"]
    + ['[1, [["plain", [1]]]]', '[1, [["result", 1]]]', '[1, ["kept"]]', "[1, 2]", "null", json.dumps([1.0, []])],
)
def test_text_that_nobody_wrote_is_refused(text):
    with pytest.raises(ValueError, match="leaves in a list"):
        FrameWrites.from_text(text)


class Reading(nn.Module):
    def forward(self, x, cache=None, place=None, last=False, width=1):
        def inner():
            return place

        return x[:width], inner()


class Looking(nn.Module):
    def forward(self, x, last=False):
        return x, locals()


class Handing(Reading):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def names(cls, *args, **kwargs):
    return set(bind_read(cls, args, kwargs).arguments)


def test_arguments_that_no_code_reads_are_left_out():
    assert names(Reading, 1, [], [0], last=True, width=2) == {"x", "place", "width"}
    assert names(Reading, 1, [], [0], True) == {"x", "place"}
    assert names(Looking, 1, True) == {"x", "last"}
    assert names(Handing, 1, [], last=True) == {"args", "kwargs"}


def test_a_call_that_does_not_fit_is_refused():
    with pytest.raises(Unsupported, match="does not fit Reading"):
        names(Reading)
