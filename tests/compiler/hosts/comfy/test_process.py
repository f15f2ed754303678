"""What this process does before a first compile."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from compiled_graphs.compiler.backends import AUTO, DEFAULT
from compiled_graphs.compiler.common.reason import ReasonCode
from compiled_graphs.compiler.compile_cache.worker_pool import WorkerError
from compiled_graphs.compiler.hosts.comfy import process

PATIENCE = 60.0


class Workers:
    """A pool that is told to start, and gets its orders when the test says so."""

    count = 2

    def __init__(self):
        self.has_started, self.has_begun = threading.Event(), threading.Event()

    def start(self, backend, device):
        self.has_started.set()


@pytest.fixture
def workers(monkeypatch):
    """The pool of a process in which nothing was ever compiled."""
    workers = Workers()
    cache = SimpleNamespace(workers=workers, store=SimpleNamespace(keys=set))
    monkeypatch.setattr(process, "registry", lambda: SimpleNamespace(cache=cache))
    monkeypatch.setattr(process.comfy_compat, "torch_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(process, "_WARMED", set())
    return workers


@pytest.fixture
def warmed(monkeypatch):
    """Set once the backend is warm."""
    warmed = threading.Event()
    backend = SimpleNamespace(name="double", warm_up=lambda give_way: warmed.set())
    monkeypatch.setattr(process, "choose_backend", lambda *_, only_loads: (backend, ""))
    return warmed


def test_imports_wait_until_workers_have_their_orders(workers, warmed, monkeypatch):
    waits = threading.Event()
    wait = workers.has_begun.wait
    monkeypatch.setattr(workers.has_begun, "wait", lambda seconds: (waits.set(), wait(PATIENCE)))
    process.warm_up("double")
    assert workers.has_started.wait(PATIENCE)
    assert waits.wait(PATIENCE)
    assert not warmed.is_set()
    workers.has_begun.set()
    assert warmed.wait(PATIENCE)


def test_imports_come_at_last_though_nobody_gives_orders(workers, warmed, monkeypatch):
    monkeypatch.setattr(process, "ORDERS", 0.01)
    process.warm_up("double")
    assert warmed.wait(PATIENCE)


def test_imports_wait_for_nothing_where_graphs_are_loaded(workers, warmed, monkeypatch):
    monkeypatch.setattr(process, "ORDERS", 10 * PATIENCE)
    process.warm_up("double", loads=True)
    assert warmed.wait(PATIENCE)


def test_a_worker_that_does_not_start_does_not_keep_this_process_from_its_imports(workers, warmed, monkeypatch):
    def fail(backend, device):
        raise WorkerError(ReasonCode.WORKER, "could not start")

    monkeypatch.setattr(process, "ORDERS", 10 * PATIENCE)
    monkeypatch.setattr(workers, "start", fail)
    process.warm_up("double")
    assert warmed.wait(PATIENCE)


def test_auto_is_warm_where_its_backend_is(workers, monkeypatch):
    begun, has_begun = [], threading.Event()
    monkeypatch.setattr(process, "_warm_up", lambda backend, loads: (begun.append(backend), has_begun.set()))
    for name in (AUTO, DEFAULT, AUTO):
        process.warm_up(name)
    assert has_begun.wait(PATIENCE)
    assert begun == [DEFAULT]
    assert {DEFAULT} == process._WARMED
