"""Blocks whose modules keep frames in a dictionary that the call brings, for the next chunk."""

from __future__ import annotations

import pytest
import torch
from compiled_graphs.compiler.common.counters import totals
from compiled_graphs.compiler.common.host import FrameMemory, Host
from compiled_graphs.compiler.common.reason import ReasonCode
from compiled_graphs.compiler.runtime.random_check import CheckResult, check_graphs
from networks import compile_network, twins
from torch import nn

WIDTH = 2


class RememberingHost(Host):
    def frame_cache(self, cls):
        return FrameMemory("memory") if issubclass(cls, Remembering) else None


class Conv(nn.Conv3d):
    """Convolves over time, from two frames of the chunk before."""

    def forward(self, x, memory):
        before = memory.get(self)
        x = nn.functional.pad(x, (1, 1, 1, 1, 2 if before is None else 0, 0), mode="replicate")
        x = x if before is None else torch.cat([before, x], dim=2)
        memory[self] = x[:, :, -2:]
        return super().forward(x)


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = (Conv(WIDTH, WIDTH, 3) for _ in range(2))

    def forward(self, x, memory=None):
        memory = {} if memory is None else memory
        return self.other(self.one(x, memory), memory)


class Forgets(Remembering):
    """Keeps the frames of one module only, and only for one chunk."""

    def forward(self, x, memory=None):
        had = memory.pop(self.one, None) is not None
        x = super().forward(x, memory)
        del memory[self.other]
        if had:
            memory.pop(self.one)
        return x


class Counts(Remembering):
    def forward(self, x, memory=None):
        return super().forward(x, memory) * len(memory)


class LooksAtAll(Remembering):
    def forward(self, x, memory=None):
        return super().forward(x, memory) + sum(entry.mean() for entry in memory.values())


class WritesUnderAName(Remembering):
    def forward(self, x, memory=None):
        x = super().forward(x, memory)
        memory["seen"] = x
        return x


class Network(nn.Module):
    def __init__(self, block=Remembering, blocks=2):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(blocks))

    def forward(self, x, memory=None):
        for block in self.blocks:
            x = block(x, memory)
        return x


def video(network, lengths=(4, 3, 3), size=(1, 5, 6), seed=0):
    """What a network makes of chunks of a video, and what it leaves in the dictionary."""
    generator = torch.Generator().manual_seed(seed)
    batch, height, width = size
    results, memory, names = [], {}, {module: name for name, module in network.named_modules()}
    for length in lengths:
        results.append(network(torch.randn(batch, WIDTH, length, height, width, generator=generator), memory))
        results.append({names.get(key, key): value for key, value in memory.items()})
    return results


def compiled(network, registry, **options):
    def probe(weightless, at):
        video(weightless, (at.frames,) * 3, (1, at.height, at.width))

    return compile_network(network, registry, host=RememberingHost(), probe=probe, **options)


def pair(block=Remembering):
    return twins(lambda: Network(block))


@pytest.mark.parametrize("block", [Remembering, Forgets])
def test_chunks_of_a_video_are_served_at_every_length_and_size(block, registry):
    network, plain = pair(block)
    made = compiled(network, registry)
    assert len(made.graphs()) == 2  # a first chunk, and all after it
    with totals.expect(compiles=0, retired=0):
        for lengths, size in [((4, 3, 3), (1, 5, 6)), ((9, 2, 7, 5), (1, 3, 3)), ((2, 2), (1, 8, 4))]:
            for _ in range(2):  # the first call of each graph is checked
                torch.testing.assert_close(video(network, lengths, size), video(plain, lengths, size))
    assert made.counters.eager_calls == {}


def test_a_call_without_a_dictionary_has_a_graph_of_its_own(registry):
    def probe(weightless, at):
        weightless(torch.empty(1, WIDTH, at.frames, at.height, at.width))

    network, plain = pair()
    made = compile_network(network, registry, host=RememberingHost(), probe=probe)
    with totals.expect(compiles=0, retired=0):
        for length in (4, 7):
            x = torch.randn(1, WIDTH, length, 5, 6)
            torch.testing.assert_close(network(x), plain(x))
    assert made.counters.eager_calls == {}


def test_a_graph_that_fails_leaves_the_dictionary_to_eager(registry):
    network, plain = pair()
    compiled(network, registry, verify=False)

    def fail(*_):
        raise RuntimeError("no such kernel")

    for entry in registry.cache._entries.values():
        object.__setattr__(entry.graph, "executable", fail)
    torch.testing.assert_close(video(network), video(plain))


@pytest.mark.parametrize("block", [Counts, LooksAtAll, WritesUnderAName])
def test_blocks_that_do_something_else_with_the_dictionary_are_eager(block, registry):
    network, plain = pair(block)
    made = compiled(network, registry)
    for _ in range(2):
        torch.testing.assert_close(video(network), video(plain))
    assert {reason.code for reason in made.counters.eager_calls} == {ReasonCode.WRITES_ARGUMENT}


def test_another_kind_of_dictionary_is_eager(registry):
    class Memory(dict):
        pass

    network, plain = pair()
    made = compiled(network, registry)
    x = torch.randn(1, WIDTH, 4, 5, 6)
    torch.testing.assert_close(network(x, Memory()), plain(x, Memory()))
    assert {reason.code for reason in made.counters.eager_calls} == {ReasonCode.WRITES_ARGUMENT}


def test_each_graph_is_compared_on_random_frames(registry):
    network, _ = pair()
    results = check_graphs(compiled(network, registry))
    assert len(results) == 2
    assert set(results.values()) == {CheckResult()}
