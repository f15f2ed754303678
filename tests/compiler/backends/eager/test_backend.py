from __future__ import annotations

import pytest
import torch
from compiled_graphs.compiler.backends import BACKENDS, NAMES, choose_backend
from compiled_graphs.compiler.backends.eager.backend import EagerBackend
from networks import CPU, ConvolutionNetwork, StreamNetwork, export, sizes, transformer, weights_of

BACKEND = EagerBackend()


@pytest.mark.parametrize("network", [ConvolutionNetwork, transformer])
def test_executable_matches_eager_after_saving_too(network):
    network = network()
    exported = export(network)
    block = network.blocks[1]
    ran = BACKEND.compile(exported)
    loaded = BACKEND.load(ran.to_bytes(), exported.spec)
    for at in (sizes(batch=1), sizes(batch=4, height=5, tokens=1)):
        inputs = network.inputs(at)
        if network.__class__ is ConvolutionNetwork:
            inputs = (network.stem(inputs[0]), inputs[1])
        for executable in (ran, loaded):
            (ours,) = executable(*weights_of(block), *inputs)
            torch.testing.assert_close(ours, block(*inputs))


def test_none_results_are_dropped_and_mutations_kept():
    network = StreamNetwork()
    exported = export(network)
    loaded = BACKEND.load(BACKEND.compile(exported).to_bytes(), exported.spec)
    block, (image, text) = network.blocks[0], network.inputs(sizes())
    eager = image.clone()
    outputs = loaded(*weights_of(block), image, text)
    block(eager, text)
    assert len(outputs) == 2
    torch.testing.assert_close(image, eager)


def test_eager_is_available_on_every_device():
    assert [BACKEND.available(torch.device(name)) for name in ("cpu", "cuda", "meta")] == [None, None, None]


def test_environment_names_torch_and_the_device_type():
    assert BACKEND.environment(CPU) == {"backend": "eager", "torch": torch.__version__, "device": "cpu"}
    assert BACKEND.environment(torch.device("cuda", 1)) == BACKEND.environment(torch.device("cuda", 0))


def test_garbage_does_not_load():
    with pytest.raises(Exception, match=r".+"):
        BACKEND.load(b"garbage", export(transformer()).spec)


def test_backends_are_chosen_by_name():
    assert choose_backend("eager", CPU) == (BACKENDS["eager"], "")


def test_auto_is_inductor(monkeypatch):
    monkeypatch.setattr(type(BACKENDS["inductor"]), "available", lambda self, device: None)
    assert choose_backend("auto", CPU) == (BACKENDS["inductor"], "")


def test_an_unknown_backend_names_those_there_are():
    chosen, reason = choose_backend("onnx", CPU)
    assert chosen is None
    assert all(name in reason for name in ["onnx", *NAMES])


def test_a_backend_that_is_not_available_says_why(monkeypatch):
    monkeypatch.setattr(type(BACKENDS["inductor"]), "available", lambda self, device: "Install a compiler.")
    assert choose_backend("auto", CPU) == (None, "Install a compiler.")


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_is_listed_under_its_own_name(name):
    assert BACKENDS[name].name == name
