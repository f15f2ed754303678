"""Blocks that keep frames in a list that all blocks share."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from compiled_graphs.compiler.common.counters import totals
from compiled_graphs.compiler.common.host import FrameCache, Host
from compiled_graphs.compiler.common.reason import ReasonCode
from compiled_graphs.compiler.runtime.random_check import CheckResult, check_graphs
from networks import compile_network
from torch import nn

WIDTH = 4


class KeepingHost(Host):
    """A host whose blocks may keep frames."""

    def frame_cache(self, cls):
        return FrameCache("cache", "place") if issubclass(cls, Keeping) else None


class Keeping(nn.Module):
    """Adds the last frames of the chunk before, twice."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, cache=None, place=[0], last=False):  # noqa: B006  as Wan's blocks have it
        for _ in range(2):
            if cache is None:
                x = self.mix(x)
                continue
            before = cache[place[0]]
            cache[place[0]] = x[:, -2:]
            x = self.mix(x) if before is None else self.mix(x) + before.sum(1, keepdim=True)
            place[0] += 1
        return x


class ReadsBefore(Keeping):
    def forward(self, x, cache=None, place=[0]):  # noqa: B006
        cache[place[0] - 1] = x
        place[0] += 1
        return self.mix(x)


class ReadsLast(Keeping):
    def forward(self, x, cache=None, place=[0]):  # noqa: B006
        place[0] += 1
        return self.mix(x if cache[-1] is None else x + 1)


class Counts(Keeping):
    def forward(self, x, cache=None, place=[0]):  # noqa: B006
        cache[place[0]] = None
        place[0] += 1
        return self.mix(x) * len(cache)


class AsksWhere(Keeping):
    def forward(self, x, cache=None, place=[0]):  # noqa: B006
        first, cache[place[0]] = place[0] == 0, None
        place[0] += 1
        return self.mix(x) if first else x


class GoesOnLater(Keeping):
    """Uses an entry more, once there is something in the first."""

    def forward(self, x, cache=None, place=[0]):  # noqa: B006
        if cache[place[0]] is not None:
            cache[place[0] + 1] = x * 2
        cache[place[0]] = x * 3
        place[0] += 1
        return self.mix(x)


class LeavesANumber(Keeping):
    def forward(self, x, cache=None, place=[0]):  # noqa: B006
        cache[place[0]] = 0.5
        place[0] += 1
        return self.mix(x)


class Network(nn.Module):
    def __init__(self, block=Keeping, blocks=2):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(blocks))

    def forward(self, x, cache=None, place=None, **more):
        for block in self.blocks:
            x = block(x) if cache is None else block(x, cache, place, **more)
        return x


def chunks(network, batch=2, lengths=(1, 2, 2), entries=9, start=0, seed=0, **more):
    """What a network makes of chunks of a video, and what it leaves in its list."""
    generator = torch.Generator().manual_seed(seed)
    cache, results = [None] * entries, []
    for length in lengths:
        place = [start]
        results.append(network(torch.randn(batch, length, WIDTH, generator=generator), cache, place, **more))
    return results, cache, place


def compiled(network, registry, **options):
    return compile_network(
        network, registry, host=KeepingHost(), probe=lambda weightless, at: chunks(weightless, at.batch), **options
    )


def assert_equal(ours, theirs):
    assert ours[2] == theirs[2]
    for one, other in zip([*ours[0], *ours[1]], [*theirs[0], *theirs[1]], strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other)
        else:
            assert one == other


def test_equal_blocks_at_other_places_have_one_graph_for_each_state(registry):
    network = Network()
    theirs = [chunks(network, batch, start=start) for batch, start in [(2, 0), (2, 3), (5, 1)]]
    made = compiled(network, registry)
    assert len(made.graphs()) == 3  # nothing kept, one frame and two
    for _ in range(2):  # the first call of each graph is checked
        with totals.expect(compiles=0, retired=0):
            ours = [chunks(network, batch, start=start) for batch, start in [(2, 0), (2, 3), (5, 1)]]
        for one, other in zip(ours, theirs, strict=True):
            assert_equal(one, other)
    assert made.counters.eager_calls == {}


def test_what_a_block_does_not_read_makes_no_other_graph(registry):
    network = Network()
    made = compiled(network, registry)
    theirs = chunks(Network.forward.__get__(network), last=True)
    with totals.expect(compiles=0):
        assert_equal(chunks(network, last=True), theirs)
    assert made.counters.eager_calls == {}


def test_a_call_without_a_list_is_an_ordinary_call(registry):
    network = Network()
    x = torch.randn(2, 3, WIDTH)
    theirs = network(x)
    made = compile_network(
        network, registry, host=KeepingHost(), probe=lambda net, at: net(torch.randn(at.batch, at.tokens, WIDTH))
    )
    for _ in range(2):
        torch.testing.assert_close(network(x), theirs)
    assert made.counters.eager_calls == {}
    assert [graph.spec.frames for graph in made.graphs()] == [""]


@pytest.mark.parametrize("returns", [torch.clone, lambda tensor: torch.cat([tensor] * 2)[: len(tensor)]])
def test_frames_that_are_kept_do_not_keep_their_chunk(returns, registry):
    """A compiler may return a view."""
    network = Network()
    compiled(network, registry, verify=False)
    for entry in registry.cache._entries.values():
        right = entry.graph.executable
        run = lambda *tensors, right=right: [returns(output) for output in right(*tensors)]  # noqa: E731
        entry.graph = replace(entry.graph, executable=run)
    _, cache, _ = chunks(network, lengths=(1, 2))
    kept = [entry for entry in cache if entry is not None]
    assert len(kept) == 4
    assert all(entry.untyped_storage().nbytes() == entry.nbytes for entry in kept)


@pytest.mark.parametrize("block", [ReadsBefore, ReadsLast, Counts, AsksWhere, GoesOnLater, LeavesANumber])
def test_blocks_that_do_something_else_with_the_list_stay_eager(block, registry):
    network = Network(block)
    theirs = chunks(network, start=1)
    made = compiled(network, registry)
    for _ in range(2):
        assert_equal(chunks(network, start=1), theirs)
    assert {reason.code for reason in made.counters.eager_calls} == {ReasonCode.WRITES_ARGUMENT}


@pytest.mark.parametrize(
    ("cache", "place"),
    [([None] * 9, [0, 1]), ([None] * 9, [True]), ([None] * 9, [-9]), (dict.fromkeys(range(9)), [0])],
)
def test_other_lists_and_cursors_stay_eager(cache, place, registry):
    network = Network(blocks=2)
    x = torch.randn(2, 1, WIDTH)

    def run():
        own = list(cache) if isinstance(cache, list) else dict(cache)
        return network(x, own, at := list(place)), own, at

    theirs = run()
    made = compiled(network, registry)
    ours = run()
    torch.testing.assert_close(ours[0], theirs[0])
    assert ours[2] == theirs[2]
    assert {reason.code for reason in made.counters.eager_calls} == {ReasonCode.WRITES_ARGUMENT}


def test_a_list_that_is_too_short_fails_as_eager_does(registry):
    network = Network()
    compiled(network, registry)
    with pytest.raises(IndexError):
        chunks(network, entries=3)


def test_graphs_are_checked_on_random_weights(registry):
    network = Network()
    made = compiled(network, registry)
    assert set(check_graphs(made).values()) == {CheckResult()}


def test_chunks_of_other_lengths_get_graphs_that_serve_all_sizes(registry):
    network = Network()
    theirs = chunks(network, 3, lengths=(1, 2, 3, 1)), chunks(network, 4, lengths=(1, 2, 3, 1))
    made = compiled(network, registry)
    assert_equal(chunks(network, 3, lengths=(1, 2, 3, 1)), theirs[0])
    with totals.expect(compiles=0):
        assert_equal(chunks(network, 4, lengths=(1, 2, 3, 1)), theirs[1])
    assert made.counters.eager_calls == {}
