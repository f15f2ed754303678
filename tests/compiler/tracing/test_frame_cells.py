"""Blocks whose modules keep frames, each thread's apart."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from compiled_graphs.compiler.common.counters import totals
from compiled_graphs.compiler.common.host import Host
from compiled_graphs.compiler.common.reason import ReasonCode
from compiled_graphs.compiler.identity.frame_cells import Cells
from compiled_graphs.compiler.runtime.random_check import CheckResult, check_graphs
from compiled_graphs.compiler.tracing.graph_request import _chunk_inputs
from networks import compile_network
from torch import nn

WIDTH = 2


class KeepingHost(Host):
    frame_cells = "kept"


class Causal(nn.Module):
    """Convolves over time, from two frames of the chunk before."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(WIDTH, WIDTH, (3, 1, 1))
        self.kept = {}

    def forward(self, x):
        thread = threading.get_ident()
        before, is_last = self.kept.get(thread, (None, False))
        x = torch.cat([x[:, :, :1].repeat(1, 1, 2, 1, 1) if before is None else before, x], dim=2)
        self.kept[thread] = (None, True) if is_last else (x[:, :, -2:], False)
        return self.conv(x)


class Waits(Causal):
    """Hands on what it has, once that is three frames."""

    def forward(self, x):
        thread = threading.get_ident()
        before = self.kept.pop(thread, None)
        x = x if before is None else torch.cat([before, x], dim=2)
        if x.shape[2] < 3:
            self.kept[thread] = x
            return None
        return self.conv(x)


class LeavesANumber(Causal):
    def forward(self, x):
        self.kept[threading.get_ident()] = 0.5
        return self.conv(torch.cat([x, x, x], dim=2))


class LeavesAName(Causal):
    def forward(self, x):
        self.kept["name"] = x
        return self.conv(torch.cat([x, x, x], dim=2))


class LeavesAnother(Causal):
    """Keeps by a number that is no thread's."""

    def forward(self, x):
        before = self.kept.get(0)
        self.kept[0] = x[:, :, -2:]
        return self.conv(torch.cat([x[:, :, :1].repeat(1, 1, 2, 1, 1) if before is None else before, x], dim=2))


class MakesIt(Causal):
    """Has a dictionary once it has run."""

    def __init__(self):
        super().__init__()
        del self.kept

    def forward(self, x):
        self.kept = getattr(self, "kept", {})
        return super().forward(x)


class Block(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.one, self.other = inner(), inner()

    def forward(self, x):
        x = self.one(x)
        return None if x is None else self.other(torch.relu(x))


class Network(nn.Module):
    def __init__(self, inner=Causal, blocks=2):
        super().__init__()
        self.blocks = nn.ModuleList(Block(inner) for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if x is None:
                return None
        return x


def video(network, lengths=(4, 3, 3), size=(1, 5, 6), ends=True, seed=0):
    """What a network makes of chunks of a video; then its modules keep nothing."""
    generator = torch.Generator().manual_seed(seed)
    batch, height, width = size
    results = []
    for number, length in enumerate(lengths):
        if ends and number == len(lengths) - 1:
            for module in network.modules():
                if isinstance(module, Causal):
                    before, _ = module.kept.get(threading.get_ident(), (None, False))
                    module.kept[threading.get_ident()] = before, True
        results.append(network(torch.randn(batch, WIDTH, length, height, width, generator=generator)))
    for module in network.modules():
        if isinstance(module, Causal) and hasattr(module, "kept"):
            module.kept.clear() if 0 in module.kept else module.kept.pop(threading.get_ident(), None)
    return results


def compiled(network, registry, ends=True, **options):
    def probe(weightless, at):
        video(weightless, (at.frames,) * 3, (1, at.height, at.width), ends)

    return compile_network(network, registry, host=KeepingHost(), probe=probe, **options)


def assert_equal(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        if other is None:
            assert one is None
        else:
            torch.testing.assert_close(one, other)


def eager(network, *arguments, **options):
    """What the network's own code makes of a video."""
    return video(network.original, *arguments, **options)


@pytest.fixture
def network():
    network = Network()
    object.__setattr__(network, "original", Network())
    network.original.load_state_dict(network.state_dict())
    return network


def test_chunks_of_a_video_are_served_at_every_length_and_size(network, registry):
    made = compiled(network, registry)
    assert len(made.graphs()) == 3  # a first chunk, one in the middle, a last one
    with totals.expect(compiles=0, retired=0):
        for lengths, size in [((4, 3, 3), (1, 5, 6)), ((9, 2, 7, 5), (1, 3, 3)), ((2, 2), (1, 8, 1))]:
            for _ in range(2):  # the first call of each graph is checked
                assert_equal(video(network, lengths, size), eager(network, lengths, size))
    assert made.counters.eager_calls == {}


def test_other_states_get_graphs_when_they_come(network, registry):
    """A video of one chunk, chunks of one frame, and two videos at once are others. Later ones of these need none."""
    made = compiled(network, registry)
    others = [((5,), (1, 5, 6)), ((1, 1, 1), (1, 5, 6)), ((4, 4, 4), (2, 5, 6))]
    for lengths, size in others:
        assert_equal(video(network, lengths, size), eager(network, lengths, size))
    with totals.expect(compiles=0, retired=0):
        for lengths, size in others:
            assert_equal(video(network, lengths, size, seed=1), eager(network, lengths, size, seed=1))
    assert made.counters.eager_calls == {}


def test_what_other_threads_keep_stays(network, registry):
    compiled(network, registry)
    module = network.blocks[0].one
    module.kept[-1] = "theirs"
    assert_equal(video(network), eager(network))
    assert module.kept == {-1: "theirs"}


def test_a_block_may_return_nothing_and_keep_what_it_was_given(registry):
    network, plain = Network(Waits), Network(Waits)
    plain.load_state_dict(network.state_dict())
    made = compiled(network, registry, ends=False)
    for _ in range(2):
        lengths = (1, 1, 2, 4, 2, 3)
        assert_equal(video(network, lengths, ends=False), video(plain, lengths, ends=False))
    assert made.counters.eager_calls == {}


def ahead_of(network, registry, lengths):
    """Compile ahead for chunks of these lengths, each of which begins a video."""

    def probe(weightless, at):
        for length in lengths:
            video(weightless, (length,), (1, at.height, at.width), ends=False)

    return compile_network(network, registry, host=KeepingHost(), probe=probe)


def test_a_short_chunk_gets_a_graph_of_its_length_ahead_if_its_code_differs(registry):
    network, plain = Network(Waits), Network(Waits)
    plain.load_state_dict(network.state_dict())
    made = ahead_of(network, registry, (2, 9))
    with totals.expect(compiles=0, retired=0):
        for length in (9, 2, 10):
            assert_equal(video(network, (length,), ends=False), video(plain, (length,), ends=False))
    assert made.counters.eager_calls == {}


def test_a_short_chunk_gets_no_graph_of_its_length_if_its_code_is_the_same(network, registry):
    made = ahead_of(network, registry, (2, 3))
    assert len(made.graphs()) == 1
    with totals.expect(compiles=0, retired=0):
        for length in (2, 3, 8):
            assert_equal(video(network, (length,), ends=False), eager(network, (length,), ends=False))


def test_short_chunks_stay_uncompiled_with_the_longer_ones(registry):
    class Refuses(Causal):
        def forward(self, x):
            return self.conv(torch.cat([x, x], dim=2)) if x.shape[2] < 4 else self.conv(x + torch.rand_like(x))

    network = Network(Refuses)
    made = ahead_of(network, registry, (2, 9))
    assert made.graphs() == []
    with totals.expect(compiles=0):
        video(network, (2, 9), ends=False)
    assert {reason.code for reason in made.counters.eager_calls} == {ReasonCode.RANDOM}


def test_a_graph_for_one_frame_is_none_for_longer_chunks(network, registry):
    """A short chunk then gets one for any length."""
    made = ahead_of(network, registry, (1,))
    with totals.expect(compiles=1, retired=0):
        for length in (2, 3, 8):
            assert_equal(video(network, (length,), ends=False), eager(network, (length,), ends=False))
    assert made.counters.eager_calls == {}


def test_a_short_chunk_that_was_not_foreseen_gets_a_graph_when_it_comes(registry):
    network, plain = Network(Waits), Network(Waits)
    plain.load_state_dict(network.state_dict())
    made = ahead_of(network, registry, (9,))
    for expected in (1, 0):
        with totals.expect(compiles=expected, retired=0):
            assert_equal(video(network, (2,), ends=False), video(plain, (2,), ends=False))
    assert made.counters.eager_calls == {}


def test_frames_that_are_kept_do_not_keep_their_chunk(network, registry):
    compiled(network, registry, verify=False)
    network(torch.randn(1, WIDTH, 7, 5, 6))
    kept = [frames for module in network.modules() for frames, _ in getattr(module, "kept", {}).values()]
    assert len(kept) == 4
    assert all(frames.untyped_storage().nbytes() == frames.nbytes for frames in kept)


@pytest.mark.parametrize("inner", [LeavesANumber, LeavesAName, LeavesAnother, MakesIt])
def test_modules_that_keep_something_else_are_eager(inner, registry):
    network, plain = Network(inner), Network(inner)
    plain.load_state_dict(network.state_dict())
    made = compiled(network, registry, ends=False)
    for _ in range(2):
        assert_equal(video(network, ends=False), video(plain, ends=False))
    assert {reason.code for reason in made.counters.eager_calls} == {ReasonCode.WRITES_ARGUMENT}


def test_blocks_without_cells_are_looked_through_once(registry, monkeypatch):
    class Plain(Causal):
        def __init__(self):
            super().__init__()
            del self.kept

        def forward(self, x):
            return self.conv(torch.cat([x, x, x], dim=2))

    network, looked = Network(Plain), []
    of = Cells.of
    monkeypatch.setattr(Cells, "of", lambda block, host: looked.append(block) or of(block, host))
    made = compile_network(network, registry, host=KeepingHost(), probe=lambda net, at: net(
        torch.randn(at.batch, WIDTH, at.frames, at.height, at.width)))  # fmt: skip
    looked.clear()
    for _ in range(3):
        network(torch.randn(2, WIDTH, 3, 5, 6))
    assert len(looked) == 1  # both blocks are of one kind
    assert made.counters.eager_calls == {}


def test_each_graph_is_compared_on_random_frames(network, registry):
    made = compiled(network, registry)
    results = check_graphs(made)
    assert len(results) == 3
    assert set(results.values()) == {CheckResult()}


class Hooked(Causal):
    """Draws random numbers, so that it is eager, and notes what is kept while it runs."""

    seen: list = []  # noqa: RUF012

    def forward(self, x):
        before, is_last = self.kept.get(threading.get_ident(), (None, False))
        reference = (lambda: None) if before is None else weakref.ref(before)
        self.kept[threading.get_ident()] = None, is_last
        del before
        self.seen.append(reference() is not None)
        self.kept.pop(threading.get_ident())
        return super().forward(x + torch.rand_like(x))


def test_an_eager_block_frees_the_frames_of_the_chunk_before(registry):
    network = Network(Hooked)
    made = compiled(network, registry, ends=False)
    Hooked.seen.clear()
    video(network, ends=False)
    assert made.counters.eager_calls
    assert len(Hooked.seen) == 12
    assert not any(Hooked.seen)


def test_a_chunk_that_nobody_can_describe_is_eager(network, registry):
    made = compiled(network, registry)
    size = (2**20, 1, 1)  # more than a file may say
    assert_equal(video(network, (1,), size), eager(network, (1,), size))
    assert {reason.code for reason in made.counters.eager_calls} == {ReasonCode.SIZES_UNCLEAR}


def test_a_map_keeps_its_proportion_to_the_chunk():
    shapes = [(2, 8, 7, 10, 6), (2, 8, 2, 20, 12), (2, 8, 1, 5, 3), (2,)]
    (chunk, symbols), (wide, of_wide), (narrow, _), step = _chunk_inputs(shapes)
    height, width = chunk[3:]
    assert chunk == (2, 8, 23, height, width)
    assert symbols == (False, False, True, True, True)
    assert wide == (2, 8, 2, 2 * height, 2 * width)
    assert of_wide == (False, False, False, True, True)
    assert narrow[3:] == (height // 2, width // 2)
    assert step == ((2,), (False,))


def test_sides_without_a_proportion_are_fixed():
    inputs = _chunk_inputs([(1, 8, 7, 40, 30), (1, 8, 2, 1, 0), (1, 8, 2, 7, 11), (1, 8, 0, 0, 4)])
    assert [shape[3:] for shape, _ in inputs[1:]] == [(1, 0), (7, 11), (0, 4)]
    assert not any(symbols[3] or symbols[4] for _, symbols in inputs[1:])
    assert _chunk_inputs([(4, 8)]) == [((4, 8), (False, False))]


@pytest.mark.parametrize("any_length", [True, False])
@pytest.mark.parametrize("frames", [2, 3, 5, 9, 10, 14, 20, 28, 40, 42, 56, 58, 72, 74, 104, 106])
def test_no_two_sizes_of_a_chunk_are_alike(frames, any_length):
    """Tracing takes equal sizes for one."""
    shapes = [(1, 8, frames, 12, 16), (1, 8, 2, 14, 18), (1, 8, 2, 6, 8), (1, 8, 2, 3, 4)]
    (chunk, _), *others = _chunk_inputs(shapes, any_length)
    assert len({*chunk[2:], *(side for sizes, _ in others for side in sizes[3:])}) == 9


@pytest.mark.parametrize("frames", [2, 3, 4, 21, 40])
def test_a_chunk_is_traced_at_more_frames_than_any_block_keeps(frames):
    ((chunk, symbols),) = _chunk_inputs([(1, 8, frames, 12, 14)])
    assert chunk[2] > 8
    assert chunk[2] % 2 == frames % 2
    assert symbols == (False, False, True, True, True)
    ((chunk, symbols),) = _chunk_inputs([(1, 8, frames, 12, 14)], any_length=False)
    assert chunk[2] == frames
    assert symbols == (False, False, False, True, True)


def test_a_chunk_with_a_map_as_long_is_traced_at_its_own_length():
    """Another number of frames would not fit the map, whose length stays as it is."""
    (chunk, _), (other, symbols) = _chunk_inputs([(1, 8, 9, 12, 14), (1, 8, 9, 12, 14)])
    assert (chunk[2], other[2]) == (9, 9)
    assert not symbols[2]
    (chunk, _), (kept, _) = _chunk_inputs([(1, 8, 2, 12, 14), (1, 8, 2, 12, 14)])
    assert chunk[2] > kept[2] == 2
