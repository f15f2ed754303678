"""Calls of a network, recorded and replayed. A stand-in repeats what a GPU would, on any machine."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
from compiled_graphs.compiler.common.counters import Counters
from compiled_graphs.compiler.common.host import Host
from compiled_graphs.compiler.common.reason import Reason, ReasonCode
from compiled_graphs.compiler.compile_cache.graph_cache import CacheEntry
from compiled_graphs.compiler.runtime import step_replay as module
from compiled_graphs.compiler.runtime.cuda_graph import can_capture
from compiled_graphs.compiler.runtime.running_call import RunningCall
from compiled_graphs.compiler.runtime.step_replay import MAX_CAPTURES, MIN_STEPS, StepReplay
from compiled_graphs.compiler.runtime.sync_detector import SyncDetector
from recorders import Repeated
from torch import nn

pytestmark = pytest.mark.usefixtures("traced_once")

GPU = torch.device("cuda") if torch.cuda.is_available() else None
on_gpu = pytest.mark.skipif(GPU is None, reason="no GPU")


class Network(nn.Module):
    def __init__(self, device="cpu"):
        super().__init__()
        self.inner = nn.Linear(4, 4, device=device)
        self.strength = 1.0

    def forward(self, x, time=None, control=None, options=None):
        CALLS.append(x.shape)
        x = self.inner(x) * self.strength
        x = x if time is None else x + time[:, None]
        for residual in (control or {}).get("output", ()):
            x = x + residual
        return x


CALLS: list = []
"""One item for each time that Python ran the network."""


class Options(Host):
    context_arguments = frozenset({"options"})

    def capture_blocker(self, context, string_constants):
        return (context.get("options") or {}).get("reason")

    def steps(self, context):
        return (context.get("options") or {}).get("steps", MIN_STEPS)


def uncounted(call, pool):
    """Record, and let replays not count as calls by Python, which they would not be on a GPU."""

    def again():
        before = len(CALLS)
        call()
        del CALLS[before:]

    call()
    return Repeated(again)


@pytest.fixture(autouse=True)
def _no_gradients():
    CALLS.clear()
    with torch.no_grad():
        yield


@pytest.fixture
def network():
    return Network()


def serving(network, record=uncounted, device="cpu"):
    return StepReplay(network, Options(), torch.device(device), Counters(), record)


def serve(replay, call, args, kwargs, running=None):
    """Serve a call in which nothing happens for the first time or eagerly, unless it says so."""
    return replay.serve(call, args, kwargs, running or RunningCall(None))


def python_calls(replay, network, *args, **kwargs):
    """Call and compare with eager; return how many times Python ran the network for it."""
    expected = network(*args, **kwargs)
    CALLS.clear()
    torch.testing.assert_close(serve(replay, network, args, kwargs), expected)
    return len(CALLS)


def replayed(replay, network, *args, **kwargs):
    return [python_calls(replay, network, *args, **kwargs) for _ in range(3)][-1] == 0


def x(batch=2):
    return torch.randn(batch, 4)


@pytest.mark.parametrize(
    ("mode", "reason"),
    [(torch.enable_grad, ReasonCode.GRADIENTS), (lambda: torch.autocast("cpu"), ReasonCode.AUTOCAST)],
)
def test_calls_with_gradients_or_autocast_are_made(mode, reason, network):
    """A replay would give a result that no gradient flows through, or that has the other dtype."""
    replay, value = serving(network), x()
    assert replayed(replay, network, value)
    with mode():
        assert python_calls(replay, network, value.requires_grad_(mode is torch.enable_grad)) == 1
    assert replay.reason == Reason(reason)
    assert replayed(replay, network, x())


def test_another_object_with_the_identity_of_one_that_is_gone_is_seen(network):
    """Extensions give a network a function of their own for one step, and take it back."""
    network.body = partial(print, 0)
    replay = serving(network)
    assert replayed(replay, network, x())
    for number in range(1000):
        before = id(network.body)
        del network.body
        network.body = partial(print, number)
        if id(network.body) == before:
            break
    else:
        pytest.skip("this Python gives a freed object's place to no other one of its size")
    assert python_calls(replay, network, x()) == 1


def test_inputs_that_are_one_number_seen_as_many_are_replayed(network):
    replay = serving(network)
    assert replayed(replay, network, torch.randn(1, 4).expand(3, 4), time=torch.randn(1).expand(3))


def test_the_third_call_of_a_kind_is_replayed_with_its_own_inputs(network):
    replay = serving(network)
    assert [python_calls(replay, network, x(), time=torch.randn(2)) for _ in range(5)] == [1, 2, 0, 0, 0]
    assert (replay.counters.captures, replay.counters.replays) == (1, 3)


def test_a_result_is_not_overwritten_by_the_next(network):
    replay = serving(network)
    inputs = [x() for _ in range(4)]
    results = [serve(replay, network, (item,), {}) for item in inputs]
    for item, result in zip(inputs, results, strict=True):
        torch.testing.assert_close(result, network(item))


def test_tensors_in_containers_are_inputs_too(network):
    replay = serving(network)
    for _ in range(4):
        python_calls(replay, network, x(), control={"output": [torch.randn(2, 4), torch.randn(2, 4)]})
    assert replay.counters.replays == 2


def test_lists_that_a_call_empties_are_full_in_each_recording(network):
    """As ComfyUI's UNet takes a ControlNet's residuals out of the lists it is given."""
    replay = serving(network)

    def taking(x, control):
        while control["output"]:
            x = x + control["output"].pop()
        return network(x)

    for _ in range(2):
        for _ in range(4):
            item, residuals = x(), [x(), x()]
            expected = network(item + residuals[0] + residuals[1])
            result = serve(replay, taking, (item,), {"control": {"output": list(residuals)}})
            torch.testing.assert_close(result, expected)
        replay.drop_captures()  # the second time without a comparison
    assert replay.counters.replays == 2 + 2


def test_each_size_has_a_recording_of_its_own_and_there_is_a_bound(network):
    replay = serving(network)
    for batch in range(1, MAX_CAPTURES + 1):
        assert replayed(replay, network, x(batch))
    assert not replayed(replay, network, x(MAX_CAPTURES + 1))
    assert python_calls(replay, network, x(1)) == 0
    replay.drop_captures()
    assert replayed(replay, network, x(MAX_CAPTURES + 1))


def test_a_call_that_the_host_does_not_vouch_for_is_made_and_ends_replay(network):
    replay = serving(network)
    assert replayed(replay, network, x(), options={})
    assert replay.reason is None
    assert python_calls(replay, network, x(), options={"reason": Reason(ReasonCode.ANY_PATCH)}) == 1
    assert replay.reason == Reason(ReasonCode.ANY_PATCH)
    assert python_calls(replay, network, x(), options={}) == 1


def test_a_plain_host_vouches_for_nothing():
    assert Host().capture_blocker({}, frozenset())


def change_weight(network):
    network.inner.weight = nn.Parameter(torch.randn(4, 4))


def move_weight(network):
    network.inner.weight.data = torch.randn(4, 4)


def hook(network):
    network.inner.register_forward_hook(lambda module, args, output: output + 1)


def replace_forward(network):
    network.inner.forward = lambda x: x + 1


def replace_module(network):
    network.inner = nn.Linear(4, 4)


def set_attribute(network):
    network.strength = 2.0


def patch_method(network):
    network._inner_method = lambda: None


@pytest.mark.parametrize(
    "change", [change_weight, move_weight, hook, replace_forward, replace_module, set_attribute, patch_method]
)
def test_what_changes_in_a_network_is_seen_by_the_next_call(change, network):
    replay = serving(network)
    assert replayed(replay, network, x())
    change(network)
    assert python_calls(replay, network, x()) == 1


def test_modules_are_looked_at_while_the_gpu_works(network, monkeypatch):
    order = []
    replay = serving(network, lambda call, pool: Repeated(lambda: [call(), order.append("replay")]))
    for _ in range(2):
        serve(replay, network, (x(),), {})
    monkeypatch.setattr(replay._modules, "check", lambda: order.append("modules"))
    order.clear()
    serve(replay, network, (x(),), {})
    assert order == ["replay", "modules"]


@pytest.mark.parametrize("change", [change_weight, move_weight, set_attribute])
def test_a_network_that_stays_changed_is_recorded_anew(change, network):
    replay = serving(network)
    assert replayed(replay, network, x())
    change(network)
    assert replayed(replay, network, x())


@pytest.mark.parametrize(
    ("change", "has_check"), [(change_weight, False), (move_weight, False), (set_attribute, True), (hook, True)]
)
def test_other_code_is_watched_before_it_is_recorded(change, has_check, network, monkeypatch):
    """A recording of code that waits for the GPU ends the process where memory is lent."""
    replay, watched = serving(network), []
    assert replayed(replay, network, x())
    monkeypatch.setattr(module, "SyncDetector", lambda *a: watched.append(1) or SyncDetector(*a))
    change(network)
    serve(replay, network, (x(),), {})
    network.inner._forward_hooks.clear()
    assert replayed(replay, network, x())
    assert bool(watched) == has_check


class Reads(Host):
    """Options that the network's code looks up keep its steps from being recorded."""

    context_arguments = frozenset({"options"})

    def capture_blocker(self, context, string_constants):
        found = string_constants & (context.get("options") or {}).keys()
        return Reason(ReasonCode.OPTION, *found) if found else None

    def steps(self, context):
        return MIN_STEPS


def test_options_that_other_code_looks_up_are_seen(network, monkeypatch):
    replay = StepReplay(network, Reads(), torch.device("cpu"), Counters(), uncounted)
    for _ in range(3):
        serve(replay, network, (x(),), {"options": {"scale": 2.0}})
    assert replay.counters.replays == 1
    monkeypatch.setattr(Network, "forward", lambda self, x, options=None: self.inner(x) * options["scale"])
    replay.drop_if_changed()
    for _ in range(4):
        serve(replay, network, (x(),), {"options": {"scale": 2.0}})
    assert replay.counters.replays == 1
    assert replay.reason == Reason(ReasonCode.OPTION, "scale")


class Cancelled(Exception):
    pass


def test_a_cancellation_during_a_recording_is_the_samplings(network, monkeypatch):
    monkeypatch.setattr(Options, "is_cancellation", lambda self, error: isinstance(error, Cancelled))

    def cancelled(call, pool):
        raise Cancelled

    replay = serving(network, cancelled)
    serve(replay, network, (x(),), {})
    with pytest.raises(Cancelled):
        serve(replay, network, (x(),), {})
    replay._capture = uncounted
    assert replayed(replay, network, x())


@pytest.mark.parametrize("change", [hook, replace_forward, replace_module])
def test_code_of_others_in_a_network_is_never_recorded(change, network):
    replay = serving(network)
    change(network)
    assert not replayed(replay, network, x())


def test_a_weight_that_is_gone_is_noticed_even_if_another_takes_its_place(network):
    replay = serving(network)
    assert replayed(replay, network, x())
    network.inner._parameters["weight"] = None
    gc.collect()
    assert not replay._tensors.holds()


def test_a_weight_on_another_device_keeps_calls_unrecorded(network):
    network.inner.bias = nn.Parameter(torch.empty(4, device="meta"))
    replay = serving(network)
    for _ in range(3):
        serve(replay, lambda x: x, (x(),), {})
    assert replay.counters.captures == 0
    assert replay.reason == Reason(ReasonCode.WEIGHTS_ELSEWHERE)


@pytest.mark.parametrize("event", ["had_setup", "is_eager_in_part"])
def test_disturbed_calls_are_not_captured(network, event):
    replay = serving(network)

    for _ in range(3):
        running = RunningCall(None)

        def disturbed(*args, running=running):
            setattr(running, event, True)
            return network(*args)

        serve(replay, disturbed, (x(),), {}, running)
    assert replay.counters.captures == 0


@pytest.mark.parametrize("change", [{"retired": "it failed its check"}, {"is_evicted": True}])
def test_a_graph_out_of_use_ends_its_captures(network, change):
    """Another model that shares the graph may be the one that found out."""
    replay, entry = serving(network), CacheEntry(None)
    running = RunningCall(None)
    running.entries.add(entry)
    for _ in range(3):
        serve(replay, network, (x(),), {}, running)
    assert replay.counters.replays == 1
    CacheEntry(None).retired = Reason(ReasonCode.CHECK_FAILED, "another region")
    assert python_calls(replay, network, x()) == 0
    for name, value in change.items():
        setattr(entry, name, value)
    assert python_calls(replay, network, x()) == 1


def test_a_recording_that_gives_another_result_is_not_used(network):
    def record_wrongly(call, pool):
        strength, network.strength = network.strength, 2.0
        call()
        network.strength = strength
        return Repeated(lambda: None)

    replay = serving(network, record_wrongly)
    assert [python_calls(replay, network, x()) for _ in range(4)] == [1, 2, 1, 1]


def test_a_call_that_cannot_be_recorded_is_made_and_not_tried_again(network):
    attempts = []

    def fail(call, pool):
        attempts.append(call)
        raise torch.cuda.OutOfMemoryError("no memory")

    replay = serving(network, fail)
    assert [python_calls(replay, network, x()) for _ in range(4)] == [1, 1, 1, 1]
    assert len(attempts) == 1
    assert replay.reason == Reason(ReasonCode.ERROR, "OutOfMemoryError: no memory")


def test_once_right_a_kind_of_call_is_not_compared_again(network):
    replay = serving(network)
    assert replayed(replay, network, x())
    replay.drop_captures()
    assert [python_calls(replay, network, x()) for _ in range(3)] == [1, 1, 0]


def test_a_proven_kind_that_cannot_be_recorded_any_more_is_called(network):
    replay = serving(network)
    assert replayed(replay, network, x())
    replay.drop_captures()
    replay._capture = lambda call, pool: 1 / 0
    assert [python_calls(replay, network, x()) for _ in range(3)] == [1, 1, 1]


def test_a_recorded_call_writes_to_a_context_of_its_own(network):
    replay = serving(network)
    options = {}

    def write(x, options):
        options["block"] = len(options)
        return network(x)

    for _ in range(3):
        serve(replay, write, (x(),), {"options": options})
    assert options == {"block": 1}  # by the calls; the recorded one had a copy


def test_forgetting_drops_what_a_recording_holds(network):
    replay = serving(network)
    assert replayed(replay, network, x())
    held = weakref.ref(next(iter(replay._states.values())).inputs[0])
    replay.drop_captures()
    gc.collect()
    assert held() is None


def test_they_end_with_a_sampling_whose_memory_others_may_take(network):
    replay = serving(network)
    assert replayed(replay, network, x())
    replay.end_sampling()
    assert python_calls(replay, network, x()) == 1


@pytest.fixture
def lent(monkeypatch):
    """As if memory were lent to replay while they run; the list has an item for each time it was given back."""
    returned = []
    monkeypatch.setattr(module, "captures_borrow_memory", lambda device: True)
    monkeypatch.setattr(module, "return_lent_memory", returned.append)
    return returned


def test_they_outlive_a_sampling_where_their_memory_is_lent(network, lent):
    replay = serving(network)
    assert replayed(replay, network, x())
    replay.end_sampling()
    assert lent == [torch.device("cpu")]
    assert python_calls(replay, network, x()) == 0
    change_weight(network)
    replay.end_sampling()
    assert python_calls(replay, network, x()) == 1


def test_few_steps_pay_for_a_recording_only_where_it_outlives_them(network, monkeypatch):
    few = {"options": {"steps": MIN_STEPS - 1}}
    replay = serving(network)
    assert [python_calls(replay, network, x(), **few) for _ in range(4)] == [1, 1, 1, 1]
    assert replay.reason == Reason(ReasonCode.FEW_STEPS, str(MIN_STEPS))
    monkeypatch.setattr(module, "captures_borrow_memory", lambda device: True)
    monkeypatch.setattr(module, "return_lent_memory", lambda device: None)
    replay = serving(network)
    calls = []
    for _ in range(4):  # samplings of a single step
        calls.append(python_calls(replay, network, x(), **few))
        replay.end_sampling()
    assert calls == [1, 2, 0, 0]


def test_of_those_that_outlive_a_sampling_the_unused_make_room(network, lent):
    replay = serving(network)
    for batch in range(1, MAX_CAPTURES + 1):
        assert replayed(replay, network, x(batch))
    replay.end_sampling()
    assert python_calls(replay, network, x(1)) == 0
    assert replayed(replay, network, x(MAX_CAPTURES + 1))
    assert python_calls(replay, network, x(1)) == 0
    assert python_calls(replay, network, x(2)) == 1
    assert len(replay._states) == MAX_CAPTURES


def test_what_could_not_be_recorded_is_tried_again_in_the_next_sampling(network, lent):
    replay = serving(network, lambda call, pool: 1 / 0)
    for _ in range(3):
        python_calls(replay, network, x())
    replay._capture = uncounted
    assert not replayed(replay, network, x())
    replay.end_sampling()
    assert replayed(replay, network, x())


def test_a_recording_that_finds_no_memory_any_more_is_made_anew(network, lent, monkeypatch):
    replay = serving(network)
    assert replayed(replay, network, x())
    replay.end_sampling()
    (recorded,) = replay._states.values()

    def fail():
        raise torch.cuda.OutOfMemoryError("CUDA out of memory\nTried to allocate")

    monkeypatch.setattr(recorded.graph, "replay", fail)
    item = x()
    torch.testing.assert_close(serve(replay, network, (item,), {}), network(item))
    assert replay.reason == Reason(ReasonCode.ERROR, "OutOfMemoryError: CUDA out of memory")
    assert replayed(replay, network, x())
    assert replay.reason is None


def test_other_arithmetic_is_another_call(network, lent):
    replay = serving(network)
    assert replayed(replay, network, x())
    with torch.backends.cudnn.flags(benchmark=not torch.backends.cudnn.benchmark):
        assert python_calls(replay, network, x()) == 1
    assert python_calls(replay, network, x()) == 0


def test_another_precision_of_float32_is_another_call(network, lent, monkeypatch):
    replay = serving(network)
    assert replayed(replay, network, x())
    monkeypatch.setattr(module, "float32_precisions", lambda: ("tf32", "ieee"))
    assert python_calls(replay, network, x()) == 1


def test_the_recordings_do_not_keep_the_network(network):
    replay = serving(network)
    assert replayed(replay, network, x())
    replay.drop_captures()
    CALLS.clear()
    reference = weakref.ref(network)
    del network
    # The fixture holds it, but nothing of ours may: its own dictionary is all that is kept.
    assert not any(value is reference() for value in vars(replay).values())


def test_inputs_of_inference_mode_and_without_it(network):
    replay = serving(network)
    with torch.inference_mode():
        assert replayed(replay, network, x())
    assert python_calls(replay, network, x()) == 0


def test_only_cuda_records():
    assert not can_capture(torch.device("cpu"))


def used():
    """Return the bytes that this process keeps from others on the GPU, by whichever allocator."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


@on_gpu
def test_a_cuda_graph_follows_inputs_and_weights():
    network = Network(GPU)
    device = network.inner.weight.device
    replay = StepReplay(network, Options(), device, Counters())
    for _ in range(3):
        item = torch.randn(2, 4, device=device)
        torch.testing.assert_close(serve(replay, network, (item,), {}), network(item))
    assert replay.counters.replays == 1
    network.inner.weight.mul_(2)
    item = torch.randn(2, 4, device=device)
    torch.testing.assert_close(serve(replay, network, (item,), {}), network(item))
    assert replay.counters.replays == 2


def test_a_call_that_waits_for_the_device_is_not_recorded_and_the_reason_names_where(network):
    replay = serving(network)

    def waiting(item):
        return network(item) * item.sum().item()

    for _ in range(4):
        item = x()
        torch.testing.assert_close(serve(replay, waiting, (item,), {}), waiting(item))
    assert replay.counters.captures == 0
    assert replay.reason == Reason(ReasonCode.WAITS_FOR_GPU, "aten._local_scalar_dense")


@on_gpu
def test_what_python_raises_while_recording_is_survived():
    network = Network(GPU)
    device = network.inner.weight.device
    replay = StepReplay(network, Options(), device, Counters())
    calls = []

    def failing(item):
        calls.append(item)
        wide = network(item).repeat(64, 64)
        return wide if len(calls) != 3 else wide / (1 // 0)

    item = torch.ones(2, 4, device=device)
    for _ in range(4):
        torch.testing.assert_close(serve(replay, failing, (item,), {}), network(item).repeat(64, 64))
    assert replay.reason.detail.startswith("ZeroDivisionError")
    replay.drop_captures()
    for _ in range(3):
        item = torch.randn(2, 4, device=device)
        torch.testing.assert_close(serve(replay, network, (item,), {"time": None}), network(item))
    assert replay.counters.replays == 1


@on_gpu
def test_code_that_waits_for_the_gpu_cannot_be_recorded_and_leaves_nothing_behind():
    network = Network(GPU)
    device = network.inner.weight.device
    replay = StepReplay(network, Options(), device, Counters())

    def waiting(item):
        return network(item) * item.sum().item()

    network(torch.ones(2, 4, device=device))  # cuBLAS takes a workspace for it, once
    before = used()
    stream = torch.cuda.current_stream()
    for _ in range(4):
        item = torch.ones(2, 4, device=device)
        torch.testing.assert_close(serve(replay, waiting, (item,), {}), waiting(item))
    assert replay.counters.captures == 0
    assert torch.cuda.current_stream() == stream
    assert torch.randn(1 << 20, device=device).std().item() == pytest.approx(1, abs=0.01)
    replay.drop_captures()
    assert used() <= before + (2 << 20)
    for _ in range(3):
        item = torch.randn(2, 4, device=device)
        torch.testing.assert_close(serve(replay, network, (item,), {"time": None}), network(item))
    assert replay.counters.replays == 1


@on_gpu
def test_random_numbers_go_on_as_they_would_have():
    network = Network(GPU)
    device = network.inner.weight.device
    replay = StepReplay(network, Options(), device, Counters())
    item = torch.ones(2, 4, device=device)

    def draws(call):
        torch.manual_seed(3)
        numbers = []
        for _ in range(4):
            call()
            numbers.append(torch.randn(3, device=device))
        return torch.stack(numbers)

    torch.testing.assert_close(draws(lambda: serve(replay, network, (item,), {})), draws(lambda: network(item)))
    assert replay.counters.replays == 2


@on_gpu
@pytest.mark.parametrize("end", ["end_sampling", "drop_captures"])
def test_memory_of_recordings_comes_back(end):
    network = Network(GPU)
    device = network.inner.weight.device
    replay = StepReplay(network, Options(), device, Counters())

    def narrow(item):
        return network(item).sum(0)

    network(torch.ones(2, 4, device=device))
    item = torch.randn(1 << 20, 4, device=device)
    before = used()
    for _ in range(2):
        for _ in range(3):
            serve(replay, narrow, (item,), {})
        assert replay.counters.replays
        assert used() > before + (16 << 20)
        getattr(replay, end)()
        assert used() <= before + (20 << 20 if replay._states else 2 << 20)  # a recording keeps its input


class Outer(nn.Module):
    """What runs between blocks is recorded with them."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x, options=None):
        return self.stem(x)


def pad_around(network):
    network.stem.padding_mode = "circular"
    network.stem._reversed_padding_repeated_twice = [1, 1]


@pytest.mark.parametrize(("change", "dropped"), [(pad_around, True), (lambda network: None, False)])
def test_a_change_between_blocks_drops_recordings_before_the_next_sampling(change, dropped):
    network, data = Outer(), torch.randn(2, 4, 6)
    replay = serving(network, lambda call, pool: Repeated(call))
    for _ in range(3):
        serve(replay, network, (data,), {})
    assert replay.counters.replays == 1
    change(network)
    replay.drop_if_changed()
    torch.testing.assert_close(serve(replay, network, (data,), {}), network(data))
    assert replay.counters.replays == (1 if dropped else 2)
