from __future__ import annotations

import gc
import json
import threading
import time
import weakref

import pytest
import torch
from compiled_graphs.compiler import registry as registry_module
from compiled_graphs.compiler.backends.eager import EagerBackend
from compiled_graphs.compiler.counters import Counters
from compiled_graphs.compiler.host import Host
from compiled_graphs.compiler.registry import Registry
from compiled_graphs.compiler.store import FolderStore
from networks import ConvolutionNetwork, compile_network, install, said, sizes, transformer, variants_of


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
    return registry.obtain(variant, backend or EagerBackend(), Host(), counters or Counters())


def test_a_graph_wanted_twice_is_compiled_once(registry):
    first, source = obtain(registry, transformer())
    again, again_source = obtain(registry, transformer())
    assert (source, again_source) == ("compiled", "memory")
    assert again is first


def test_where_a_graph_came_from_is_counted(registry, tmp_path):
    counters = Counters()
    store = FolderStore(tmp_path)
    for wanted in (Registry(store), Registry(store)):
        obtain(wanted, transformer(), counters=counters)
        obtain(wanted, transformer(), counters=counters)
    assert (counters.compiles, counters.from_memory, counters.from_disk) == (1, 2, 1)
    assert counters.seconds > 0


def test_another_environment_is_another_graph(registry):
    obtain(registry, transformer())
    assert obtain(registry, transformer(), OtherVersion())[1] == "compiled"


def test_threads_that_want_the_same_graph_compile_it_once(registry):
    backend, counters, found = SlowBackend(), Counters(), []
    variants = [variants_of(transformer())[0] for _ in range(3)]
    threads = [
        threading.Thread(target=lambda v=v: found.append(registry.obtain(v, backend, Host(), counters)[0]))
        for v in variants
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert backend.compiled == counters.compiles == 1
    assert len({id(entry) for entry in found}) == 1


def test_a_graph_that_cannot_be_saved_still_serves(tmp_path, caplog):
    wanted = Registry(FolderStore(tmp_path))
    assert obtain(wanted, transformer(), UnsavableBackend())[1] == "compiled"
    assert len(said(caplog)) == 1
    assert not list(tmp_path.glob("*.safetensors"))


def test_compilers_errors_reach_the_caller_and_are_no_obstacle_later(registry):
    class Broken(EagerBackend):
        def compile(self, exported):
            raise RuntimeError("internal compiler error")

    with pytest.raises(RuntimeError, match="internal compiler error"):
        obtain(registry, transformer(), Broken())
    assert obtain(registry, transformer())[1] == "compiled"


def test_memory_is_bounded_and_drops_what_was_used_longest_ago(registry, monkeypatch):
    monkeypatch.setattr(registry_module, "MAX_GRAPHS", 2)
    one, two, three = transformer(), transformer(eps=1e-5), ConvolutionNetwork()
    for network in (one, two, one, three):
        obtain(registry, network)
    assert [obtain(registry, network)[1] for network in (one, three, two)] == ["memory", "memory", "compiled"]


def test_what_was_dropped_from_memory_comes_back_from_the_store(tmp_path, monkeypatch):
    monkeypatch.setattr(registry_module, "MAX_GRAPHS", 1)
    wanted = Registry(FolderStore(tmp_path))
    for network in (transformer(), ConvolutionNetwork()):
        obtain(wanted, network)
    assert [obtain(wanted, network)[1] for network in (transformer(), ConvolutionNetwork())] == ["disk", "disk"]


def test_jobs_run_outside_of_inference_mode(registry):
    with torch.inference_mode():
        assert registry.run("mode", torch.is_inference_mode_enabled) is False
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


def test_a_role_played_by_another_model_is_reported_once(registry):
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
