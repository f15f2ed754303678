"""Worker processes that compile."""

from __future__ import annotations

import errno
import io
import logging
import os
import subprocess
import sys
import threading
import time
import types
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compiled_graphs.compiler.backends.eager.backend import EagerBackend
from compiled_graphs.compiler.common.counters import Counters
from compiled_graphs.compiler.common.host import Host
from compiled_graphs.compiler.common.jobs import CompileTimeout
from compiled_graphs.compiler.common.reason import ReasonCode
from compiled_graphs.compiler.compile_cache import worker_main
from compiled_graphs.compiler.compile_cache import worker_pool as workers_module
from compiled_graphs.compiler.compile_cache.graph_cache import CompileIn, GraphCache, Requester
from compiled_graphs.compiler.compile_cache.worker_channel import NICENESS
from compiled_graphs.compiler.compile_cache.worker_main import CompileResult, Setup, receive, send
from compiled_graphs.compiler.compile_cache.worker_pool import WorkerError, Workers, worker_count
from compiled_graphs.compiler.registry.registry import Registry
from networks import ConvolutionNetwork, compile_network, variants_of, weights_of
from torch import nn

CPU = torch.device("cpu")
PATIENCE = 300.0
"""Seconds. What has not happened by then counts as a failure."""


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


def test_worker_graph_gives_eagers_values(workers, variant):
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


def test_worker_graphs_match_local_key_and_contract(workers, variant):
    there, here = GraphCache(workers=workers), GraphCache()
    made = [
        cache.get_or_compile(variant, by(), place)[0].graph.identity()
        for cache, place in ((there, CompileIn.WORKER_REQUIRED), (here, CompileIn.PROCESS))
    ]
    assert made[0] == made[1]


def test_no_weights_are_sent(variant, monkeypatch):
    sent = []
    monkeypatch.setattr(workers_module, "pickled", lambda order, host: sent.append(order) or b"")
    workers = Workers(setup, Host(), count=1)
    monkeypatch.setattr(workers, "_take", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        workers.compile(variant, "eager")
    tensors = [*sent[0].request.module.parameters(), *sent[0].request.module.buffers()]
    assert tensors
    assert all(t.device.type == "meta" for t in tensors)


class LocalBlock(nn.Module):
    """A block of a module that another process cannot import."""

    def forward(self, x):
        return x


def test_unimportable_code_is_a_worker_error(workers, variant, monkeypatch):
    module = types.ModuleType("only_here")
    module.LocalBlock = LocalBlock
    monkeypatch.setitem(sys.modules, "only_here", module)
    monkeypatch.setattr(LocalBlock, "__module__", "only_here")
    block = LocalBlock()
    block.weight = nn.Parameter(torch.ones(1))
    block.function = lambda x: x  # a lambda cannot be pickled
    with pytest.raises(WorkerError, match="cannot be sent"):
        workers.compile(replace(variant, module=block), "eager")
    del block.function
    with pytest.raises(WorkerError, match="cannot import"):
        workers.compile(replace(variant, module=block), "eager")


def test_code_that_differs_in_a_worker_is_refused(workers, variant):
    with pytest.raises(WorkerError, match="differs in a worker process"):
        workers.compile(replace(variant, fingerprint="0" * 64), "eager")


def test_failing_worker_leaves_it_to_this_process(workers, variant, monkeypatch):
    def fail(*_):
        raise WorkerError(ReasonCode.WORKER, "ended")

    monkeypatch.setattr(workers, "compile", fail)
    cache, counters = GraphCache(workers=workers), Counters()
    assert cache.get_or_compile(variant, by(counters), CompileIn.WORKER_PREFERRED)[1] == "compiled"
    with pytest.raises(WorkerError):
        GraphCache(workers=workers).get_or_compile(variant, by(counters), CompileIn.WORKER_REQUIRED)


@pytest.mark.parametrize("fails", ["the start", "the first message"])
def test_a_process_that_cannot_start_leaves_it_to_this_process(fails, workers, variant, monkeypatch):
    """Such as at a container's limit of processes, or when the new one ends before it reads."""
    started, real = [], workers_module.spawned

    def start():
        if fails == "the start":
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        started.append(real())
        return started[-1]

    def break_pipe(*_):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    workers.stop()
    monkeypatch.setattr(workers_module, "spawned", start)
    if fails == "the first message":
        monkeypatch.setattr(workers_module, "send", break_pipe)
    cache, counters = GraphCache(workers=workers), Counters()
    assert cache.get_or_compile(variant, by(counters), CompileIn.WORKER_PREFERRED)[1] == "compiled"
    with pytest.raises(WorkerError, match="could not start"):
        workers.compile(variant, "eager")
    assert workers._running == 0
    for channel in started:
        channel.wait()  # it was ended, or this would take its whole limit


def test_a_process_ends_when_idle_though_the_next_one_did_not_start(monkeypatch):
    pool, real, started = Workers(setup, Host(), count=2), workers_module.spawned, []

    def spawned():
        if started:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        started.append(real())
        return started[0]

    monkeypatch.setattr(workers_module, "spawned", spawned)
    monkeypatch.setattr(workers_module, "IDLE", 0.01)
    with pytest.raises(WorkerError, match="could not start"):
        pool.start("eager", CPU)
    started[0].wait()  # or this takes its whole limit
    assert pool._running == 0


def test_a_process_that_dies_is_replaced(workers, variant):
    workers.compile(variant, "eager")
    for process in workers._idle:
        process._channel.kill()
        process._channel.wait()
    for _ in range(2):
        with pytest.raises(WorkerError, match="ended"):
            workers.compile(variant, "eager")
        if not workers._idle:
            break
    assert workers.compile(variant, "eager")


@pytest.mark.parametrize("limit", ["1e-9", "0.2"])  # expires before the order is sent, and during the wait
def test_a_hanging_compiler_is_ended_with_its_process(variant, monkeypatch, limit):
    workers = Workers(setup, Host(), count=1)
    monkeypatch.setenv("COMPILED_GRAPHS_COMPILE_LIMIT", limit)
    with pytest.raises(CompileTimeout, match=f"more than {float(limit):g} s"):
        workers.compile(variant, "eager")
    assert not workers.have_processes
    monkeypatch.delenv("COMPILED_GRAPHS_COMPILE_LIMIT")
    assert workers.compile(variant, "eager")
    workers.stop()


@pytest.fixture
def in_this_process(monkeypatch):
    """Lets `serve` run here: a worker silences its own process, and sets its path."""
    monkeypatch.setattr(logging, "disable", lambda level: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with warnings.catch_warnings():
        yield


@pytest.mark.usefixtures("in_this_process")
def test_a_waiting_order_comes_before_the_example(monkeypatch):
    done = []
    monkeypatch.setattr(worker_main, "_compile_example", lambda backend, device: done.append("example"))
    monkeypatch.setattr(worker_main, "_make", lambda order, host: done.append(order) or CompileResult())
    read, write = os.pipe()
    with os.fdopen(write, "wb") as target:
        send(target, setup("eager", CPU))
        send(target, "an order that waits")
    with os.fdopen(read, "rb") as source:
        worker_main.serve(source, io.BytesIO())
    assert done == ["an order that waits"]


@pytest.mark.usefixtures("in_this_process")
def test_a_process_that_nobody_waits_for_compiles_an_example(monkeypatch):
    done, has_done = [], threading.Event()
    monkeypatch.setattr(worker_main, "_compile_example", lambda backend, device: done.append(1) or has_done.set())
    read, write = os.pipe()
    with os.fdopen(read, "rb") as source, os.fdopen(write, "wb") as target:
        send(target, setup("eager", CPU))
        serving = threading.Thread(target=worker_main.serve, args=(source, io.BytesIO()))
        serving.start()
        assert has_done.wait(PATIENCE)
        target.close()
        serving.join(PATIENCE)
        assert not serving.is_alive()
    assert done == [1]


@pytest.mark.usefixtures("in_this_process")
def test_a_process_that_cannot_use_its_gpu_does_not_start(monkeypatch):
    """As one that was forked from a process that had begun to use a GPU."""

    def init():
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(torch.cuda, "init", init)
    source, target = io.BytesIO(), io.BytesIO()
    send(source, setup("eager", torch.device("cuda")))
    source.seek(0)
    worker_main.serve(source, target)
    target.seek(0)
    assert "forked subprocess" in str(receive(target).reason)


def test_the_example_compiles():
    worker_main._compile_activation(EagerBackend(), CPU)


def test_an_example_that_fails_is_no_matter(monkeypatch):
    asked = []

    def fail(backend, device):
        asked.append(device)
        raise RuntimeError("no compiler")

    monkeypatch.setattr(worker_main, "_compile_activation", fail)
    worker_main._compile_example(EagerBackend(), CPU)
    assert asked == [CPU]


def test_a_process_that_cannot_start_says_why_though_an_order_was_sent(variant, monkeypatch):
    def nobody_reads(target, order):
        raise BrokenPipeError  # an order may be larger than a pipe

    def broken(backend, device):
        return replace(setup(backend, device), host_factory="compile_cache.worker_pool:nothing_of_this_name")

    monkeypatch.setattr(workers_module, "send_bytes", nobody_reads)
    workers = Workers(broken, Host(), count=2)
    with pytest.raises(WorkerError, match="nothing_of_this_name"):
        GraphCache(workers=workers).get_or_compile(variant, by(), CompileIn.WORKER_REQUIRED)
    workers.stop()


@pytest.mark.parametrize("length", [0, 4, 12, -1])
def test_truncated_message_is_an_end(length):
    message = io.BytesIO()
    send(message, "a graph")
    with pytest.raises(EOFError):
        receive(io.BytesIO(message.getvalue()[:length]))


def test_idle_processes_end(variant, monkeypatch):
    monkeypatch.setattr(workers_module, "IDLE", 0.1)
    workers = Workers(setup, Host(), count=1)
    workers.compile(variant, "eager")
    deadline = time.monotonic() + PATIENCE
    while workers.have_processes and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not workers.have_processes


def test_worker_imports_nothing_from_its_directory(variant, tmp_path, monkeypatch):
    ground = traps(tmp_path)
    monkeypatch.chdir(ground)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", ".", os.environ.get("PYTHONPATH", "")]))
    workers = Workers(lambda backend, device: replace(setup(backend, device), sys_path=("", ".", *sys.path)), Host(), 1)
    assert workers.compile(variant, "eager")
    workers.stop()
    assert (ground / "imported").exists() is False


def traps(folder):
    """Fill a folder with a module for every name that a process may import. Each module records that it ran."""
    names = sys.stdlib_module_names | {"torch", "numpy", "sympy", "start", "worker", "compiler", "compiled_graphs"}
    for name in names:
        (folder / f"{name}.py").write_text(f"open({str(folder / 'imported')!r}, 'a').write('{name} ')\n")
    return folder


def test_traps_log_their_import(tmp_path):
    subprocess.run([sys.executable, "-c", "import this"], cwd=traps(tmp_path), check=True)
    assert "this" in (tmp_path / "imported").read_text()


def test_worker_ends_with_its_parent():
    code = (
        "import sys, time, torch; from compiled_graphs.compiler.compile_cache.worker_pool import Workers\n"
        "from compiled_graphs.compiler.compile_cache.worker_main import Setup\n"
        "from compiled_graphs.compiler.common.host import Host\n"
        "w = Workers(lambda b, d: Setup(tuple(sys.path), backend=b, device=str(d)), Host(), 1)\n"
        "w.start('eager', torch.device('cpu')); print(w._idle[0]._channel.pid, flush=True); time.sleep(60)"
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
    stat = Path(f"/proc/{number}/stat")  # on Linux a zombie, whose parent has not waited for it, is still listed
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.parametrize("left_free", [0, 2**32])
def test_scarce_gpu_memory_ends_processes_at_once(left_free, variant, monkeypatch):
    host = Host()
    monkeypatch.setattr(host, "memory_left_free", lambda: left_free)
    workers, enough = Workers(setup, host, count=1), workers_module.PLENTY + left_free
    workers.compile(variant, "eager")
    for free, remains in ((enough, True), (enough - 1, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 2 * free))
        workers.stop_if_memory_is_scarce(CPU)
        assert workers.have_processes
        workers.stop_if_memory_is_scarce(torch.device("cuda"))
        assert workers.have_processes == remains


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


def test_few_graphs_start_no_processes(workers):
    cold = Workers(setup, Host(), count=4)
    assert not cold.are_worth_starting(4)
    assert cold.are_worth_starting(5)
    assert not Workers(setup, Host(), count=1).are_worth_starting(100)
    assert not Workers(setup, Host(), count=0).are_worth_starting(100)


@pytest.mark.parametrize(
    ("cores", "said", "count"),
    [(64, None, 16), (16, None, 14), (8, None, 6), (4, None, 3), (2, None, 1), (16, "0", 0), (16, "3", 3), (8, "x", 6)],
)
def test_worker_count_follows_machine_or_variable(cores, said, count, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)), raising=False)
    monkeypatch.setattr(workers_module, "MEMORY", 1)
    monkeypatch.delenv("COMPILED_GRAPHS_WORKERS", raising=False)
    if said is not None:
        monkeypatch.setenv("COMPILED_GRAPHS_WORKERS", said)
    assert worker_count() == count


def test_worker_count_without_affinity_uses_all_cores(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    monkeypatch.setattr(workers_module, "MEMORY", 1)
    monkeypatch.delenv("COMPILED_GRAPHS_WORKERS", raising=False)
    assert worker_count() == 8


def test_little_memory_means_few_processes(monkeypatch):
    pytest.importorskip("psutil")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    monkeypatch.setattr(workers_module, "MEMORY", 1 << 60)
    assert worker_count() == 0


@pytest.mark.skipif(not hasattr(os, "nice"), reason="priorities are set otherwise here")
def test_a_worker_gives_way_to_the_process_that_makes_images(workers, variant):
    GraphCache(workers=workers).get_or_compile(variant, by(), CompileIn.WORKER_REQUIRED)
    lowest, ours = 19, os.getpriority(os.PRIO_PROCESS, 0)
    theirs = {os.getpriority(os.PRIO_PROCESS, process._channel.pid) for process in workers._idle}
    assert theirs == {min(lowest, ours + NICENESS)}


class Layers(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(count)))

    def forward(self, x):
        return self.layers(x)


class Mixed(nn.Module):
    """A network with blocks of one class but several lengths."""

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
    """Records the orders, and blocks the first two until both have arrived."""

    def __init__(self):
        super().__init__(setup, Host(), count=2)
        self.asked, self.most, self._now = [], 0, 0
        self._both, self._lock = threading.Barrier(2), threading.Lock()

    def are_worth_starting(self, missing):
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
        raise WorkerError(ReasonCode.WORKER, "ended")


def test_largest_regions_are_ordered_first():
    """The slowest compiles come first, and no order is made before a process is free."""
    workers = TwoBusyProcesses()
    compile_network(Mixed(1, 4, 2, 5, 3), Registry(GraphCache(workers=workers)))
    assert (set(workers.asked[:2]), sorted(workers.asked)) == ({4, 5}, [1, 2, 3, 4, 5])
    assert workers.most == 2
