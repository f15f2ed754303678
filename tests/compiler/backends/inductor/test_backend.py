from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from compiled_graphs.compiler.backends.inductor import InductorBackend, backend
from compiled_graphs.compiler.common import torch_compat
from compiled_graphs.compiler.common.counters import Counters
from compiled_graphs.compiler.common.host import Host
from compiled_graphs.compiler.runtime.cuda_graph import capture_within
from compiled_graphs.compiler.runtime.running_call import RunningCall
from compiled_graphs.compiler.runtime.step_replay import MIN_STEPS, StepReplay
from gpu_graphs import compiled_on_gpu, on_gpu
from networks import CPU, WIDTH, transformer, weights_of
from recorders import repeat
from torch._inductor import cpp_builder, exc

BACKEND = InductorBackend()


def test_kernels_get_addresses_during_a_capture(monkeypatch):
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    seen = []
    monkeypatch.setattr(CachingAutotuner, "run", lambda kernel, *args, stream: seen.append((kernel, args, stream)))
    tensor, launch = torch.ones(3), lambda: CachingAutotuner.run("kernel", tensor, 3, None, stream=7)
    before = CachingAutotuner.run
    with backend.launching_by_address():
        launch()
        other = threading.Thread(target=launch)
        other.start()
        other.join()
    assert CachingAutotuner.run is before
    assert seen[0] == ("kernel", (tensor.data_ptr(), 3, None), 7)
    assert seen[1][1][0] is tensor


def test_nothing_is_captured_without_the_launcher(take_away):
    take_away(torch_compat.CachingAutotuner.path)
    network, counters = transformer().blocks[0], Counters()
    recordings = StepReplay(network, Repeating(), CPU, counters, capture_within(BACKEND.capture_context, repeat))
    x = torch.randn(2, 9, WIDTH)
    for _ in range(3):
        torch.testing.assert_close(recordings.serve(network, (x,), {}, RunningCall(None)), network(x))
    assert "CachingAutotuner" in recordings.reason.detail
    assert counters.captures == 0


class Repeating(Host):
    def capture_blocker(self, context, string_constants):
        return None

    def steps(self, context):
        return MIN_STEPS


@on_gpu
def test_replays_follow_inputs_and_weights():
    network = transformer().to("cuda")
    block, graph = network.blocks[0], compiled_on_gpu(network)
    device = block.gate.device
    recordings = StepReplay(block, Repeating(), device, Counters(), capture_within(BACKEND.capture_context))
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(2, 9, WIDTH, device=device)
            ours = recordings.serve(lambda x: graph(weights_of(block), [x])[0], (x,), {}, RunningCall(None))
            torch.testing.assert_close(ours, block(x), atol=1e-3, rtol=1e-3)
            block.gate.mul_(1.5)
    assert recordings.counters.replays == 2, recordings.reason


def test_warming_up_imports_what_the_first_load_needs():
    script = """
import sys, torch
from compiled_graphs.compiler.backends.inductor import InductorBackend
InductorBackend().warm_up()
before = set(sys.modules)
import torch._inductor.compile_fx, torch._inductor.select_algorithm, torch._inductor.async_compile
sys.exit(len(set(sys.modules) - before))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", script], env=environment, check=False).returncode == 0


def test_warming_up_does_not_begin_to_use_a_gpu():
    """A process that has begun cannot be forked, so each worker imported everything itself."""
    script = """
import os, torch
for name in ("_lazy_init", "current_device", "get_device_properties", "get_device_capability", "device_count"):
    setattr(torch.cuda, name, lambda *a, **k: os._exit(3))
torch.version.cuda = "13.0"
from compiled_graphs.compiler.backends.inductor import InductorBackend
InductorBackend().warm_up()
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", script], env=environment, check=False).returncode == 0


def test_the_warm_up_gives_way_before_each_import(monkeypatch):
    order = []
    names = [Mock(get=partial(order.append, name)) for name in "ab"]
    monkeypatch.setattr(backend, "INDUCTOR_WARM_UP", names)
    BACKEND.warm_up(lambda: order.append("waited"))
    assert order == ["waited", "a", "waited", "b"]


def test_torch_is_hashed_once_although_two_threads_ask(monkeypatch):
    asked = []
    both = threading.Barrier(2, timeout=30)

    @cache
    def torch_key():
        asked.append(threading.current_thread())
        time.sleep(0.05)
        return b"key"

    def version():
        both.wait()
        return backend._inductor_version()

    monkeypatch.setattr(backend, "torch_key", SimpleNamespace(get=lambda: torch_key))
    with ThreadPoolExecutor(2) as pool:
        versions = [made.result() for made in [pool.submit(version) for _ in range(2)]]
    assert versions[0] == versions[1]
    assert len(asked) == 1


@pytest.mark.parametrize("name", ["meta", "mps", "xpu"])
def test_an_unsupported_device_names_those_supported(name):
    assert BACKEND.available(torch.device(name)) == f"Inductor graphs run on cuda and cpu devices, not on {name}."


@pytest.mark.parametrize("error", [exc.InvalidCxxCompiler(), OSError("no g++"), RuntimeError("no cl")])
def test_a_missing_compiler_names_the_remedy(monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", fail)
    reason = BACKEND.available(CPU)
    assert "C++ compiler" in reason
    assert "CXX" in reason


def test_a_compiler_that_does_not_exist_counts_as_none():
    with torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        assert "C++ compiler" in BACKEND.available(CPU)
    assert BACKEND.available(CPU) is None


def test_missing_python_headers_name_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda: "g++")
    monkeypatch.setattr(backend.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert "python3-dev" in BACKEND.available(CPU)


def test_an_unwritable_folder_names_the_remedy(monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda: "g++")
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    monkeypatch.setattr(backend.Path, "is_file", lambda self: True)
    reason = BACKEND.available(CPU)
    assert "No space left on device" in reason
    assert "TORCHINDUCTOR_CACHE_DIR" in reason


def test_an_old_torch_names_the_version_needed(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.7.1+cu128")
    assert BACKEND.available(CPU) == "Inductor graphs need torch 2.8 or newer; this is 2.7.1+cu128: update torch."


def test_the_environment_is_stable_and_names_torch():
    environment = BACKEND.environment(CPU)
    assert environment == InductorBackend().environment(CPU)
    assert environment["torch"] == torch.__version__
    assert environment["backend"] == "inductor"
    assert environment["device"].startswith("cpu")
    assert all(isinstance(value, str) for value in environment.values())


def test_torchs_commit_replaces_a_missing_digest(take_away):
    before = BACKEND.environment(CPU)
    take_away(torch_compat.torch_key.path)
    assert BACKEND.environment(CPU) == before | {"inductor": torch.version.git_version}


@pytest.mark.parametrize("name", torch_compat.INDUCTOR_WARM_UP)
def test_warming_up_skips_what_torch_lacks(take_away, name):
    take_away(name.path)
    BACKEND.warm_up()


@pytest.mark.parametrize(
    "name", [torch_compat.get_cpp_compiler, torch_compat.InvalidCxxCompiler, torch_compat.cache_dir]
)
def test_checks_that_torch_lacks_count_as_passed(monkeypatch, take_away, name):
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda: "g++")
    monkeypatch.setattr(backend.Path, "is_file", lambda self: True)
    take_away(name.path)
    assert BACKEND.available(CPU) is None
