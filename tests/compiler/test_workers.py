"""Worker processes that compile."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compiled_graphs.compiler import workers as workers_module
from compiled_graphs.compiler.backends.eager import EagerBackend
from compiled_graphs.compiler.counters import Counters
from compiled_graphs.compiler.graph_cache import CompileIn, GraphCache, Requester
from compiled_graphs.compiler.host import Host
from compiled_graphs.compiler.jobs import CompileTimeout
from compiled_graphs.compiler.registry import Registry
from compiled_graphs.compiler.worker import Setup, receive, send
from compiled_graphs.compiler.workers import WorkerError, Workers, worker_count
from networks import ConvolutionNetwork, compile_network, variants_of, weights_of
from torch import nn

CPU = torch.device("cpu")
PATIENCE = 300.0
"""Seconds after which something that is to come is taken not to come."""


def setup(backend, device):
    return Setup(tuple(sys.path), backend=backend, device=str(device))


def by(counters=None):
    return Requester(EagerBackend(), Host(), counters or Counters())


@pytest.fixture(scope="module")
def workers():
    workers = Workers(setup, Host(), count=2)
    yield workers
    workers.stop()


@pytest.fixture
def variant():
    (variant,) = variants_of(ConvolutionNetwork())
    return variant


def test_a_region_comes_back_as_a_graph_that_gives_eagers_values(workers, variant):
    cache = GraphCache(workers=workers)
    counters = Counters()
    entry, source = cache.get_or_compile(variant, by(counters), CompileIn.WORKER_REQUIRED)
    assert (source, counters.compiles) == ("compiled", 1)
    region = variant.module
    inputs = [torch.randn(shape) for shape in variant.hints]
    weights = weights_of(region)
    with torch.no_grad():
        torch.testing.assert_close(entry.graph(weights, inputs)[0], region(*inputs))
    assert cache.get_or_compile(variant, by(counters), CompileIn.WORKER_REQUIRED) == (entry, "memory")


def test_its_key_and_contract_are_those_of_a_graph_made_here(workers, variant):
    there, here = GraphCache(workers=workers), GraphCache()
    made = [
        cache.get_or_compile(variant, by(), place)[0].graph.identity()
        for cache, place in ((there, CompileIn.WORKER_REQUIRED), (here, CompileIn.PROCESS))
    ]
    assert made[0] == made[1]


def test_no_weights_travel(variant, monkeypatch):
    sent = []
    monkeypatch.setattr(workers_module.pickle, "dumps", lambda order: sent.append(order) or b"")
    workers = Workers(setup, Host(), count=1)
    monkeypatch.setattr(workers, "_take", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        workers.compile(variant, "eager")
    tensors = [*sent[0].variant.module.parameters(), *sent[0].variant.module.buffers()]
    assert tensors
    assert all(t.device.type == "meta" for t in tensors)


class LocalBlock(nn.Module):
    """Of a module that another process cannot import."""

    def forward(self, x):
        return x


def test_code_that_another_process_cannot_import_is_compiled_here_or_stays_eager(workers, variant, monkeypatch):
    module = types.ModuleType("only_here")
    module.LocalBlock = LocalBlock
    monkeypatch.setitem(sys.modules, "only_here", module)
    monkeypatch.setattr(LocalBlock, "__module__", "only_here")
    block = LocalBlock()
    block.weight = nn.Parameter(torch.ones(1))
    block.function = lambda x: x  # cannot be pickled
    with pytest.raises(WorkerError, match="cannot be sent"):
        workers.compile(replace(variant, module=block), "eager")
    del block.function
    with pytest.raises(WorkerError, match="cannot import"):
        workers.compile(replace(variant, module=block), "eager")


def test_code_that_differs_there_is_refused(workers, variant):
    with pytest.raises(WorkerError, match="another one"):
        workers.compile(replace(variant, fingerprint="0" * 64), "eager")


def test_where_a_worker_cannot_this_process_compiles(workers, variant, monkeypatch):
    def fail(*_):
        raise WorkerError("no")

    monkeypatch.setattr(workers, "compile", fail)
    cache, counters = GraphCache(workers=workers), Counters()
    assert cache.get_or_compile(variant, by(counters), CompileIn.WORKER_PREFERRED)[1] == "compiled"
    with pytest.raises(WorkerError):
        GraphCache(workers=workers).get_or_compile(variant, by(counters), CompileIn.WORKER_REQUIRED)


def test_a_process_that_dies_is_replaced(workers, variant):
    workers.compile(variant, "eager")
    for process in workers._idle:
        process._process.kill()
        process._process.wait()
    for _ in range(2):
        with pytest.raises(WorkerError, match="ended"):
            workers.compile(variant, "eager")
        if not workers._idle:
            break
    assert workers.compile(variant, "eager")


@pytest.mark.parametrize("limit", ["1e-9", "0.2"])  # before the process is asked, and while its answer is awaited
def test_a_compiler_that_hangs_is_ended_with_its_process(variant, monkeypatch, limit):
    workers = Workers(setup, Host(), count=1)
    monkeypatch.setenv("COMPILED_GRAPHS_COMPILE_LIMIT", limit)
    with pytest.raises(CompileTimeout, match=f"more than {float(limit):g} s"):
        workers.compile(variant, "eager")
    assert not workers.are_warm
    monkeypatch.delenv("COMPILED_GRAPHS_COMPILE_LIMIT")
    assert workers.compile(variant, "eager")
    workers.stop()


@pytest.mark.parametrize("length", [0, 4, 12, -1])
def test_a_message_that_was_cut_short_is_an_end(length):
    message = io.BytesIO()
    send(message, "a graph")
    with pytest.raises(EOFError):
        receive(io.BytesIO(message.getvalue()[:length]))


def test_idle_processes_end(variant, monkeypatch):
    monkeypatch.setattr(workers_module, "IDLE", 0.1)
    workers = Workers(setup, Host(), count=1)
    workers.compile(variant, "eager")
    deadline = time.monotonic() + PATIENCE
    while workers.are_warm and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not workers.are_warm


def test_nothing_is_imported_from_the_directory_that_the_host_was_started_from(variant, tmp_path, monkeypatch):
    ground = traps(tmp_path)
    monkeypatch.chdir(ground)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", ".", os.environ.get("PYTHONPATH", "")]))
    workers = Workers(lambda backend, device: replace(setup(backend, device), sys_path=("", ".", *sys.path)), Host(), 1)
    assert workers.compile(variant, "eager")
    workers.stop()
    assert (ground / "imported").exists() is False


def traps(folder):
    """A folder with a module of every name that a process could ask for; each of them takes down that it was run."""
    names = sys.stdlib_module_names | {"torch", "numpy", "sympy", "start", "worker", "compiler", "compiled_graphs"}
    for name in names:
        (folder / f"{name}.py").write_text(f"open({str(folder / 'imported')!r}, 'a').write('{name} ')\n")
    return folder


def test_a_trap_springs(tmp_path):
    subprocess.run([sys.executable, "-c", "import this"], cwd=traps(tmp_path), check=True)
    assert "this" in (tmp_path / "imported").read_text()


def test_a_process_ends_with_the_one_that_began_it():
    code = (
        "import sys, time, torch; from compiled_graphs.compiler.workers import Workers\n"
        "from compiled_graphs.compiler.worker import Setup; from compiled_graphs.compiler.host import Host\n"
        "w = Workers(lambda b, d: Setup(tuple(sys.path), backend=b, device=str(d)), Host(), 1)\n"
        "w.start('eager', torch.device('cpu')); print(w._idle[0]._process.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + PATIENCE
    while _runs(worker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _runs(worker)


def _runs(number):
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{number}/stat")  # where there is one, a process whose end nobody has looked at is in it
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_processes_end_at_once_where_gpu_memory_is_scarce(variant, monkeypatch):
    workers = Workers(setup, Host(), count=1)
    workers.compile(variant, "eager")
    for free, remains in ((workers_module.PLENTY, True), (workers_module.PLENTY - 1, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 2 * free))
        workers.rest(CPU)
        assert workers.are_warm
        workers.rest(torch.device("cuda"))
        assert workers.are_warm == remains


def test_no_more_processes_than_allowed(workers, variant):
    most = []

    def job():
        workers.compile(variant, "eager")
        most.append(workers._running)

    threads = [threading.Thread(target=job) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) <= 2
    assert len(most) == 5


def test_few_graphs_do_not_begin_processes(workers):
    cold = Workers(setup, Host(), count=4)
    assert not cold.pay(4)
    assert cold.pay(5)
    assert not Workers(setup, Host(), count=1).pay(100)
    assert not Workers(setup, Host(), count=0).pay(100)


@pytest.mark.parametrize(
    ("cores", "said", "count"),
    [(16, None, 8), (8, None, 6), (4, None, 3), (2, None, 1), (16, "0", 0), (16, "3", 3), (16, "x", 8)],
)
def test_the_count_follows_the_machine_or_what_somebody_says(cores, said, count, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)), raising=False)
    monkeypatch.setattr(workers_module, "MEMORY", 1)
    monkeypatch.delenv("COMPILED_GRAPHS_WORKERS", raising=False)
    if said is not None:
        monkeypatch.setenv("COMPILED_GRAPHS_WORKERS", said)
    assert worker_count() == count


def test_a_system_that_does_not_limit_cores_is_asked_for_all(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    monkeypatch.setattr(workers_module, "MEMORY", 1)
    monkeypatch.delenv("COMPILED_GRAPHS_WORKERS", raising=False)
    assert worker_count() == 7


def test_little_memory_means_few_processes(monkeypatch):
    pytest.importorskip("psutil")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    monkeypatch.setattr(workers_module, "MEMORY", 1 << 60)
    assert worker_count() == 0


class Layers(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(count)))

    def forward(self, x):
        return self.layers(x)


class Mixed(nn.Module):
    """Blocks of one class and of several lengths."""

    def __init__(self, *lengths):
        super().__init__()
        self.blocks = nn.ModuleList(map(Layers, lengths))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def inputs(self, sizes):
        return (torch.randn(sizes.batch, sizes.tokens, 16),)


class TwoBusyProcesses(Workers):
    """Notes who asks, and keeps the first two until both are there."""

    def __init__(self):
        super().__init__(setup, Host(), count=2)
        self.asked, self.most, self._now = [], 0, 0
        self._both, self._lock = threading.Barrier(2), threading.Lock()

    def pay(self, missing):
        return True

    def compile(self, variant, backend):
        with self._lock:
            self.asked.append(len(variant.module.layers))
            self._now += 1
            self.most = max(self.most, self._now)
        if len(self.asked) <= 2:
            self._both.wait(PATIENCE)
        time.sleep(0.05)
        with self._lock:
            self._now -= 1
        raise WorkerError("busy")


def test_what_takes_longest_is_asked_for_first_and_nothing_before_a_process_is_free():
    workers = TwoBusyProcesses()
    compile_network(Mixed(1, 4, 2, 5, 3), Registry(GraphCache(workers=workers)))
    assert (set(workers.asked[:2]), sorted(workers.asked)) == ({4, 5}, [1, 2, 3, 4, 5])
    assert workers.most == 2
