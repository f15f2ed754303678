"""Compile Model "in background": sampling begins at once, and blocks become compiled while it goes on."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import comfy.model_management
import pytest
import torch
from compiled_graphs.compiler.backends.eager import EagerBackend
from compiled_graphs.compiler.counters import totals
from compiled_graphs.compiler.hosts import comfy as host

BOUND = 5e-2 if torch.cuda.is_available() else 2e-4
WAITING = "compiling in the background"


@pytest.fixture(autouse=True)
def _nothing_goes_on():
    """Counts are of the whole process: what one test began must not end in another."""
    yield
    for thread in threading.enumerate():
        if thread.name == "compile in background":
            thread.join(30)


@pytest.fixture
def gate(monkeypatch):
    """A compiler that waits until the gate is opened."""
    event, compile_at_once = threading.Event(), EagerBackend.compile

    def compile_later(self, exported):
        assert event.wait(30)
        return compile_at_once(self, exported)

    monkeypatch.setattr(EagerBackend, "compile", compile_later)
    yield event
    event.set()


@pytest.fixture
def model(load):
    return load("tiny_sd15")


def compiled(model, **options):
    return host.compile_model(model, host.Request("eager", background=True, **options))


def assert_same(ours, theirs):
    assert ((ours - theirs).norm() / theirs.norm()).item() <= BOUND


def counters(model):
    return model.object_patches["diffusion_model.forward"].compiled.counters


def test_the_node_is_done_at_once_and_the_first_prompt_runs_eagerly(gate, model, sample, registry):
    start = time.perf_counter()
    ours, text = compiled(model)
    assert time.perf_counter() - start < 2
    assert text.endswith(WAITING)
    expected = sample(model, "tiny_sd15", seed=1)
    assert_same(sample(ours, "tiny_sd15", seed=1), expected)
    assert set(counters(ours).eager_calls) == {WAITING}
    gate.set()
    host.finish(ours)
    with totals.expect(compiles=0):
        before = counters(ours).eager_calls.total()
        assert_same(sample(ours, "tiny_sd15", seed=1), expected)
    assert counters(ours).eager_calls.total() == before
    assert counters(ours).compiles == 3


def test_blocks_change_over_between_two_steps(gate, model, sample, registry):
    ours, _ = compiled(model)
    seen = []

    def step(number, *_):
        if number == 2:
            gate.set()
            host.finish(ours)
        seen.append(counters(ours).eager_calls.total())

    expected = sample(model, "tiny_sd15", steps=6)
    assert_same(sample(ours, "tiny_sd15", steps=6, callback=step), expected)
    assert 0 < seen[0] < seen[1] < seen[2] == seen[5]


def test_what_is_in_memory_already_serves_without_a_compile(model, sample, registry):
    host.compile_model(model, host.Request("eager"))
    with totals.expect(compiles=0):
        ours, _ = compiled(model)
        host.finish(ours)
        sample(ours, "tiny_sd15")


def test_the_node_is_told_of_each_graph_and_of_the_end(model, registry):
    told = []
    ours, _ = compiled(model, on_change=told.append)
    host.finish(ours)
    deadline = time.monotonic() + 5
    while (not told or WAITING in told[-1]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(told) == 4
    assert told[-1].startswith("3 regions, 3 compiled, 0 eager")
    assert WAITING not in told[-1]


def test_a_stop_that_somebody_asked_of_a_prompt_is_not_taken_from_it(model, registry):
    comfy.model_management.interrupt_current_processing(True)
    try:
        ours, _ = compiled(model)
        ours.object_patches["diffusion_model.forward"].compiled.background.wait()
        assert comfy.model_management.processing_interrupted()
        assert counters(ours).compiles == 3
    finally:
        comfy.model_management.interrupt_current_processing(False)


def test_waiting_for_it_can_be_cancelled(gate, model, registry):
    ours, _ = compiled(model)
    comfy.model_management.interrupt_current_processing(True)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        host.finish(ours)


def test_two_models_of_one_architecture_compile_once(gate, load, sample, registry):
    first, second = (compiled(load("tiny_sd15"))[0] for _ in range(2))
    with totals.expect(compiles=3):
        gate.set()
        host.finish(first)
        host.finish(second)
    with totals.expect(compiles=0):
        assert_same(sample(first, "tiny_sd15"), sample(second, "tiny_sd15"))


def test_a_kind_of_call_that_turns_up_is_compiled_behind_it(model, sample, registry):
    def attend(q, k, v, options):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    def replaced(patcher):
        patcher = patcher.clone()
        patcher.set_model_attn2_replace(attend, "middle", 0)
        return patcher

    ours, _ = compiled(model)
    host.finish(ours)
    expected = sample(replaced(model), "tiny_sd15")
    with totals.expect(compiles=1):
        assert_same(sample(replaced(ours), "tiny_sd15"), expected)
        host.finish(ours)
    assert WAITING in counters(ours).eager_calls
    before = counters(ours).eager_calls.total()
    assert_same(sample(replaced(ours), "tiny_sd15"), expected)
    assert counters(ours).eager_calls.total() == before


def test_a_compiler_that_fails_leaves_the_reason(model, sample, registry, monkeypatch):
    def fail(self, exported):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(EagerBackend, "compile", fail)
    ours, _ = compiled(model)
    host.finish(ours)
    assert_same(sample(ours, "tiny_sd15"), sample(model, "tiny_sd15"))
    assert set(counters(ours).eager_calls) == {"RuntimeError: no such kernel"}


def test_a_model_that_is_gone_is_not_kept_for_it(gate, load, registry):
    model = load("tiny_sd15")
    ours, _ = compiled(model)
    background = ours.object_patches["diffusion_model.forward"].compiled.background
    network = weakref.ref(model.model.diffusion_model)
    gate.set()
    del model, ours
    background.wait()
    for _ in range(50):
        gc.collect()
        if network() is None:
            return
        time.sleep(0.1)
    raise AssertionError("the network is still held")
