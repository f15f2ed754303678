"""OneFlow as a backend, in this process if it can be imported, otherwise in the Python that the environment names."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compiled_graphs.compiler.backends import BACKENDS, choose_backend
from compiled_graphs.compiler.backends.oneflow import OneFlowBackend, backend, worker_process
from compiled_graphs.compiler.common.reason import Reason, ReasonCode, Unsupported
from compiled_graphs.compiler.compile_cache.graph_cache import GraphCache
from compiled_graphs.compiler.registry.registry import Registry
from compiled_graphs.compiler.storage.graph_file import StoredGraph, read_graphs, write_graphs
from compiled_graphs.compiler.storage.store import FolderStore
from compiled_graphs.compiler.storage.trust import Trust
from networks import (
    CPU,
    WIDTH,
    ConvolutionNetwork,
    StreamNetwork,
    compile_network,
    export,
    sizes,
    transformer,
    weights_of,
)
from oneflow_here import in_worker
from torch import nn

BACKEND = OneFlowBackend()
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
PACKAGE = Path(backend.__file__).parents[3]


@pytest.fixture
def fresh(monkeypatch):
    """Start without engines, as if nothing had used OneFlow. A OneFlow in this process keeps its session."""
    monkeypatch.setattr(backend, "_engines", {})
    yield
    for engine in backend._engines.values():
        getattr(engine, "_end", lambda: None)()


def built():
    return backend.report(CPU)["built"]


@pytest.mark.oneflow
def test_executable_matches_eager_after_saving_too():
    network = ConvolutionNetwork()
    exported = export(network)
    ran = BACKEND.compile(exported)
    for executable in (ran, BACKEND.load(ran.to_bytes(), exported.spec)):
        for at in (sizes(batch=1), sizes(batch=4, height=5), sizes(batch=1)):
            x, emb = network.inputs(at)
            for block in network.blocks:
                (result,) = executable(*weights_of(block), network.stem(x), emb)
                torch.testing.assert_close(result, block(network.stem(x), emb), **CLOSE)


@pytest.mark.oneflow
def test_inputs_in_any_layout_are_taken():
    network = transformer()
    executable = BACKEND.compile(export(network))
    x = torch.randn(7 * WIDTH * 2).as_strided((2, 7, WIDTH), (5, WIDTH, 1))
    (result,) = executable(*weights_of(network.blocks[0]), x)
    torch.testing.assert_close(result, network.blocks[0](x), **CLOSE)


@pytest.mark.oneflow
def test_changed_weights_show_in_the_next_call():
    network = transformer()
    block, executable, x = network.blocks[0], BACKEND.compile(export(network)), torch.randn(2, 7, WIDTH)
    for change in (
        lambda: None,
        lambda: block.mlp[0].weight.mul_(2),
        lambda: block.mlp[2].bias.data.add_(1),  # torch's version counter does not see this edit
        lambda: setattr(block.mlp[0], "weight", nn.Parameter(torch.randn(2 * WIDTH, WIDTH))),
    ):
        change()
        torch.testing.assert_close(executable(*weights_of(block), x)[0], block(x), **CLOSE)


@pytest.mark.oneflow
def test_results_share_no_memory():
    network = transformer()
    executable, weights = BACKEND.compile(export(network)), weights_of(network.blocks[0])
    one, other = torch.randn(2, 7, WIDTH), torch.randn(2, 7, WIDTH)
    (first,) = executable(*weights, one)
    kept = first.clone()
    (second,) = executable(*weights, other)
    second.zero_()
    assert torch.equal(first, kept)
    assert torch.equal(executable(*weights, one)[0], kept)


@pytest.mark.oneflow
def test_repeated_size_builds_nothing(fresh):
    network = transformer()
    executable, weights = BACKEND.compile(export(network)), weights_of(network.blocks[0])
    shapes = [(1, 5), (2, 9), (1, 6)]
    for batch, tokens in shapes:
        executable(*weights, torch.randn(batch, tokens, WIDTH))
    before = built()
    for block in network.blocks:
        for batch, tokens in shapes:
            executable(*weights_of(block), torch.randn(batch, tokens, WIDTH))
    assert built() == before


@pytest.mark.oneflow
def test_bytes_change_only_with_a_new_size():
    network = transformer()
    executable, weights = BACKEND.compile(export(network)), weights_of(network.blocks[0])
    sizes = []
    for tokens in (41, 42, 41):
        executable(*weights, torch.randn(1, tokens, WIDTH))
        sizes.append(executable.to_bytes())
    assert len(sizes[0]) < len(sizes[1])
    assert sizes[1] == sizes[2]


def test_bytes_are_out_of_date_once_the_engine_has_another_job():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("program.json", json.dumps({"outputs": [], "writes": [], "weights": []}))
    executable = backend.OneFlowExecutable(buffer.getvalue(), CPU)
    assert not executable.has_grown()
    executable._engine = SimpleNamespace(data=lambda name: b"with a job")
    assert executable.has_grown()
    assert executable.has_grown(buffer.getvalue())
    assert not executable.has_grown(b"with a job")


@pytest.mark.oneflow
def test_model_that_writes_to_inputs_loads_from_disk(tmp_path):
    network = StreamNetwork()
    image, text = network.inputs(sizes())
    expected = image.clone()
    results = network(expected, text)
    for compiles in (1, 0):
        compiled = compile_network(network, Registry(GraphCache(FolderStore(tmp_path))), BACKEND)
        assert (compiled.counters.compiles, compiled.counters.from_disk) == (compiles, 1 - compiles)
        for _ in range(2):  # the first call is checked and returns eager's result
            written = image.clone()
            torch.testing.assert_close(network(written, text), results, **CLOSE)
            torch.testing.assert_close(written, expected, **CLOSE)
        assert not compiled.counters.eager_calls
        assert not compiled.counters.retired


def test_saved_bytes_hold_no_pickle():
    network = transformer()
    with zipfile.ZipFile(io.BytesIO(BACKEND.compile(export(network)).to_bytes())) as archive:
        program = json.loads(archive.read("program.json"))
        assert archive.namelist() == ["program.json", "jobs.json"]
    assert [node[1] for node in program["nodes"]].count("aten.linear.default") == 4
    assert program["weights"][0] == ["float32", [WIDTH]]


@pytest.mark.oneflow
@in_worker
def test_new_process_builds_nothing_for_known_sizes(fresh, tmp_path):
    network = transformer()
    compiled = compile_network(network, Registry(), BACKEND)
    inputs = [torch.randn(2, 7, WIDTH), torch.randn(1, 9, WIDTH)]
    expected = [network(x) for x in inputs]
    trust = Trust(tmp_path)
    file = write_graphs([StoredGraph.of(graph) for graph in compiled.graphs()], trust)
    first = backend.report(CPU)["process"]
    backend._engines.clear()
    loaded = compile_with(network, read_graphs(file, trust))
    for x, wanted in zip(inputs, expected, strict=True):
        for _ in range(2):
            torch.testing.assert_close(network(x), wanted, **CLOSE)
    assert (loaded.counters.from_file, loaded.counters.compiles, loaded.counters.retired) == (1, 0, 0)
    assert backend.report(CPU)["process"] != first
    assert built() == 0
    network(torch.randn(1, 11, WIDTH))
    assert built() == 1


def compile_with(network, graphs):
    compiled = compile_network(network, Registry(), BACKEND, probe=lambda network, at: None)
    assert compiled.load(graphs) == []
    return compiled


@pytest.mark.oneflow
@in_worker
def test_dead_process_is_replaced(fresh):
    networks = [transformer(), ConvolutionNetwork()]
    executables = [BACKEND.compile(export(network)) for network in networks]
    x, (y, emb) = torch.randn(2, 7, WIDTH), networks[1].inputs(sizes())
    calls = [
        lambda: executables[0](*weights_of(networks[0].blocks[0]), x)[0],
        lambda: executables[1](*weights_of(networks[1].blocks[0]), networks[1].stem(y), emb)[0],
    ]
    before = [call() for call in calls]
    (engine,) = backend._engines.values()
    first = backend.report(CPU)["process"]
    os.kill(first, signal.SIGKILL)
    for call, result in zip(calls, before, strict=True):
        torch.testing.assert_close(call(), result, **CLOSE)
    assert backend.report(CPU)["process"] != first
    assert engine.starts == 2


@pytest.mark.oneflow
@in_worker
def test_hanging_process_is_replaced(fresh, monkeypatch):
    network = transformer()
    executable, weights, x = BACKEND.compile(export(network)), weights_of(network.blocks[0]), torch.randn(2, 7, WIDTH)
    (before,) = executable(*weights, x)
    (engine,) = backend._engines.values()
    monkeypatch.setattr(engine, "_limits", dict.fromkeys(engine._limits, 2.0))
    os.kill(backend.report(CPU)["process"], signal.SIGSTOP)
    torch.testing.assert_close(executable(*weights, x)[0], before, **CLOSE)
    assert engine.starts == 2


ENDING = """
import sys, types

package = sys.modules["compiled_graphs"] = types.ModuleType("compiled_graphs")
package.__path__ = [sys.argv[1]]
import torch
from compiled_graphs.compiler.backends.oneflow import backend
print(backend.report("cpu")["process"], flush=True)
sys.stdin.read()
"""


@pytest.mark.oneflow
@in_worker
def test_process_ends_with_its_parent():
    host = subprocess.Popen(
        [sys.executable, "-c", ENDING, str(PACKAGE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    process = int(host.stdout.readline())
    host.kill()
    host.wait()
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and is_alive(process):
        time.sleep(0.1)
    assert not is_alive(process)


def is_alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(OddBlock() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def inputs(self, sizes):
        return (torch.randn(sizes.batch, sizes.tokens, WIDTH),)


class OddBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.cumsum(self.linear(x), dim=1)


def test_missing_operator_is_named_and_stays_eager(monkeypatch):
    monkeypatch.setattr(type(BACKEND), "available", lambda backend, device: None)  # whether OneFlow is here or not
    network = Odd()
    compiled = compile_network(network, Registry(), BACKEND)
    (x,) = network.inputs(sizes())
    assert network(x).shape == x.shape
    reason = Reason(ReasonCode.ONEFLOW_OPERATOR, "aten.cumsum.default")
    assert compiled.summary().reasons == (reason,)
    assert dict(compiled.counters.eager_calls) == {reason: 2}


@pytest.mark.parametrize(
    ("dtype", "reason"), [(torch.bfloat16, "bfloat16, which OneFlow does not"), (torch.float16, "float16 on a CPU")]
)
def test_missing_dtype_is_named(dtype, reason):
    network = transformer().to(dtype)
    exported = export(network, lambda network, at: network(*(t.to(dtype) for t in network.inputs(at))))
    with pytest.raises(Unsupported, match=reason):
        BACKEND.compile(exported)


@pytest.mark.oneflow
def test_environment_names_oneflow_and_device():
    fields = BACKEND.environment(CPU)
    assert (fields["backend"], fields["oneflow"], fields["device"]) == ("oneflow", "0.9.0", "cpu")


def test_missing_oneflow_says_how_to_get_it(monkeypatch):
    monkeypatch.delenv(backend.PYTHON, raising=False)
    monkeypatch.setattr(backend, "_is_here", lambda: False)
    chosen, reason = choose_backend("oneflow", CPU)
    assert chosen is None
    assert reason.startswith("OneFlow is not installed in this Python (3.")
    assert "scripts/oneflow.sh" in reason
    assert backend.PYTHON in reason


@pytest.mark.parametrize(
    ("python", "says"),
    [("/no/such/python", "No such file or directory"), (sys.executable, "No module named 'oneflow'")],
)
def test_python_without_oneflow_is_named(monkeypatch, python, says):
    if python == sys.executable and backend.importlib.util.find_spec("oneflow"):
        pytest.skip("this Python has it")
    monkeypatch.setenv(backend.PYTHON, python)
    reason = BACKEND.available(CPU)
    assert python in reason
    assert says in reason


def test_unsupported_gpu_is_named(monkeypatch):
    monkeypatch.setenv(backend.PYTHON, "python3.10")
    monkeypatch.setattr(backend, "probe", lambda python: backend.Found("0.9.0", (9, 0)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    reason = BACKEND.available(torch.device("cuda"))
    assert reason == "OneFlow 0.9.0 has no code for NVIDIA H100 (compute capability 9.0): choose inductor."
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert BACKEND.available(torch.device("cuda")) is None


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the process is for Linux")
def test_process_imports_nothing_from_its_directory(tmp_path, monkeypatch):
    for name in sys.stdlib_module_names | {"numpy", "oneflow", "serve", "start", "instances"}:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write('{name} ')\n")
    monkeypatch.chdir(tmp_path)
    process = worker_process.WorkerProcess(sys.executable, CPU)
    with contextlib.suppress(worker_process.OneFlowError):  # without OneFlow the process ends
        process.report()
    process._end()
    assert process.starts > 0
    assert backend.probe.__wrapped__(sys.executable) != backend.Found(error="it does not answer")
    assert not (tmp_path / "imported").exists()


def test_onediff_is_described_and_never_imported(monkeypatch, tmp_path):
    assert backend.onediff_text() == "" or "onediff" in backend.onediff_text()
    (tmp_path / "onediff-1.2.0.dist-info").mkdir()
    (tmp_path / "onediff-1.2.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: onediff\nVersion: 1.2.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(backend.PYTHON, raising=False)
    monkeypatch.setattr(backend, "_missing", lambda device: "OneFlow is not there.")
    reason = BACKEND.available(CPU)
    assert reason.startswith("OneFlow is not there. onediff 1.2.0 is installed, but ")
    assert "oneflow.framework.args_tree" in reason
    assert "onediff" not in sys.modules


def test_importing_the_backends_imports_no_oneflow():
    code = ENDING.partition("print")[0] + "print([name for name in sys.modules if name.startswith('oneflow')])"
    environment = {k: v for k, v in os.environ.items() if k != backend.PYTHON}
    done = subprocess.run([sys.executable, "-c", code, str(PACKAGE)], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "[]", done.stderr
    assert BACKENDS["oneflow"].name == "oneflow"
