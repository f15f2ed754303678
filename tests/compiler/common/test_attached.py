"""What is attached to a network belongs to that one alone."""

from __future__ import annotations

import copy
import pickle

import pytest
from compiled_graphs.compiler.common.attached import attached
from torch import nn


def test_it_stays():
    layer = nn.Linear(2, 2)
    attached(layer)["what"] = layer  # also if it leads back
    assert attached(layer)["what"] is layer
    assert not attached(nn.Linear(2, 2))


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_are_without_it(make):
    layer = nn.Linear(2, 2)
    attached(layer)["what"] = "a recording"
    made = make(layer)
    assert not attached(made)
    attached(made)["what"] = "another"
    assert attached(layer)["what"] == "a recording"
