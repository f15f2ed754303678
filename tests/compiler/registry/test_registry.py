from __future__ import annotations

import gc
import json
import threading
import time
import weakref
from dataclasses import replace

import pytest
import torch
from compiled_graphs.compiler.backends.eager.backend import EagerBackend
from compiled_graphs.compiler.common.counters import Counters
from compiled_graphs.compiler.common.host import Host
from compiled_graphs.compiler.common.reason import Reason, ReasonCode
from compiled_graphs.compiler.compile_cache import graph_cache as graph_cache_module
from compiled_graphs.compiler.compile_cache.graph_cache import GraphCache, Requester
from compiled_graphs.compiler.registry import registry as registry_module
from compiled_graphs.compiler.registry.registry import Registry
from compiled_graphs.compiler.storage.graph_file import StoredGraph
from compiled_graphs.compiler.storage.store import FolderStore
from networks import ConvolutionNetwork, call, compile_network, install, said, sizes, transformer, variants_of

pytestmark = pytest.mark.usefixtures("traced_once")


class SlowBackend(EagerBackend):
    def __init__(self):
        self.compiled = 0

    def compile(self, exported):
        self.compiled += 1
        time.sleep(0.2)
        return super().compile(exported)


class UnsavableBackend(EagerBackend):
    def compile(self, exported):
        executable = super().compile(exported)
        executable.to_bytes = lambda: 1 / 0
        return executable


class OtherVersion(EagerBackend):
    def environment(self, device):
        return super().environment(device) | {"torch": "another"}


def obtain(registry, network, backend=None, counters=None):
    (variant,) = variants_of(network)
    by = Requester(backend or EagerBackend(), Host(), counters or Counters())
    return registry.cache.get_or_compile(variant, by)


def test_a_graph_wanted_twice_is_compiled_once(registry):
    first, source = obtain(registry, transformer())
    again, again_source = obtain(registry, transformer())
    assert (source, again_source) == ("compiled", "memory")
    assert again is first


def test_where_a_graph_came_from_is_counted(registry, tmp_path):
    counters = Counters()
    store = FolderStore(tmp_path)
    for wanted in (Registry(GraphCache(store)), Registry(GraphCache(store))):
        obtain(wanted, transformer(), counters=counters)
        obtain(wanted, transformer(), counters=counters)
    assert (counters.compiles, counters.from_memory, counters.from_disk) == (1, 2, 1)
    assert counters.seconds > 0


def test_another_environment_is_another_graph(registry):
    obtain(registry, transformer())
    assert obtain(registry, transformer(), OtherVersion())[1] == "compiled"


def test_threads_that_share_a_graph_compile_it_once(registry):
    backend, counters, found = SlowBackend(), Counters(), []
    variants = [variants_of(transformer())[0] for _ in range(3)]
    threads = [
        threading.Thread(
            target=lambda v=v: found.append(registry.cache.get_or_compile(v, Requester(backend, Host(), counters))[0])
        )
        for v in variants
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert backend.compiled == counters.compiles == 1
    assert len({id(entry) for entry in found}) == 1


def test_a_graph_that_cannot_be_saved_still_serves(tmp_path, caplog):
    wanted = Registry(GraphCache(FolderStore(tmp_path)))
    assert obtain(wanted, transformer(), UnsavableBackend())[1] == "compiled"
    assert len(said(caplog)) == 1
    assert not list(tmp_path.glob("*.safetensors"))


def test_compiler_errors_reach_the_caller_each_time(registry):
    class Broken(EagerBackend):
        def compile(self, exported):
            raise RuntimeError("internal compiler error")

    with pytest.raises(RuntimeError, match="internal compiler error"):
        obtain(registry, transformer(), Broken())
    assert obtain(registry, transformer())[1] == "compiled"


def test_memory_drops_the_least_recently_used_graph(registry, monkeypatch):
    monkeypatch.setattr(graph_cache_module, "MAX_GRAPHS", 2)
    one, two, three = transformer(), transformer(eps=1e-5), ConvolutionNetwork()
    for network in (one, two, one, three):
        obtain(registry, network)
    assert [obtain(registry, network)[1] for network in (one, three, two)] == ["memory", "memory", "compiled"]


def test_dropped_graphs_come_back_from_the_store(tmp_path, monkeypatch):
    monkeypatch.setattr(graph_cache_module, "MAX_GRAPHS", 1)
    wanted = Registry(GraphCache(FolderStore(tmp_path)))
    for network in (transformer(), ConvolutionNetwork()):
        obtain(wanted, network)
    assert [obtain(wanted, network)[1] for network in (transformer(), ConvolutionNetwork())] == ["disk", "disk"]


def test_jobs_run_outside_of_inference_mode(registry):
    with torch.inference_mode():
        assert registry.cache.run("mode", torch.is_inference_mode_enabled, torch.device("cpu")) is False
        assert obtain(registry, transformer())[1] == "compiled"


def test_models_are_freed_while_their_graphs_stay(registry):
    network = transformer()
    compiled = compile_network(network, registry)
    registry.assign("workflow", "node", compiled)
    network(*network.inputs(sizes()))
    gone = [weakref.ref(network), weakref.ref(network.blocks[0]), weakref.ref(compiled)]
    gone.append(weakref.ref(network.blocks[1].gate))
    del network, compiled
    gc.collect()
    assert [reference() for reference in gone] == [None] * 4
    assert obtain(registry, transformer())[1] == "memory"


def test_a_report_tells_each_roles_regions_and_counts(registry):
    network = transformer()
    compiled = compile_network(network, registry)
    network(*network.inputs(sizes()))
    registry.assign("workflow", "node", compiled)
    role = registry.report()["workflows"]["workflow"]["roles"]["node"]
    expected = {"regions": 1, "compiled": 1, "eager": 0, "calls": 2, "compiles": 1, "verifications": 1, "retired": 0}
    assert {name: role[name] for name in expected} == expected


def test_a_report_is_json_and_gives_reasons(registry):
    network = transformer()
    compiled = install(network, registry)
    network(*network.inputs(sizes()))
    registry.assign("workflow", "node", compiled)
    report = json.loads(json.dumps(registry.report()))
    assert report["workflows"]["workflow"]["roles"]["node"]["reasons"] == {"a kind of call that was not foreseen": 2}


def test_a_report_adds_up_the_regions_of_all_roles(registry):
    models = [compile_network(network, registry) for network in (transformer(), ConvolutionNetwork())]
    for name, compiled in zip(("one", "two"), models, strict=True):
        registry.assign(name, "node", compiled)
    totals = registry.report()["totals"]
    assert (totals["regions"], totals["compiled"], totals["eager"]) == (2, 2, 0)


def test_a_role_with_another_model_is_reported_once(registry):
    for network in (transformer(), ConvolutionNetwork()):
        compiled = compile_network(network, registry)
        registry.assign("workflow", "node", compiled)
    roles = registry.report()["workflows"]["workflow"]["roles"]
    assert list(roles) == ["node"]


def test_a_role_whose_model_is_gone_has_no_regions(registry):
    registry.assign("workflow", "node", compile_network(transformer(), registry))
    gc.collect()
    assert registry.report()["workflows"]["workflow"]["roles"]["node"]["regions"] == 0


def test_workflows_are_bounded(registry, monkeypatch):
    monkeypatch.setattr(registry_module, "MAX_WORKFLOWS", 2)
    network = transformer()
    compiled = install(network, registry)
    for workflow in ("one", "two", "one", "three"):
        registry.assign(workflow, "node", compiled)
    assert list(registry.report()["workflows"]) == ["one", "three"]


def used(registry, network, name="workflow"):
    """Compile a network, run it, and give it a role in a workflow. Return the compiled model."""
    compiled = compile_network(network, registry)
    network(*network.inputs(sizes()))
    registry.assign(name, "node", compiled)
    return compiled


def row(registry):
    (found,) = registry.report()["workflows"]["workflow"]["roles"]["node"]["graphs"]
    return found


def test_a_report_has_a_row_for_each_graph(tmp_path):
    registry, network = Registry(GraphCache(FolderStore(tmp_path))), transformer()
    compiled = used(registry, network)
    found = row(registry)
    expected = {"region": "TransformerBlock", "blocks": 2, "state": "compiled", "source": "compiled", "reason": ""}
    assert {name: found[name] for name in expected} == expected
    assert found["seconds"] > 0
    assert found["bytes"] > 1000
    assert found["timing"]["eager"] > 0
    role = registry.report()["workflows"]["workflow"]["roles"]["node"]
    assert role["speed_up"] == pytest.approx(found["timing"]["eager"] / found["timing"]["graph"])
    assert json.loads(json.dumps(registry.report())) == registry.report()
    assert [graph.key for graph in compiled.graphs()] == [found["key"]]


def test_a_report_says_where_a_graph_came_from(tmp_path):
    for source in ("compiled", "disk"):
        registry, network = Registry(GraphCache(FolderStore(tmp_path))), transformer()
        compiled = used(registry, network)
        assert row(registry)["source"] == source
    loaded, network = Registry(), transformer()
    reader = install(network, loaded)
    assert reader.load([StoredGraph.of(graph) for graph in compiled.graphs()]) == []
    loaded.assign("workflow", "node", reader)
    assert row(loaded)["source"] == "file"
    assert row(loaded)["bytes"] == len(StoredGraph.of(compiled.graphs()[0]).executable)


def test_a_report_has_rows_for_what_is_not_compiled(registry):
    network = transformer()
    compiled = install(network, registry)
    registry.assign("workflow", "node", compiled)
    assert row(registry) == {"region": "TransformerBlock", "blocks": 2, "state": "waiting", "reason": ""}
    network(*network.inputs(sizes()))
    assert (row(registry)["state"], row(registry)["reason"]) == ("eager", "a kind of call that was not foreseen")


def test_a_report_has_sizes_in_memory_and_on_disk(tmp_path):
    registry = Registry(GraphCache(FolderStore(tmp_path, limit=10**6)))
    obtain(registry, transformer())
    report = registry.report()
    (file,) = tmp_path.glob("*.safetensors")
    assert report["disk"] == {"graphs": 1, "bytes": file.stat().st_size, "limit": 10**6}
    assert report["memory"]["graphs"] == 1
    assert report["memory"]["bytes"] > 1000


def test_a_remote_or_broken_store_is_not_reported(tmp_path):
    far = FolderStore(tmp_path)
    far.is_near = False
    (tmp_path / "file").touch()
    for store in (None, far, FolderStore(tmp_path / "file")):
        assert Registry(GraphCache(store)).report()["disk"] is None


def test_changes_are_told(tmp_path):
    registry, told = Registry(GraphCache(FolderStore(tmp_path))), []
    registry.on_change = lambda: told.append(True)
    network = transformer()
    compiled = compile_network(network, registry)
    assert len(told) == 1, "a graph came"
    for _ in range(3):
        registry.assign("workflow", "node", compiled)
    assert len(told) == 2, "a role came, and is played again and again"
    registry.evict("workflow", set())
    assert len(told) == 3


def test_evicted_graphs_load_from_the_store(tmp_path):
    registry, network = Registry(GraphCache(FolderStore(tmp_path))), transformer()
    compiled = compile_network(network, registry, current_call=lambda: call)
    registry.assign("workflow", "node", compiled)
    x = network.inputs(sizes())
    expected = network(*x)
    gone = weakref.ref(compiled.graphs()[0])
    assert registry.evict("workflow", registry.keep("workflow")) == 1
    gc.collect()
    assert gone() is None
    assert registry.report()["workflows"] == {}
    assert (registry.report()["memory"]["graphs"], compiled.graphs()) == (0, [])
    with compiled.counters.expect(compiles=0, from_disk=1, verifications=1):
        torch.testing.assert_close(network(*x), expected)
    assert compiled.counters.eager_calls.total() == 0


def test_whoever_still_holds_an_evicted_graph_is_told(tmp_path):
    """Captures of steps do. They are dropped before the next sampling."""
    registry, network = Registry(GraphCache(FolderStore(tmp_path))), transformer()
    compiled = compile_network(network, registry)
    registry.assign("workflow", "node", compiled)
    (entry,) = compiled.kinds()[0].entries
    registry.evict("workflow", registry.keep("workflow"))
    assert entry.is_out


def test_reasons_with_the_same_words_are_counted_together(registry):
    compiled = compile_network(transformer(), registry)
    registry.assign("workflow", "node", compiled)
    for reason in (Reason(ReasonCode.ERROR, "it fails"), Reason(ReasonCode.BACKEND, "it fails")):
        compiled.counters.add_eager(reason)
    assert str(Reason(ReasonCode.ERROR, "it fails")) == str(Reason(ReasonCode.BACKEND, "it fails"))
    assert registry.report()["workflows"]["workflow"]["roles"]["node"]["reasons"] == {"it fails": 2}


def test_graphs_of_a_file_are_stored_before_eviction(tmp_path):
    compiled = used(Registry(), transformer())
    registry, network = Registry(GraphCache(FolderStore(tmp_path))), transformer()
    reader = install(network, registry, current_call=lambda: call)
    reader.load([StoredGraph.of(graph) for graph in compiled.graphs()])
    registry.assign("workflow", "node", reader)
    assert not list(tmp_path.glob("*.safetensors"))
    assert registry.evict("workflow", registry.keep("workflow")) == 1
    network(*network.inputs(sizes()))
    assert (reader.counters.compiles, reader.counters.from_disk) == (0, 1)


def test_graphs_that_somebody_else_signed_are_not_stored(tmp_path):
    compiled = used(Registry(), transformer())
    registry, network = Registry(GraphCache(FolderStore(tmp_path))), transformer()
    reader = install(network, registry, current_call=lambda: call)
    reader.load([replace(StoredGraph.of(graph), is_foreign=True) for graph in compiled.graphs()])
    registry.assign("workflow", "node", reader)
    assert registry.evict("workflow", registry.keep("workflow")) == 0
    assert not list(tmp_path.glob("*.safetensors"))
    network(*network.inputs(sizes()))
    assert (reader.counters.compiles, reader.counters.from_disk) == (0, 0)


def test_graphs_that_nothing_holds_stay_in_memory(tmp_path):
    (tmp_path / "file").touch()
    for store in (None, FolderStore(tmp_path / "file")):
        registry = Registry(GraphCache(store))
        compiled = used(registry, transformer())
        assert registry.evict("workflow", registry.keep("workflow")) == 0
        assert len(compiled.graphs()) == registry.report()["memory"]["graphs"] == 1


def test_graphs_of_other_workflows_stay_in_memory(tmp_path):
    registry = Registry(GraphCache(FolderStore(tmp_path)))
    one, other = used(registry, transformer(), "one"), used(registry, transformer(), "other")
    assert registry.evict("one", registry.keep("one")) == 0
    assert (one.graphs(), len(other.graphs())) == ([], 1)
    assert registry.report()["memory"]["graphs"] == 1


def test_a_graph_that_failed_its_check_is_kept(tmp_path):
    registry, network = Registry(GraphCache(FolderStore(tmp_path))), transformer()
    compiled = used(registry, network)
    (entry,) = [entry for kind in compiled.kinds() for entry in kind.graphs]
    entry.retired = Reason(ReasonCode.CHECK_FAILED, "TransformerBlock failed its check")
    assert registry.evict("workflow", registry.keep("workflow")) == 0
    assert obtain(registry, transformer()) == (entry, "memory")
    network(*network.inputs(sizes()))
    assert list(compiled.counters.eager_calls) == [entry.retired]


def test_an_evicted_graph_is_compiled_again(tmp_path, caplog):
    registry = Registry(GraphCache(FolderStore(tmp_path)))
    told = []
    entry, _ = obtain(registry, transformer())
    registry.on_change = lambda: told.append(None)
    registry.cache.evict(entry)
    assert (len(told), list(tmp_path.glob("*.safetensors"))) == (1, [])
    assert obtain(Registry(GraphCache(FolderStore(tmp_path))), transformer())[1] == "compiled"
    other, source = obtain(registry, transformer())
    assert (source, other is entry) == ("disk", False)
    registry.cache.evict(entry)
    assert obtain(registry, transformer())[1] == "compiled"
    assert said(caplog) == []


def test_a_graph_without_a_store_is_evicted(registry):
    entry, _ = obtain(registry, transformer())
    registry.cache.evict(entry)
    registry.cache.evict(entry)
    assert obtain(registry, transformer())[1] == "compiled"


def test_a_graph_that_stays_on_disk_is_named(tmp_path, monkeypatch, caplog):
    registry = Registry(GraphCache(FolderStore(tmp_path)))
    entry, _ = obtain(registry, transformer())
    monkeypatch.setattr(registry.cache.store, "discard", lambda key: False)
    registry.cache.evict(entry)
    (message,) = said(caplog)
    assert entry.graph.key in message


def test_models_of_an_unknown_workflow_are_none(registry):
    compiled = used(registry, transformer())
    assert registry.models("nowhere") is None
    assert registry.models("workflow") == {"node": compiled}
    assert registry.keep("nowhere") == set()
