"""Workers that a template process forks."""

from __future__ import annotations

import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from compiled_graphs.compiler.backends.eager.backend import EagerBackend
from compiled_graphs.compiler.common.counters import Counters
from compiled_graphs.compiler.common.host import Host
from compiled_graphs.compiler.common.jobs import CompileTimeout
from compiled_graphs.compiler.common.reason import Reason, ReasonCode
from compiled_graphs.compiler.compile_cache import worker_pool, worker_template
from compiled_graphs.compiler.compile_cache.graph_cache import CompileIn, GraphCache, Requester
from compiled_graphs.compiler.compile_cache.worker_channel import Channel
from compiled_graphs.compiler.compile_cache.worker_main import CompileResult, Setup, send
from compiled_graphs.compiler.compile_cache.worker_pool import Workers
from compiled_graphs.compiler.compile_cache.worker_template import Template, is_supported
from networks import ConvolutionNetwork, variants_of

pytestmark = pytest.mark.skipif(not is_supported(), reason="processes are not forked here")

CPU = torch.device("cpu")
PATIENCE = 300.0


def setup(backend="eager", device=CPU):
    return Setup(tuple(sys.path), backend=backend, device=str(device))


@pytest.fixture(scope="module")
def template():
    template = Template(setup())
    assert template.is_ready(PATIENCE)
    yield template
    template.stop()


@pytest.fixture
def workers(template, monkeypatch):
    """A pool with a template that is ready, which it does not end."""
    monkeypatch.setattr(Workers, "stop_template", lambda workers: setattr(workers, "_template", None))
    workers = Workers(setup, Host(), count=2)
    workers._template = template
    yield workers
    workers.stop()
    if workers._template_timer is not None:
        workers._template_timer.cancel()


@pytest.fixture
def spawned(monkeypatch):
    """How often a process was started that imports everything itself."""
    made, spawn = [], worker_pool.spawned
    monkeypatch.setattr(worker_pool, "spawned", lambda: made.append(1) or spawn())
    return made


def made(workers):
    """Return the graph that a worker makes of a block."""
    (variant,) = variants_of(ConvolutionNetwork())
    by = Requester(EagerBackend(), Host(), Counters())
    place = CompileIn.PROCESS if workers is None else CompileIn.WORKER_REQUIRED
    return GraphCache(workers=workers).get_or_compile(variant, by, place)[0].graph.identity()


class Sleep:
    """Keeps whoever reads it waiting."""

    def __reduce__(self):
        return time.sleep, (PATIENCE,)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def test_a_forked_worker_makes_the_same_graph(workers, spawned):
    forked = made(workers)
    assert not spawned
    assert forked == made(None)


def test_a_template_that_is_still_importing_is_waited_for(spawned, monkeypatch):
    monkeypatch.setattr(worker_pool, "_has_memory_for_template", lambda: True)
    workers = Workers(setup, Host(), count=2)
    workers.start_template("eager", CPU)
    made(workers)
    assert not spawned
    workers.stop()
    workers.stop_template()


def test_a_template_that_takes_too_long_is_given_up(workers, spawned, monkeypatch):
    monkeypatch.setattr(Template, "is_ready", lambda template, seconds=0.0: False)
    made(workers)
    assert len(spawned) == 1
    assert workers._template is None


def test_a_worker_that_takes_too_long_is_ended(workers, spawned):
    made(workers)
    (process,) = workers._idle
    with pytest.raises(CompileTimeout):
        process.ask(pickle.dumps(Sleep()), 0.2)
    workers.stop()
    made(workers)
    assert not spawned, "the template goes on"


def test_one_that_cannot_start_is_replaced(workers, spawned, monkeypatch):
    answer = io.BytesIO()
    send(answer, CompileResult(reason=Reason(ReasonCode.WORKER, "cannot be forked")))

    def fork(template):
        return Channel(0, io.BytesIO(answer.getvalue()), io.BytesIO(), lambda: None, lambda: None, is_forked=True)

    monkeypatch.setattr(Template, "fork", fork)
    workers.start("eager", CPU)
    made(workers)
    assert len(spawned) == 1
    assert workers._template is None, "it is not asked again"


def test_without_the_template_workers_start_anew(spawned, monkeypatch):
    monkeypatch.setattr(worker_pool, "_has_memory_for_template", lambda: True)
    workers = Workers(setup, Host(), count=2)
    workers.start_template("eager", CPU)
    os.kill(workers._template.pid, signal.SIGKILL)
    workers._template._process.wait()
    made(workers)
    assert len(spawned) == 1
    assert workers._template is None
    workers.stop()


class Double:
    """A template whose processes answer nothing, or that cannot fork."""

    made: list[Double]

    def __init__(self, setup):
        self.device, self.is_broken, self.has_imported = setup.device, False, False
        self.made.append(self)

    def is_ready(self, seconds=0.0):
        self.has_imported = not self.is_broken
        return self.has_imported

    def fork(self):
        return Channel(0, io.BytesIO(), io.BytesIO(), lambda: None, lambda: None, is_forked=True)

    def stop(self):
        pass


@pytest.fixture
def doubles(monkeypatch):
    monkeypatch.setattr(worker_pool, "_has_memory_for_template", lambda: True)
    monkeypatch.setattr(worker_pool, "Template", Double)
    monkeypatch.setattr(Double, "made", [], raising=False)
    return Double.made


def test_a_start_for_a_gpu_begins_a_template_and_forks_it(doubles, spawned):
    """One process imports, and not each worker at the same time."""
    workers = Workers(setup, Host(), count=3)
    workers.start("eager", torch.device("cuda"))
    assert [template.device for template in doubles] == ["cuda"]
    assert len(workers._idle) == 3
    assert not spawned
    workers.stop()
    workers.stop_template()


def test_processes_for_a_cpu_import_less_and_need_no_template(doubles, spawned):
    workers = Workers(setup, Host(), count=2)
    workers.start("eager", CPU)
    assert len(spawned) == 2
    assert not doubles
    workers.stop()


def test_a_template_that_failed_is_not_begun_again(doubles, monkeypatch):
    gpu, spawned = torch.device("cuda"), []
    monkeypatch.setattr(worker_pool, "spawned", lambda: spawned.append(1) or Double.fork(None))
    workers = Workers(setup, Host(), count=3)
    workers.start_template("eager", gpu)
    doubles[0].is_broken = True
    workers.start("eager", gpu)
    assert len(doubles) == 1
    assert len(spawned) == 3
    workers.stop()


def test_a_fork_that_fails_ends_all_that_have_shown_nothing_yet(doubles, monkeypatch):
    monkeypatch.setattr(worker_pool, "spawned", lambda: pytest.fail("none is needed"))
    workers = Workers(setup, Host(), count=4)
    workers.start("eager", torch.device("cuda"), 3)
    workers._idle[0]._has_answered = True
    workers._do_without_template("one has failed")
    assert len(workers._idle) == workers._running == 1
    workers.stop()


def test_processes_started_after_a_fork_failed_are_used(doubles, monkeypatch):
    """The list of idle processes is another one after that."""
    forks = iter([Double.fork(None), OSError("no memory")])

    def fork(self):
        channel = next(forks)
        if isinstance(channel, OSError):
            raise channel
        return channel

    monkeypatch.setattr(Double, "fork", fork)
    monkeypatch.setattr(
        worker_pool, "spawned", lambda: Channel(1, io.BytesIO(), io.BytesIO(), lambda: None, lambda: None)
    )
    workers = Workers(setup, Host(), count=3)
    workers.start("eager", torch.device("cuda"))
    assert [process.is_doubtful for process in workers._idle] == [False, False]
    assert workers._running == 2, "the forked one has ended"
    workers.stop()


def test_the_pool_counts_as_warm_and_can_be_stopped_while_the_template_imports(doubles, monkeypatch):
    asked, may_go_on = threading.Event(), threading.Event()

    def is_ready(self, seconds):
        asked.set()
        return may_go_on.wait(PATIENCE)

    monkeypatch.setattr(Double, "is_ready", is_ready)
    workers = Workers(setup, Host(), count=2)
    assert not workers.have_processes
    starting = threading.Thread(target=workers.start, args=("eager", torch.device("cuda")))
    starting.start()
    assert asked.wait(PATIENCE)
    assert workers.are_worth_starting(2)
    workers.stop()  # does not wait
    may_go_on.set()
    starting.join(PATIENCE)
    workers.stop()
    workers.stop_template()


def test_one_that_has_begun_to_use_a_gpu_gives_up(monkeypatch):
    code = (
        "import sys; sys.path[:] = eval(sys.argv[2])\n"
        "import torch; torch.cuda.is_initialized = lambda: True\n"
        "from compiled_graphs.compiler.compile_cache.worker_template import main; main(sys.argv[1])\n"
    )
    line = lambda module, fd: [sys.executable, "-c", code, fd, repr(sys.path)]  # noqa: E731
    monkeypatch.setattr(worker_template, "command", line)
    template = Template(setup())
    with pytest.raises(ConnectionError):
        template.is_ready(PATIENCE)
    template.stop()


def test_one_that_does_not_answer_is_not_waited_for_long(monkeypatch):
    monkeypatch.setattr(worker_template, "FORK_LIMIT", 0.05)
    template = object.__new__(Template)
    template._control, silent = socket.socketpair()
    with silent, template._control, pytest.raises(TimeoutError, match="has not answered"):
        template.fork()


def test_a_process_that_does_not_end_is_not_waited_for_long(monkeypatch):
    monkeypatch.setattr(worker_template, "END_LIMIT", 0.05)
    monkeypatch.setattr(worker_template.os, "kill", lambda pid, signal: None)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        worker_template._end(process.pid)
        assert process.poll() is None
        process.stdin.close()


@pytest.mark.parametrize("count", [0, 1])
def test_there_is_none_for_a_single_worker(count):
    workers = Workers(setup, Host(), count=count)
    workers.start_template("eager", CPU)
    assert workers._template is None


def test_there_is_none_without_memory(monkeypatch):
    monkeypatch.setattr(worker_pool, "TEMPLATE_MEMORY", 1 << 60)
    workers = Workers(setup, Host(), count=2)
    workers.start_template("eager", CPU)
    assert workers._template is None


def test_it_ends_without_a_word_if_its_starter_ends_first():
    code = (
        "import os, sys; sys.path[:] = eval(sys.argv[1])\n"
        "from compiled_graphs.compiler.compile_cache.worker_template import Template\n"
        "from compiled_graphs.compiler.compile_cache.worker_main import Setup\n"
        "Template(Setup(tuple(sys.path), backend='eager')); os.kill(os.getpid(), 9)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, repr(sys.path)], capture_output=True, text=True, check=False)
    assert "Traceback" not in ended.stderr


def test_nothing_outlives_the_process_that_started_it():
    code = (
        "import os, sys; sys.path[:] = eval(sys.argv[1])\n"
        "from compiled_graphs.compiler.compile_cache.worker_template import Template\n"
        "from compiled_graphs.compiler.compile_cache.worker_main import Setup\n"
        "template = Template(Setup(tuple(sys.path), backend='eager'))\n"
        "assert template.is_ready(300)\n"
        "channel = template.fork()\n"
        "print(template.pid, channel.pid, flush=True); os.kill(os.getpid(), 9)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, repr(sys.path)], capture_output=True, text=True, check=False)
    pids = [int(pid) for pid in ended.stdout.split()]
    assert len(pids) == 2, ended.stderr
    deadline = time.monotonic() + PATIENCE
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))
