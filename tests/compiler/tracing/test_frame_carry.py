"""Blocks that take frames from one list and put others to a second one, for the next chunk."""

from __future__ import annotations

import pytest
import torch
from compiled_graphs.compiler.common.counters import totals
from compiled_graphs.compiler.common.host import FrameCarry, Host
from compiled_graphs.compiler.common.reason import ReasonCode
from compiled_graphs.compiler.runtime.random_check import CheckResult, check_graphs
from compiled_graphs.compiler.tracing.graph_request import _chunk_inputs
from networks import compile_network, twins
from torch import nn

WIDTH = 2


class CarryingHost(Host):
    def frame_cache(self, cls):
        return FrameCarry("taken", "put") if issubclass(cls, Carrying) else None


class Carrying(nn.Module):
    """Convolves twice over time, each time from two frames of the chunk before."""

    def __init__(self):
        super().__init__()
        self.one, self.other = (nn.Conv3d(WIDTH, WIDTH, 3) for _ in range(2))

    def forward(self, x, taken=None, put=None):
        for conv in (self.one, self.other):
            x = nn.functional.pad(x, (1, 1, 1, 1, 2 if taken is None else 0, 0), mode="replicate")
            x = x if taken is None else torch.cat([taken.pop(0), x], dim=2)
            if put is not None:
                put.append(x[:, :, -2:])
            x = conv(x)
        return x


class TakesOne(Carrying):
    """Puts more than it takes."""

    def forward(self, x, taken=None, put=None):
        before = 0 if taken is None else taken.pop(0).mean()
        for conv in (self.one, self.other):
            if put is not None:
                put.append(x)
            x = conv(nn.functional.pad(x, (1, 1, 1, 1, 1, 1)))
        return x + before


class LeavesANumber(Carrying):
    def forward(self, x, taken=None, put=None):
        x = super().forward(x, None, None)
        if put is not None:
            put.append(0.5)
        return x


class LooksAtTheEnd(Carrying):
    def forward(self, x, taken=None, put=None):
        x = super().forward(x) + (0 if taken is None else taken[-1].mean() + len(taken))
        if taken:
            taken.pop(0)
        if put is not None:
            put.append(x)
        return x


class Network(nn.Module):
    def __init__(self, block=Carrying, blocks=2):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(blocks))

    def forward(self, x, taken=None, put=None):
        for block in self.blocks:
            x = block(x, taken, put)
        return x


def video(network, lengths=(4, 3, 3), size=(1, 5, 6), ends=True, seed=0):
    """What a network makes of chunks of a video, and what it leaves in the lists."""
    generator = torch.Generator().manual_seed(seed)
    batch, height, width = size
    results, taken = [], None
    for number, length in enumerate(lengths):
        put = None if ends and number == len(lengths) - 1 else []
        chunk = torch.randn(batch, WIDTH, length, height, width, generator=generator)
        results += [network(chunk, taken, put), list(taken or ()), list(put or ())]
        taken = put
    return results


def compiled(network, registry, **options):
    def probe(weightless, at):
        video(weightless, (at.frames,) * 3, (1, at.height, at.width))

    return compile_network(network, registry, host=CarryingHost(), probe=probe, **options)


def pair(block=Carrying):
    return twins(lambda: Network(block))


def test_chunks_of_a_video_are_served_at_every_length_and_size(registry):
    network, plain = pair()
    made = compiled(network, registry)
    assert len(made.graphs()) == 3  # a first chunk, one in the middle, a last one
    with totals.expect(compiles=0, retired=0):
        for lengths, size in [((4, 3, 3), (1, 5, 6)), ((9, 2, 7, 5), (1, 3, 3)), ((2, 2), (1, 8, 4))]:
            for _ in range(2):  # the first call of each graph is checked
                torch.testing.assert_close(video(network, lengths, size), video(plain, lengths, size))
    assert made.counters.eager_calls == {}


def test_other_states_get_graphs_when_they_come(registry):
    """One chunk, chunks of one frame, two videos at once, and pictures so small that nothing tells how they grow."""
    network, plain = pair()
    made = compiled(network, registry)
    others = [((5,), (1, 5, 6)), ((1, 1, 1), (1, 5, 6)), ((4, 4, 4), (2, 5, 6)), ((3, 3), (1, 2, 1))]
    for lengths, size in others:
        torch.testing.assert_close(video(network, lengths, size), video(plain, lengths, size))
    with totals.expect(compiles=0, retired=0):
        for lengths, size in others:
            torch.testing.assert_close(video(network, lengths, size, seed=1), video(plain, lengths, size, seed=1))
    assert made.counters.eager_calls == {}


def test_a_graph_that_fails_leaves_the_lists_to_eager(registry):
    network, plain = pair()
    compiled(network, registry, verify=False)

    def fail(*_):
        raise RuntimeError("no such kernel")

    for entry in registry.cache._entries.values():
        object.__setattr__(entry.graph, "executable", fail)
    torch.testing.assert_close(video(network), video(plain))


@pytest.mark.parametrize("block", [TakesOne, LeavesANumber, LooksAtTheEnd])
def test_blocks_that_do_something_else_with_the_lists_are_eager(block, registry):
    network, plain = pair(block)
    made = compiled(network, registry)
    for _ in range(2):
        torch.testing.assert_close(video(network, ends=False), video(plain, ends=False))
    assert ReasonCode.WRITES_ARGUMENT in {reason.code for reason in made.counters.eager_calls}


@pytest.mark.parametrize("lists", [((), []), ([], ()), ([torch.zeros(1)], [])])
def test_other_lists_are_eager(lists, registry):
    network, plain = pair()
    made = compiled(network, registry)
    x = torch.randn(1, WIDTH, 4, 5, 6)
    with pytest.raises((AttributeError, IndexError, RuntimeError)) as theirs:
        plain(x, *(type(each)(each) for each in lists))
    with pytest.raises(theirs.type):
        network(x, *(type(each)(each) for each in lists))
    assert {reason.code for reason in made.counters.eager_calls} == {ReasonCode.WRITES_ARGUMENT}


def test_each_graph_is_compared_on_random_frames(registry):
    network, _ = pair()
    results = check_graphs(compiled(network, registry))
    assert len(results) == 3
    assert set(results.values()) == {CheckResult()}


def test_padding_is_told_from_proportion():
    (chunk, _), (padded, symbols), (doubled, _) = _chunk_inputs([(1, 8, 4, 10, 6), (1, 8, 2, 12, 8), (1, 8, 2, 20, 12)])
    assert [padded[3] - chunk[3], padded[4] - chunk[4]] == [2, 2]
    assert symbols == (False, False, False, True, True)
    assert [doubled[3] // chunk[3], doubled[4] // chunk[4]] == [2, 2]
