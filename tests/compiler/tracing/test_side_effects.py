"""Code that runs ahead of time leaves nothing behind in caches, globals and objects."""

from __future__ import annotations

import functools
import gc
import random
import threading
from collections import deque

import numpy
import pytest
import torch
from compiled_graphs.compiler.common.host import Host
from compiled_graphs.compiler.common.random_state import same_random_numbers
from compiled_graphs.compiler.tracing import side_effects
from compiled_graphs.compiler.tracing.side_effects import untouched
from networks import call_with, install
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

GRIDS = {}
RECENT = deque(maxlen=4)
calls = 0


@functools.lru_cache
def cached_grid(width):
    return torch.arange(width)


@functools.cache
def cached_table(width):
    return {"grid": torch.arange(width)}


def memoised(function):
    known = {}

    @functools.wraps(function)
    def call(width):
        if width not in known:
            known[width] = function(width)
        return known[width]

    return call


@memoised
def enclosed_grid(width):
    return torch.arange(width)


class Shared:
    def __init__(self):
        self.grids = {}
        self.last = None

    def grid(self, width):
        self.last = self.grids.setdefault(width, torch.arange(width))
        return self.last


class Remembering(nn.Module):
    """A network that caches results in every way that real networks do."""

    made = 0

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16)) for _ in range(2))
        self.shared = Shared()
        self.holder = [Shared()]
        self.grid = None

    def forward(self, x, way="lru_cache"):
        self.count(way)
        for block in self.blocks:
            x = block(x)
        return x + self.remembered(x.shape[-1], way)

    def inputs(self, sizes):
        return (torch.randn(sizes.batch, sizes.tokens, 16),)

    def count(self, way):
        global calls
        if way == "global number":
            calls += 1
        if way == "class attribute":
            type(self).made += 1

    def remembered(self, width, way):
        if way == "lru_cache":
            return cached_grid(width)
        if way == "cache":
            return cached_table(width)["grid"]
        if way == "closure":
            return enclosed_grid(width)
        if way == "global dict":
            return GRIDS.setdefault(width, torch.arange(width))
        if way == "global deque":
            RECENT.append(torch.arange(width))
            return RECENT[-1]
        if way == "shared object":
            return self.shared.grid(width)
        if way == "object in a list":
            return self.holder[0].grid(width)
        if way == "attribute":
            self.grid = torch.arange(width)
            return self.grid
        return 0


WAYS = ["lru_cache", "cache", "closure", "global dict", "global deque", "shared object", "object in a list",
        "attribute", "global number", "class attribute"]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_probe_leaves_nothing_behind(registry, way):
    network = Remembering()
    compiled = install(network, registry)
    compiled.prepare(call_with(way=way), name="forward")
    gc.collect()
    kept = [GRIDS, *GRIDS.values(), *RECENT, *vars(network.shared).values(), *network.shared.grids.values()]
    kept += [*network.holder[0].grids.values(), network.grid, cached_grid(16), cached_table(16)["grid"]]
    kept += [enclosed_grid(16)]
    assert not any(isinstance(item, FakeTensor) for item in kept)
    assert (calls, Remembering.made, len(RECENT), network.shared.last) == (0, 0, 0, None)
    x = torch.randn(2, 3, 16)
    plain = Remembering()
    plain.load_state_dict(network.state_dict())
    torch.testing.assert_close(network(x), plain(x))


@pytest.fixture
def search(monkeypatch):
    """Return the searches for caches that were made, with none known at first."""
    found, search = [], side_effects._search

    def counted():
        found.append(search())
        return found[-1]

    monkeypatch.setattr(side_effects, "_search", counted)
    monkeypatch.setattr(side_effects, "_caches", side_effects._Caches())
    cached_grid.cache_clear()
    return found


def test_caches_that_the_collector_no_longer_sees_are_cleared(search):
    gc.freeze()
    try:
        with side_effects.untouched_caches():
            cached_grid(16)
        assert cached_grid.cache_info().currsize == 0
    finally:
        gc.unfreeze()


def test_a_search_is_made_only_if_there_are_new_caches(search):
    for _ in range(3):
        with side_effects.untouched_caches():
            cached_grid(16)
        assert cached_grid.cache_info().currsize == 0
    assert len(search) == (1 if side_effects._counts_references() else 3)
    with side_effects.untouched_caches():
        new = functools.lru_cache(lambda width: torch.arange(width))
        new(16)
    assert new.cache_info().currsize == 0
    assert new in search[-1]


def test_earlier_cache_entries_stay():
    GRIDS[5] = before = torch.arange(5)
    try:
        with untouched(Remembering(), Host()):
            GRIDS.clear()
        assert {5: before} == GRIDS
    finally:
        GRIDS.clear()


def test_changes_are_undone_after_an_error():
    def remember_and_fail():
        with untouched(Remembering(), Host()):
            GRIDS[7] = torch.arange(7)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        remember_and_fail()
    assert not GRIDS


def test_random_states_are_restored():
    def draw():
        return random.random(), numpy.random.rand(), torch.rand(1).item()

    torch.manual_seed(3), random.seed(3), numpy.random.seed(3)
    expected = draw()
    torch.manual_seed(3), random.seed(3), numpy.random.seed(3)
    with same_random_numbers(torch.device("cpu")):
        draw()
    assert draw() == expected


def test_threads_that_keep_random_numbers_do_not_restore_what_others_drew():
    before, inside, go = random.getstate(), threading.Event(), threading.Event()

    def keep():
        with same_random_numbers(torch.device("cpu")):
            random.random()
            inside.set()
            go.wait()

    other = threading.Thread(target=keep)
    other.start()
    inside.wait()
    with same_random_numbers(torch.device("cpu")):  # begins with the other one's numbers drawn
        random.random()
        go.set()
        other.join()
    assert random.getstate() == before
