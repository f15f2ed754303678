"""ComfyUI 0.34 on records what a step allocates, in scopes that networks open: none is open in a call of ours."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from compiled_graphs.compiler.backends import BACKENDS
from compiled_graphs.compiler.compile_cache.graph_cache import GraphCache
from compiled_graphs.compiler.hosts.comfy import comfy_compat
from compiled_graphs.compiler.hosts.comfy.rules.host import HOST
from compiled_graphs.compiler.identity.regions import find_regions
from compiled_graphs.compiler.runtime.compiled_model import CompiledModel
from compiled_graphs.compiler.runtime.network_wrapper import NetworkWrapper
from compiled_graphs.compiler.runtime.region_kinds import Target
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(x)


class Network(nn.Module):
    """Opens a scope in its forward, as networks of 0.34 do: without a way back if something fails."""

    def __init__(self, options):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.options = [options]
        self.fails = False

    def forward(self, x):
        self.options[0].scopes.append(not self.options[0].disable_comfy_compiler)
        if self.fails:
            raise torch.cuda.OutOfMemoryError
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def options(monkeypatch):
    made = SimpleNamespace(disable_comfy_compiler=False, scopes=[])
    find = comfy_compat.find
    monkeypatch.setattr(comfy_compat, "find", lambda name: made if name == "comfy.cli_args.args" else find(name))
    return made


@pytest.fixture
def network(options):
    made = Network(options)
    target = Target(torch.device("cpu"), BACKENDS["eager"], HOST)
    compiled = CompiledModel(made, find_regions(made), target, GraphCache())
    wrapper = NetworkWrapper(made, "forward", None, compiled)
    wrapper.install_while_running(compiled.forwards())
    made.forward = wrapper
    return made


def test_no_scope_opens_in_a_call(network, options):
    with torch.no_grad():
        network(torch.zeros(2, 8))
    assert options.scopes == [False]
    assert options.disable_comfy_compiler is False


def test_no_scope_opens_in_a_call_ahead(network, options):
    disabled = []  # what the network itself notes is put back after a call ahead

    def call(weightless, sizes):
        disabled.append(options.disable_comfy_compiler)
        return weightless(torch.zeros(sizes.batch, 8))

    network.forward.compiled.prepare(call)
    assert disabled == [True, True]
    assert options.disable_comfy_compiler is False


def test_the_option_is_as_it_was_after_a_call_that_fails(network, options):
    network.fails = True
    with torch.no_grad(), pytest.raises(torch.cuda.OutOfMemoryError):
        network(torch.zeros(2, 8))
    assert options.disable_comfy_compiler is False


def test_calls_within_calls_and_on_other_threads_count(options):
    first, second = comfy_compat.without_allocation_scopes(), comfy_compat.without_allocation_scopes()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert options.disable_comfy_compiler is True
    second.__exit__(None, None, None)
    assert options.disable_comfy_compiler is False


def test_a_person_who_disabled_the_compiler_keeps_that(options):
    options.disable_comfy_compiler = True
    with comfy_compat.without_allocation_scopes():
        pass
    assert options.disable_comfy_compiler is True


def test_cores_without_scopes_are_left_alone(options):
    del options.disable_comfy_compiler
    with comfy_compat.without_allocation_scopes():
        assert not hasattr(options, "disable_comfy_compiler")
