"""Graphs that Inductor compiled for a GPU, for the tests that need one."""

from __future__ import annotations

import pytest
import torch
from compiled_graphs.compiler.backends.inductor import InductorBackend
from compiled_graphs.compiler.common.host import Host
from compiled_graphs.compiler.compile_cache.graph_cache import GraphCache
from compiled_graphs.compiler.identity.regions import find_regions
from compiled_graphs.compiler.runtime.compiled_model import CompiledModel
from compiled_graphs.compiler.runtime.region_kinds import Target

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def compiled_on_gpu(network):
    """Return the only graph of a network that was compiled for the GPU."""
    device = next(network.parameters()).device
    compiled = CompiledModel(network, find_regions(network), Target(device, InductorBackend(), Host()), GraphCache())
    compiled.prepare(lambda weightless, at: weightless(*(x.to(device) for x in network.inputs(at))))
    (graph,) = compiled.graphs()
    return graph
