from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import pytest
import torch
from compiled_graphs.compiler.backends.inductor import AotiPackage, Artifact, InductorBackend, artifacts
from compiled_graphs.compiler.common import torch_compat
from compiled_graphs.compiler.common.torch_compat import Need
from compiled_graphs.compiler.compile_cache.graph_cache import GraphCache
from compiled_graphs.compiler.registry.registry import Registry
from compiled_graphs.compiler.storage.graph_file import StoredGraph, write_graphs
from compiled_graphs.compiler.storage.store import FolderStore
from compiled_graphs.compiler.storage.trust import Trust
from gpu_graphs import compiled_on_gpu, on_gpu
from networks import WIDTH, ConvolutionNetwork, StreamNetwork, compile_network, export, sizes, transformer, weights_of

BACKEND = InductorBackend()


def settings():
    """Return all settings that a compile could change for other users of torch in this process."""
    return torch._inductor.config.get_config_copy(), torch._dynamo.config.get_config_copy()


@pytest.mark.usefixtures("cpp_compiler")
def test_artifacts_match_eager_before_and_after_saving():
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
def test_other_widths_get_their_own_artifacts():
    for channels in (8, 12):
        network = ConvolutionNetwork(channels)
        executable = BACKEND.compile(export(network))
        for at in (sizes(batch=1, height=5, width=9), sizes(batch=3)):
            x, emb = network.inputs(at)
            (ours,) = executable(*weights_of(network.blocks[1]), network.stem(x), emb)
            torch.testing.assert_close(ours, network.blocks[1](network.stem(x), emb), atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("cpp_compiler")
def test_a_model_that_writes_to_inputs_loads_from_disk(tmp_path):
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
        compiled = compile_network(network, Registry(GraphCache(FolderStore(tmp_path))), BACKEND)
        assert (compiled.counters.compiles, compiled.counters.from_disk) == (compiles, 1 - compiles)
        for (image, text), (results, written) in zip(cases, expected, strict=True):
            ours = image.clone(memory_format=torch.preserve_format)
            torch.testing.assert_close(network(ours, text), results, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(ours, written, atol=1e-4, rtol=1e-4)
        assert not compiled.counters.eager_calls


@on_gpu
def test_sizes_beyond_32_bit_indices_are_refused():
    spec = compiled_on_gpu(transformer().to("cuda")).spec
    assert spec.fits([(1 << 10, 1 << 12, WIDTH)])
    assert not spec.fits([(1 << 15, 1 << 12, WIDTH)])


LOADING = """
import json, sys
import torch
from pathlib import Path
from compiled_graphs.compiler.common.counters import totals
from compiled_graphs.compiler.storage.graph_file import read_graphs
from compiled_graphs.compiler.registry.registry import Registry
from compiled_graphs.compiler.common.torch_compat import Need
from compiled_graphs.compiler.storage.trust import Trust
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
print(json.dumps([refused, error, totals.compiles, totals.from_file, len(totals.eager_calls), counters]))
"""


@pytest.mark.usefixtures("cpp_compiler")
@pytest.mark.skipif(os.name == "nt", reason="the compiler is watched through a shell script")
def test_a_file_loads_without_caches_or_a_compiler(tmp_path):
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
    assert (refused, compiles, from_file, eager_calls) == ([], 0, 1, 0)
    assert error < 1e-4
    assert not used.exists() or set(used.read_text().split()) == {"--version"}  # torch runs this command on import
    assert not [name for group in torch_counted.values() for name in group], "torch traced or compiled"
    assert not list((tmp_path / "inductor").rglob("*.so"))


@pytest.mark.usefixtures("cpp_compiler")
def test_code_for_another_processor_is_refused(monkeypatch):
    exported = export(transformer())
    data = BACKEND.compile(exported).to_bytes()
    monkeypatch.setattr(artifacts, "_cpu_features", lambda: frozenset())
    with pytest.raises(artifacts.OtherProcessor, match="which this one lacks"):
        BACKEND.load(data, exported.spec)


@pytest.mark.usefixtures("cpp_compiler")
@pytest.mark.parametrize("compiler", [AotiPackage, Artifact])
def test_a_network_compiles_without_optional_names(monkeypatch, tmp_path, take_away, compiler):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    needed = {name.path for name in (*torch_compat.FOR_CPUS, *torch_compat.FOR_GPUS)}
    take_away(*[path for path, need in torch_compat.NAMES.items() if need is not Need.ALL and path not in needed])
    network = transformer()
    compiled = compiler.compile(export(network))
    (x,) = network.inputs(sizes(batch=2, tokens=7))
    (ours,) = compiled(*weights_of(network.blocks[0]), x)
    torch.testing.assert_close(ours, network.blocks[0](x), atol=1e-4, rtol=1e-4)


def test_loading_an_artifact_starts_no_processes_that_compile(monkeypatch):
    threads = []
    loader = SimpleNamespace(load=lambda **_how: threads.append(torch._inductor.config.compile_threads))
    monkeypatch.setattr(artifacts, "CompiledArtifact", SimpleNamespace(get=lambda: loader))
    with zipfile.ZipFile(data := io.BytesIO(), "w") as archive:
        archive.writestr("artifact", b"kernels")
    with torch._inductor.config.patch(compile_threads=4):  # monkeypatch would leave the setting without a default
        before = settings()
        Artifact.load(data.getvalue(), torch.device("cuda"))
        assert settings() == before
    assert threads == [1]
