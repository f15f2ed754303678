"""Artifacts that were compiled on one GPU, for another one; without two GPUs, doubles of their parts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from artifact_doubles import KERNEL, SOURCE, Bundle, Graph, Kernel, KernelFiles, Launcher, artifact, graph_in
from compiled_graphs.compiler.backends.inductor import InductorBackend, other_gpu
from compiled_graphs.compiler.backends.inductor.other_gpu import CannotMove, can_move, moved, moved_source
from compiled_graphs.compiler.common import torch_compat
from compiled_graphs.compiler.storage.graph_file import StoredGraph
from gpu_graphs import compiled_on_gpu
from networks import WIDTH, transformer, weights_of

pytestmark = pytest.mark.skipif(not can_move(), reason="this torch makes artifacts for one GPU only")


def key(kernel):
    return torch_compat.CompiledTritonKernels.get().key(kernel)


def test_generated_code_has_the_other_gpus_number_in_all_places():
    there = moved_source(SOURCE, 3)
    assert "get_raw_stream(3)" in there
    assert "set_device(3)" in there
    assert "_DeviceGuard(3)" in there
    assert "device(type='cuda', index=3)" in there
    assert "DeviceProperties(type='cuda', index=3" in there
    assert moved_source(there, 0) == SOURCE


@pytest.mark.parametrize(
    "line", ["x.to(torch.device('cuda', index=0))", "run(device_idx=0)", "tensor.to(CUDA, 'x-cuda:0')"]
)
def test_code_with_a_number_in_a_place_that_is_not_known_is_not_moved(line):
    with pytest.raises(CannotMove, match="place that is not known"):
        moved_source(f"{SOURCE}\n    {line}", 1)


def test_code_for_several_gpus_is_not_moved():
    with pytest.raises(CannotMove, match="several"):
        moved_source(SOURCE.replace("get_raw_stream(0)", "get_raw_stream(1)"), 1)


def test_an_artifact_is_moved_with_its_kernels():
    bundle = Bundle([KernelFiles(0)], [Launcher(key(KERNEL), Kernel())])
    graph = graph_in(moved(artifact(Graph(_triton_bundle=bundle)), 1))
    assert graph.source_code == moved_source(SOURCE, 1)
    assert graph.device_idxs == {1}
    assert graph.cache_key != "cabc"  # or the file of the other GPU's code would be loaded
    (files,), (launcher,) = graph._triton_bundle.kernel_artifacts, graph._triton_bundle.static_autotuners
    assert files.device == 1
    assert launcher.cache_key == key(moved_source(KERNEL, 1))
    kernel = launcher.kernel
    assert (kernel.triton_meta["device"], kernel.device_props.index) == (1, 1)
    assert kernel.compile_results[0].compile_meta["device"] == 1


@pytest.mark.parametrize("code", [SOURCE, "def call(args):\n    return (args[0],)"])
def test_an_artifact_of_this_gpu_stays_as_it_is(code):
    data = artifact(Graph(source_code=code))
    assert moved(data, 0) is data


def test_an_artifact_with_tensors_is_not_moved():
    graph = Graph(constants={"table": SimpleNamespace(is_cuda=True)})
    with pytest.raises(CannotMove, match="tensors"):
        moved(artifact(graph), 1)


def test_what_is_no_artifact_of_a_known_form_is_not_moved():
    writer = torch_compat.BytesWriter.get()()
    writer.write_bytes(b"CacheCompiledArtifact")
    writer.write_bytes(b"version")
    with pytest.raises(CannotMove, match="format"):
        moved(writer.to_bytes(), 1)
    with pytest.raises(CannotMove, match="no graph"):
        moved(artifact(None), 1)


@pytest.mark.parametrize("name", ["BytesReader", "CompiledTritonKernels"])
def test_where_nothing_can_be_moved_each_gpu_has_graphs_of_its_own(name, take_away, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(__import__("sys").modules, "triton", SimpleNamespace(__version__="3"))
    places = [torch.device("cuda", index) for index in (0, 1)]
    assert len({str(InductorBackend().environment(place)) for place in places}) == 1
    take_away(getattr(torch_compat, name).path)
    assert len({str(InductorBackend().environment(place)) for place in places}) == 2
    with pytest.raises(CannotMove, match="one GPU only"):
        other_gpu.moved(b"for another one", 1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no second GPU")
def test_a_graph_of_one_gpu_is_right_on_another():
    graph, there = compiled_on_gpu(transformer().to("cuda:0")), torch.device("cuda", 1)
    loaded = StoredGraph.of(graph).load(InductorBackend(), there)
    network = transformer().to(there)
    x = torch.randn(2, 9, WIDTH, device=there)
    (result, *_) = loaded(weights_of(network.blocks[0]), [x])
    assert result.device == there
    torch.testing.assert_close(result, network.blocks[0](x), atol=1e-3, rtol=1e-3)
