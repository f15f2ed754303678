"""Compile Model "in background": sampling begins at once, and blocks become compiled while it goes on."""

from __future__ import annotations

import gc
import importlib
import re
import threading
import time
import weakref

import comfy.model_management
import pytest
import torch
from compiled_graphs.compiler.common.counters import totals
from compiled_graphs.compiler.common.reason import Reason, ReasonCode
from compiled_graphs.compiler.compile_cache.graph_cache import GraphCache
from compiled_graphs.compiler.compile_cache.worker_pool import WorkerError, Workers
from compiled_graphs.compiler.hosts.comfy import compile as host
from compiled_graphs.compiler.hosts.comfy import process, worker_setup
from compiled_graphs.compiler.hosts.comfy.rules.host import HOST
from compiled_graphs.compiler.registry.registry import Registry

BOUND = 5e-2 if torch.cuda.is_available() else 2e-4
WAITING = Reason(ReasonCode.BACKGROUND)
PATIENCE = 300.0
"""Seconds after which something that is to come is taken not to come."""
STOPPED = getattr(comfy.model_management, "InterruptProcessingException", None) or (
    importlib.import_module("comfy.interruption").InterruptProcessingException
)


@pytest.fixture(scope="module")
def worker():
    """One process for all tests here: it takes seconds to begin."""
    workers = Workers(worker_setup.setup, HOST, count=1)
    yield workers
    workers.stop()


@pytest.fixture(autouse=True)
def registry(worker, monkeypatch):
    """A registry of the test's own, whose graphs come from the worker."""
    registry = Registry(GraphCache(workers=worker))
    monkeypatch.setattr(process, "registry", lambda: registry)
    yield registry
    for thread in threading.enumerate():  # counts are of the whole process: what one test began must not end in another
        if thread.name == "compile in background":
            thread.join(PATIENCE)


@pytest.fixture
def gate(worker, monkeypatch):
    """A worker that waits until the gate is opened."""
    event, compile_at_once = threading.Event(), worker.compile

    def compile_later(variant, backend):
        assert event.wait(PATIENCE)
        return compile_at_once(variant, backend)

    monkeypatch.setattr(worker, "compile", compile_later)
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


def test_the_node_is_done_at_once_and_the_first_prompt_runs_eagerly(gate, model, sample):
    ours, text = compiled(model)
    assert text.startswith("Compiling in the background: 0 of 3 block types done.")
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


def test_blocks_change_over_between_two_steps(gate, model, sample):
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


def test_what_is_in_memory_already_serves_without_a_compile(model, sample):
    host.compile_model(model, host.Request("eager"))
    with totals.expect(compiles=0):
        ours, _ = compiled(model)
        host.finish(ours)
        sample(ours, "tiny_sd15")


def test_the_node_is_told_of_each_graph_and_of_the_end(model):
    told = []
    ours, _ = compiled(model, on_change=told.append)
    host.finish(ours)
    deadline = time.monotonic() + PATIENCE
    while (not told or "in the background" in told[-1]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [re.search(r"\d of \d", text)[0] for text in told] == [f"{n} of 3" for n in (0, 1, 2, 3, 3)]
    assert told[-1].startswith("Ready: 3 of 3 block types compiled (")


@pytest.fixture
def interrupted():
    """The person has asked to stop the running prompt. Returns what raises if that still stands."""
    comfy.model_management.interrupt_current_processing(True)
    yield comfy.model_management.throw_exception_if_processing_interrupted
    comfy.model_management.interrupt_current_processing(False)


def test_a_stop_that_somebody_asked_of_a_prompt_reaches_it(model, interrupted):
    ours, _ = compiled(model)

    def prompt():  # asks between two steps; layers of 2026 ask as well, on the thread beside it
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            interrupted()
            time.sleep(0.01)

    with pytest.raises(STOPPED):
        prompt()
    ours.object_patches["diffusion_model.forward"].compiled.background.wait()
    assert counters(ours).compiles == 3


def test_waiting_for_it_can_be_cancelled(gate, model, interrupted):
    ours, _ = compiled(model)
    with pytest.raises(STOPPED):
        host.finish(ours)


def test_two_models_of_one_architecture_compile_once(gate, load, sample):
    first, second = (compiled(load("tiny_sd15"))[0] for _ in range(2))
    with totals.expect(compiles=3):
        gate.set()
        host.finish(first)
        host.finish(second)
    with totals.expect(compiles=0):
        assert_same(sample(first, "tiny_sd15"), sample(second, "tiny_sd15"))


def test_a_kind_of_call_that_turns_up_is_compiled_behind_it(model, sample):
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


def test_what_a_worker_cannot_compile_stays_eager_with_the_reason(model, sample, worker, monkeypatch):
    def fail(variant, backend):
        raise WorkerError(ReasonCode.WORKER, "ended (no such kernel)")

    monkeypatch.setattr(worker, "compile", fail)
    ours, _ = compiled(model)
    host.finish(ours)
    assert_same(sample(ours, "tiny_sd15"), sample(model, "tiny_sd15"))
    assert set(counters(ours).eager_calls) == {Reason(ReasonCode.WORKER, "ended (no such kernel)")}


def test_nothing_is_traced_beside_a_running_model(model, sample, monkeypatch):
    monkeypatch.setattr("compiled_graphs.compiler.compile_cache.graph_cache.export_region", None)
    ours, _ = compiled(model)
    host.finish(ours)
    assert counters(ours).compiles == 3


def test_a_model_that_is_gone_is_not_kept_for_it(gate, load):
    model = load("tiny_sd15")
    ours, _ = compiled(model)
    background = ours.object_patches["diffusion_model.forward"].compiled.background
    network = weakref.ref(model.model.diffusion_model)
    gate.set()
    del model, ours
    background.wait()
    deadline = time.monotonic() + PATIENCE
    while network() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert network() is None
