"""One graph on several devices. Elsewhere the cache is tested by what models get from it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from compiled_graphs.compiler.backends.eager.backend import EagerBackend
from compiled_graphs.compiler.common.counters import Counters
from compiled_graphs.compiler.common.host import Host
from compiled_graphs.compiler.compile_cache import graph_cache
from compiled_graphs.compiler.compile_cache.graph_cache import MAX_SIGNATURES, GraphCache, Requester
from compiled_graphs.compiler.storage.store import FolderStore
from networks import CPU, WIDTH, transformer, variants_of, weights_of

OTHER = torch.device("cpu", 0)
"""Another device than "cpu" to the cache, which computes alike."""


@pytest.fixture
def network():
    return transformer()


@pytest.fixture
def request_for(network):
    """Returns the request for a network's only graph on a device."""
    (request,) = variants_of(network)
    return lambda device: replace(request, device=device)


def by(backend=None):
    return Requester(backend or EagerBackend(), Host(), Counters())


@pytest.mark.parametrize("is_stored", [True, False])
def test_devices_share_a_graph_and_each_has_it_for_itself(is_stored, network, request_for, tmp_path):
    cache = GraphCache(FolderStore(tmp_path) if is_stored else None)
    one, source = cache.get_or_compile(request_for(CPU), by())
    assert source == "compiled"
    other, source = cache.get_or_compile(request_for(OTHER), by())
    assert source == "memory"
    assert one.graph.key == other.graph.key
    assert (one.graph.spec.device, other.graph.spec.device) == ("cpu", "cpu:0")
    x, weights = torch.randn(2, 9, WIDTH), weights_of(network.blocks[0])
    torch.testing.assert_close(one.graph(weights, [x])[0], other.graph(weights, [x])[0])
    one.verified.add(frozenset())
    assert not other.verified
    assert cache.get_or_compile(request_for(OTHER), by()) == (other, "memory")


def test_a_graph_that_is_wrong_on_one_device_stays_in_use_on_the_other(request_for):
    cache = GraphCache()
    one, other = (cache.get_or_compile(request_for(device), by())[0] for device in (CPU, OTHER))
    cache.evict(other)
    assert cache.get_or_compile(request_for(CPU), by())[0] is one
    assert cache.get_or_compile(request_for(OTHER), by())[0] is not other
    cache.forget({one.graph.key})
    assert not cache.sizes()


def test_another_process_loads_a_graph_for_another_device_than_it_was_made_on(request_for, tmp_path):
    GraphCache(FolderStore(tmp_path)).get_or_compile(request_for(CPU), by())
    entry, source = GraphCache(FolderStore(tmp_path)).get_or_compile(request_for(OTHER), by())
    assert source == "disk"
    assert entry.graph.spec.device == "cpu:0"


def test_a_graph_that_cannot_go_to_another_device_is_compiled_there(request_for):
    class Immovable(EagerBackend):
        def load(self, data, spec):
            raise ValueError("it stays where it is")

    cache, backend = GraphCache(), Immovable()
    for device in (CPU, OTHER):
        entry, source = cache.get_or_compile(request_for(device), by(backend))
        assert source == "compiled"
        assert entry.graph.spec.device == str(device)


def test_a_note_may_list_as_many_graphs_of_one_kind_of_call_as_a_video_needs():
    def requests(signatures, each):
        texts = [f"call {number}" for number in range(signatures) for _ in range(each)]
        return [SimpleNamespace(fingerprint="block", signature=SimpleNamespace(text=text)) for text in texts]

    assert len(graph_cache._within_bounds(requests(MAX_SIGNATURES, 16))) == 16 * MAX_SIGNATURES
    with pytest.raises(ValueError, match=f"more than {MAX_SIGNATURES} kinds of call"):
        graph_cache._within_bounds(requests(MAX_SIGNATURES + 1, 1))
