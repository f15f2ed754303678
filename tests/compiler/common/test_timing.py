from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from compiled_graphs.compiler.common import timing
from compiled_graphs.compiler.common.host import Host
from compiled_graphs.compiler.common.timing import CallTime, Gain, LatencyTracker, Timing, compare, gain, speed_up
from compiled_graphs.compiler.common.weight_source import ResidentWeights
from compiled_graphs.compiler.runtime.network_wrapper import NetworkWrapper
from torch import nn

CPU = torch.device("cpu")


class Clock:
    """Stands still but for what calls say they take."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def call(self, *seconds):
        """A call that takes so long the first time, so long the second time ..."""
        left = list(seconds)

        def run():
            self.now += left.pop(0)

        return run


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_the_fastest_of_three_short_calls_counts(clock):
    found = compare(clock.call(0.004, 0.002, 0.003), clock.call(0.005, 0.007, 0.006), CPU)
    assert (round(found.graph, 6), round(found.eager, 6)) == (0.002, 0.005)


def test_a_call_that_takes_long_is_made_once(clock):
    assert compare(clock.call(0.2), clock.call(0.3), CPU) == Timing(eager=0.3, graph=0.2)


def test_what_cannot_be_run_again_has_no_figure():
    def fail():
        raise torch.cuda.OutOfMemoryError("too little memory")

    assert compare(fail, lambda: None, CPU) is None


def test_regions_count_as_often_as_a_model_has_them():
    assert speed_up([(3, Timing(2.0, 1.0)), (1, Timing(2.0, 2.0))]) == 8 / 5
    assert speed_up([]) is None


def pace_of(*durations, clock, shape=(1, 4, 8, 8), pace=None):
    pace = pace or LatencyTracker()
    for seconds in durations:
        with pace.timed("forward", (torch.zeros(shape),), {}):
            clock.now += seconds
    return pace


def test_the_median_of_a_sizes_calls(clock):
    (figure,) = pace_of(2.0, 9.0, 3.0, clock=clock).figures()
    assert (figure.method, figure.shape, figure.seconds, figure.calls) == ("forward", (1, 4, 8, 8), 3.0, 3)


def test_only_the_latest_calls_of_a_size_count(clock):
    (figure,) = pace_of(*[9.0] * timing.MAX_KEPT, *[1.0] * timing.MAX_KEPT, clock=clock).figures()
    assert (figure.seconds, figure.calls) == (1.0, timing.MAX_KEPT)


def test_sizes_are_told_apart_and_bounded(clock):
    pace = LatencyTracker()
    for width in (*range(timing.MAX_SIZES), 0, timing.MAX_SIZES):
        pace_of(1.0 + width, clock=clock, shape=(1, width), pace=pace)
    assert [figure.shape[1] for figure in pace.figures()] == [*range(2, timing.MAX_SIZES), 0, timing.MAX_SIZES]


def test_calls_with_something_to_set_up_do_not_count(clock):
    pace = LatencyTracker()
    with pace.timed("forward", (torch.zeros(1),), {}, lambda: True):
        clock.now += 1.0
    assert pace.figures() == []


def test_a_call_that_fails_or_has_no_tensor_does_not_count(clock):
    pace = LatencyTracker()
    with pytest.raises(ZeroDivisionError), pace.timed("forward", (torch.zeros(1),), {}):
        raise ZeroDivisionError
    with pace.timed("forward", (1,), {}):
        pass
    assert pace.figures() == []


PROMPT = {"l": [[(7, 1.0)] * 77, [(7, 1.0)] * 77], "g": [[(7, 1.0)] * 77], "style": "plain"}
IMAGE = {"type": "image", "data": torch.zeros(1, 28, 56, 3)}


@pytest.mark.parametrize(
    ("args", "kwargs", "size"),
    [
        ((torch.zeros(2, 3), torch.zeros(4)), {}, (2, 3, 8)),
        ((torch.zeros(2, 3),), {"ref_latents": [torch.zeros(4), torch.zeros(8)]}, (2, 3, 8, 12)),
        ((torch.zeros(2, 3),), {"control": {"middle": [torch.zeros(4)], "output": [None]}}, (2, 3, 8)),
        ((torch.zeros(2, 3),), {"options": {"sigmas": torch.zeros(4), "patches": {"a": [torch.zeros(4)]}}}, (2, 3)),
        ((PROMPT,), {}, (2, 77, 0, 1, 77, 0)),
        (({"l": [[(7, 1.0), (9, 1.2), (7, 1.0)]]},), {}, (1, 3, 1)),
        (({"qwen": [[(7, 1.0), (IMAGE, 1.0)]]},), {}, (1, 2, 0, 1, 28, 56, 3)),
        (({"lm": [[(7, 1.0)]], "lm_metadata": {"min_tokens": 90, "seed": "none"}},), {}, (1, 1, 0, 90)),
        ((), {"tokens": {"llm": [[1] * 9, [1] * 12]}}, (2, 12, 0)),
        ((PROMPT,), {"image": torch.zeros(5)}, (5,)),
        (({"llm": []}, "text", [1, 2]), {}, (0, 0, 0)),
        ((), {}, ()),
    ],
)
def test_the_size_of_a_call(args, kwargs, size):
    assert timing.call_size(args, kwargs) == size


def test_the_size_is_that_before_the_call(clock):
    pace, control = LatencyTracker(), {"output": [torch.zeros(4)]}
    with pace.timed("forward", (torch.zeros(2),), {"control": control}):
        control["output"].clear()
    (figure,) = pace.figures()
    assert figure.shape == (2, 8)


def test_a_few_words_more_are_the_same_size():
    sizes = [timing.call_size((torch.zeros(2),), {"context": torch.zeros(1, tokens, 64)}) for tokens in (250, 260, 512)]
    assert sizes[0] == sizes[1] != sizes[2]


def test_calls_without_tensors_are_timed_where_they_run(clock):
    pace = LatencyTracker()
    with pace.timed("encode", (PROMPT,), {}, device=torch.device("cpu")):
        clock.now += 0.5
    (figure,) = pace.figures()
    assert (figure.method, figure.shape, figure.seconds) == ("encode", (2, 77, 0, 1, 77, 0), 0.5)


def test_an_entrance_times_its_calls(clock):
    class Slow(nn.Module):
        def forward(self, x):
            clock.now += 0.25
            return x

    network = Slow()
    nothing_new = {"refresh": lambda: False, "schedule_check": lambda: False, "note_call": lambda call: None}
    compiled = SimpleNamespace(
        latency=LatencyTracker(), background=None, host=Host(), weights=ResidentWeights(), **nothing_new
    )
    network.forward = NetworkWrapper(network, "forward", None, compiled)
    network(torch.zeros(2, 3))
    (figure,) = compiled.latency.figures()
    assert (figure.shape, figure.seconds) == ((2, 3), 0.25)


def test_figures_are_read_while_calls_are_made():
    pace, stop = LatencyTracker(), threading.Event()

    def work():
        while not stop.is_set():
            for width in range(6):
                with pace.timed("forward", (torch.zeros(width + 1),), {}):
                    pass

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert all(figure.calls <= timing.MAX_KEPT for _ in range(300) for figure in pace.figures())
    finally:
        stop.set()
        thread.join()


class Moment:
    """Stands in for a GPU's event."""

    def __init__(self, milliseconds, come=False):
        self.milliseconds, self.come = milliseconds, come

    def query(self):
        return self.come

    def elapsed_time(self, end):
        return end.milliseconds - self.milliseconds


def test_moments_that_a_gpu_has_not_come_to_are_read_at_a_later_call(monkeypatch):
    moments = [Moment(0), Moment(30), Moment(30), Moment(50), Moment(50), Moment(90)]
    coming = iter(moments)
    monkeypatch.setattr(timing, "_record_event", lambda device: next(coming))
    pace = pace_of(0, 0, clock=SimpleNamespace(now=0))
    assert pace.figures() == []
    moments[1].come = moments[3].come = True
    assert pace.figures() == [], "only threads that run models ask"
    pace_of(0, clock=SimpleNamespace(now=0), pace=pace)
    (figure,) = pace.figures()
    assert (figure.seconds, figure.calls) == (0.025, 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpus_calls_are_timed_by_the_gpu():
    """The host only queues the work, and is done long before the GPU is."""
    pace, x = LatencyTracker(), torch.randn(4096, 4096, device="cuda")

    def work():
        for _ in range(50):
            torch.mm(x, x)

    for _ in range(2):
        work()
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    expected = time.perf_counter() - start
    for _ in range(5):
        with pace.timed("forward", (x,), {}):
            work()
    torch.cuda.synchronize()
    with pace.timed("forward", (x,), {}):
        pass  # reads what the calls before it took
    (figure,) = pace.figures()
    assert figure.calls >= 5
    assert 0.7 * expected < figure.seconds < 1.5 * expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpus_graph_is_timed_with_the_gpu_waited_for():
    x = torch.randn(4096, 4096, device="cuda")

    def work(count):
        return lambda: [torch.mm(x, x) for _ in range(count)]

    work(30)()
    torch.cuda.synchronize()
    found = compare(work(10), work(30), x.device)
    assert 2 < found.eager / found.graph < 4


CALL = CallTime("forward", (2, 4), 0.010, 5)


def timing_at(eager, graph, shape=(2, 4)):
    return Timing(eager, graph, shape)


def test_what_a_whole_call_gains_has_the_time_outside_of_blocks_in_it():
    """Two blocks of 2 ms that took 5: 10 ms, of which 4 are theirs, and without graphs 16."""
    assert gain([(2, [timing_at(0.005, 0.002)])], CALL) == Gain(pytest.approx(1.6), True)


def test_a_replayed_call_takes_less_than_its_blocks_one_by_one():
    kinds = [(4, [timing_at(0.005, 0.004)])]
    assert gain(kinds, CALL, replays=True) == Gain(pytest.approx(2.0), True)
    assert gain(kinds, CALL) == Gain(pytest.approx(1.25), True), "the machine was busier when blocks were timed"


@pytest.mark.parametrize(
    "kinds",
    [
        [(1, [timing_at(0.004, 0.002, (1, 4))])],
        [(1, [timing_at(0.004, 0.002), None])],
        [(1, [timing_at(0.004, 0.002)]), (1, [None])],
    ],
    ids=["another size", "two graphs", "one kind was not timed"],
)
def test_only_the_blocks_gain_where_the_call_cannot_be_compared(kinds):
    assert gain(kinds, CALL) == Gain(2.0, False)


def test_nothing_is_said_of_what_was_not_timed():
    assert gain([(1, [None])], CALL) is None
    assert gain([], CALL) is None
    assert gain([(1, [timing_at(0.004, 0.002)])], None) == Gain(2.0, False)
