from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from types import SimpleNamespace

import pytest
import sympy
import torch
from compiled_graphs.compiler.backends import inductor
from compiled_graphs.compiler.backends.inductor import InductorBackend
from compiled_graphs.compiler.counters import Counters
from compiled_graphs.compiler.graph_file import StoredGraph, write_graphs
from compiled_graphs.compiler.host import Host
from compiled_graphs.compiler.model import CompiledModel
from compiled_graphs.compiler.recordings import FEWEST_STEPS, Recordings
from compiled_graphs.compiler.region import find_regions
from compiled_graphs.compiler.registry import Registry
from compiled_graphs.compiler.store import FolderStore
from compiled_graphs.compiler.trust import Trust
from networks import (
    CPU,
    WIDTH,
    ConvolutionNetwork,
    Stack,
    StreamNetwork,
    TransformerBlock,
    compile_network,
    export,
    sizes,
    transformer,
    weights_of,
)
from torch import nn
from torch._inductor import cpp_builder, exc
from torch._inductor.dependencies import MemoryDep, StarDep

BACKEND = InductorBackend()
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def settings():
    """Everything that a compile could leave changed for other users of torch in this process."""
    return torch._inductor.config.get_config_copy(), torch._dynamo.config.get_config_copy()


@pytest.mark.usefixtures("cpp_compiler")
def test_an_artifact_computes_the_region_at_every_size_before_and_after_saving_and_leaves_torchs_settings_alone():
    network = transformer()
    exported = export(network)
    before = settings()
    compiled = BACKEND.compile(exported)
    loaded = BACKEND.load(compiled.to_bytes(), exported.spec)
    assert settings() == before
    odd = torch.randn(7 * WIDTH).as_strided((1, 7, WIDTH), (5, WIDTH, 1))
    for x in (*(network.inputs(sizes(batch=b, tokens=n))[0] for b, n in ((2, 7), (1, 33), (4, 1), (1, 1))), odd):
        for block in network.blocks:
            for executable in (compiled, loaded):
                (ours,) = executable(*weights_of(block), x)
                torch.testing.assert_close(ours, block(x), atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("cpp_compiler")
def test_regions_of_equal_code_and_other_widths_get_their_own_artifacts():
    for channels in (8, 12):
        network = ConvolutionNetwork(channels)
        executable = BACKEND.compile(export(network))
        for at in (sizes(batch=1, height=5, width=9), sizes(batch=3)):
            x, emb = network.inputs(at)
            (ours,) = executable(*weights_of(network.blocks[1]), network.stem(x), emb)
            torch.testing.assert_close(ours, network.blocks[1](network.stem(x), emb), atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("cpp_compiler")
def test_a_model_that_writes_to_its_inputs_runs_compiled_and_after_a_restart_from_disk(tmp_path):
    network = StreamNetwork()
    cases = [
        (torch.randn(batch, WIDTH, height).transpose(1, 2), torch.randn(batch, 5, WIDTH))
        for batch, height in ((2, 7), (2, 7), (1, 9), (1, 9))
    ]
    expected = []
    for image, text in cases:
        written = image.clone()
        expected.append((network(written, text), written))
    for compiles in (1, 0):
        compiled = compile_network(network, Registry(FolderStore(tmp_path)), BACKEND)
        assert (compiled.counters.compiles, compiled.counters.from_disk) == (compiles, 1 - compiles)
        for (image, text), (results, written) in zip(cases, expected, strict=True):
            ours = image.clone(memory_format=torch.preserve_format)
            torch.testing.assert_close(network(ours, text), results, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(ours, written, atol=1e-4, rtol=1e-4)
        assert not compiled.counters.eager_calls


def test_kernels_launched_while_a_call_is_recorded_are_given_addresses(monkeypatch):
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    seen = []
    monkeypatch.setattr(CachingAutotuner, "run", lambda kernel, *args, stream: seen.append((kernel, args, stream)))
    tensor, launch = torch.ones(3), lambda: CachingAutotuner.run("kernel", tensor, 3, None, stream=7)
    before = CachingAutotuner.run
    with inductor.launching_by_address():
        launch()
        other = threading.Thread(target=launch)
        other.start()
        other.join()
    assert CachingAutotuner.run is before
    assert seen[0] == ("kernel", (tensor.data_ptr(), 3, None), 7)
    assert seen[1][1][0] is tensor


def compiled_on_gpu(network):
    """Return the only graph of a network that was compiled for the GPU."""
    device = next(network.parameters()).device
    compiled = CompiledModel(network, find_regions(network), device, BACKEND, Registry(), Host())
    compiled.prepare(lambda twin, at: twin(*(x.to(device) for x in network.inputs(at))))
    (graph,) = compiled.graphs()
    return graph


class Repeating(Host):
    def unrepeatable(self, context, literals):
        return None

    def steps(self, context):
        return FEWEST_STEPS


@on_gpu
def test_its_graphs_are_recorded_by_any_allocator_and_follow_inputs_and_weights():
    network = transformer().to("cuda")
    block, graph = network.blocks[0], compiled_on_gpu(network)
    device = block.gate.device
    recordings = Recordings(block, Repeating(), Counters(), device, within=BACKEND.recording)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(2, 9, WIDTH, device=device)
            ours = recordings.serve(lambda x: graph(weights_of(block), [x])[0], (x,), {})
            torch.testing.assert_close(ours, block(x), atol=1e-3, rtol=1e-3)
            block.gate.mul_(1.5)
    assert recordings._counters.replays == 2, recordings.reason


class WideStack(Stack):
    def inputs(self, at):
        return (torch.randn(at.batch, at.tokens, 2048),)


@on_gpu
def test_long_rows_are_normalised_in_one_pass():
    data = compiled_on_gpu(WideStack(TransformerBlock, width=2048, heads=32).to("cuda")).executable.to_bytes()
    assert b"triton_per_fused" in data
    assert b"triton_red_fused" not in data


@on_gpu
def test_sizes_whose_indices_do_not_fit_32_bits_are_refused():
    spec = compiled_on_gpu(transformer().to("cuda")).spec
    assert spec.fits([(1 << 10, 1 << 12, WIDTH)])
    assert not spec.fits([(1 << 15, 1 << 12, WIDTH)])


def test_what_we_prefer_holds_only_while_a_graph_is_compiled():
    from torch._inductor import config
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    before = config.triton.autotune_pointwise
    with inductor._preferences():
        assert type(V.choices) is not InductorChoices
        config.triton.autotune_pointwise = not before
    assert type(V.choices) is InductorChoices
    assert config.triton.autotune_pointwise is before


@pytest.mark.parametrize(
    ("values", "hint", "in_registers"),
    [
        (4096, "INNER", True),
        (4097, "INNER", False),
        (256, "DEFAULT", True),
        (257, "DEFAULT", False),
        (64, "OUTER", False),
        (sympy.Symbol("tokens"), "INNER", False),
    ],
)
def test_rows_and_heads_of_known_length_are_reduced_in_registers(monkeypatch, values, hint, in_registers):
    from torch._inductor.choices import InductorChoices
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    monkeypatch.setattr(InductorChoices, "should_use_persistent_reduction", staticmethod(lambda *_: False))
    row = SimpleNamespace(
        reduction_numel=sympy.sympify(values), get_reduction_hint=lambda: getattr(ReductionHint, hint)
    )
    with inductor._preferences():
        assert V.choices.should_use_persistent_reduction(row, False) == in_registers


def kernel_that_reads(*reads):
    node = SimpleNamespace(read_writes=SimpleNamespace(reads=reads))
    return SimpleNamespace(scheduler_nodes=lambda: [node])


def test_a_kernel_gathers_if_values_that_follow_each_other_lie_apart_in_something_it_reads():
    row, column = places = sympy.symbols("row column", integer=True)
    neighbours, one_a_row, pairs = (
        MemoryDep("x", index, places, (sympy.Integer(9), sympy.Integer(64)))
        for index in (64 * row + column, row, 128 * row + 2 * column)
    )
    assert not inductor._gathers(kernel_that_reads(neighbours, one_a_row, StarDep("x")))
    assert inductor._gathers(kernel_that_reads(neighbours, pairs))


class TurningBlock(nn.Module):
    """Turns pairs of values, as rotary embeddings do."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.turns = nn.Parameter(torch.randn(width // 2, 2, 2))

    def forward(self, x):
        pairs = self.linear(torch.sigmoid(x)).unflatten(-1, (-1, 1, 2))
        return (self.turns[..., 0] * pairs[..., 0] + self.turns[..., 1] * pairs[..., 1]).flatten(-2)


@on_gpu
def test_only_kernels_that_gather_are_timed_in_two_forms():
    data = compiled_on_gpu(Stack(TurningBlock).to("cuda")).executable.to_bytes()
    kernels = re.findall(rb"'kernel_name': '(\w+)'.*?'autotune_pointwise': (\w+)", data)
    assert {is_timed for name, is_timed in kernels if b"sigmoid" in name} == {b"False"}
    assert {is_timed for name, is_timed in kernels if b"select" in name} == {b"True"}


LOADING = """
import json, sys
import torch
from pathlib import Path
from compiled_graphs.compiler.counters import totals
from compiled_graphs.compiler.graph_file import read_graphs
from compiled_graphs.compiler.registry import Registry
from compiled_graphs.compiler.trust import Trust
from compiled_graphs.compiler.backends.inductor import InductorBackend
from networks import install, sizes, transformer
from torch._dynamo.utils import counters

torch.set_grad_enabled(False)
torch.manual_seed(0)
network = transformer()
x = network.inputs(sizes())[0]
expected = network(x)
compiled = install(network, Registry(), InductorBackend(), verify=False)
refused = compiled.load(read_graphs(Path(sys.argv[1]).read_bytes(), Trust()))
error = (network(x) - expected).abs().max().item()
print(json.dumps([refused, error, totals.compiles, totals.from_file, dict(totals.eager_calls), counters]))
"""


@pytest.mark.usefixtures("cpp_compiler")
@pytest.mark.skipif(os.name == "nt", reason="the compiler is watched through a shell script")
def test_a_file_loads_in_a_new_process_with_empty_caches_and_without_any_compiler(tmp_path):
    compiled = compile_network(transformer(), Registry(), BACKEND)
    file = tmp_path / "graphs"
    file.write_bytes(write_graphs([StoredGraph.of(graph) for graph in compiled.graphs()], Trust()))
    compiler, used = tmp_path / "c++", tmp_path / "used"
    compiler.write_text(f'#!/bin/sh\necho "$@" >>{used}\nexit 1\n')
    compiler.chmod(0o755)
    environment = os.environ | {
        "CXX": str(compiler),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", LOADING, str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    refused, error, compiles, from_file, eager_calls, torch_counted = json.loads(done.stdout.splitlines()[-1])
    assert (refused, compiles, from_file, eager_calls) == ([], 0, 1, {})
    assert error < 1e-4
    assert not used.exists() or set(used.read_text().split()) == {"--version"}  # torch asks that when imported
    assert not [name for group in torch_counted.values() for name in group], "torch traced or compiled"
    assert not list((tmp_path / "inductor").rglob("*.so"))


def test_warming_up_leaves_nothing_to_import_for_the_first_load():
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


@pytest.mark.usefixtures("cpp_compiler")
def test_machine_code_for_another_processor_is_refused_by_name(monkeypatch):
    exported = export(transformer())
    data = BACKEND.compile(exported).to_bytes()
    monkeypatch.setattr(inductor, "_cpu_features", lambda: frozenset())
    with pytest.raises(inductor.OtherProcessor, match="which this one lacks"):
        BACKEND.load(data, exported.spec)


@pytest.mark.parametrize("name", ["meta", "mps", "xpu"])
def test_another_kind_of_device_is_answered_with_those_there_are(name):
    assert BACKEND.available(torch.device(name)) == f"Inductor graphs run on cuda and cpu devices, not on {name}."


@pytest.mark.parametrize("error", [exc.InvalidCxxCompiler(), OSError("no g++"), RuntimeError("no cl")])
def test_without_a_compiler_one_sentence_says_how_to_get_one(monkeypatch, error):
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


def test_without_python_headers_one_sentence_says_how_to_get_them(monkeypatch, tmp_path):
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda: "g++")
    monkeypatch.setattr(inductor.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert "python3-dev" in BACKEND.available(CPU)


def test_a_folder_that_cannot_be_written_is_said_with_the_remedy(monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda: "g++")
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    monkeypatch.setattr(inductor.Path, "is_file", lambda self: True)
    reason = BACKEND.available(CPU)
    assert "No space left on device" in reason
    assert "TORCHINDUCTOR_CACHE_DIR" in reason


def test_an_old_torch_is_said_with_the_version_that_is_needed(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.7.1+cu128")
    assert BACKEND.available(CPU) == "Inductor graphs need torch 2.8 or newer; this is 2.7.1+cu128: update torch."


def test_the_environment_is_the_same_each_time_and_names_torch_and_the_instruction_set():
    environment = BACKEND.environment(CPU)
    assert environment == InductorBackend().environment(CPU)
    assert environment["torch"] == torch.__version__
    assert environment["backend"] == "inductor"
    assert environment["device"].startswith("cpu")
    assert all(isinstance(value, str) for value in environment.values())
