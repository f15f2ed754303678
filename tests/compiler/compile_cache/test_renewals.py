"""Graphs that have learned something in their first calls, and what the store has of them afterwards."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import fsspec
import pytest
import torch
from compiled_graphs.compiler.backends.eager.backend import EagerBackend
from compiled_graphs.compiler.common.jobs import CompileJobs
from compiled_graphs.compiler.compile_cache import renewals as renewals_module
from compiled_graphs.compiler.compile_cache.graph_cache import CacheEntry, GraphCache
from compiled_graphs.compiler.compile_cache.renewals import Renewals
from compiled_graphs.compiler.identity.graph_spec import CompiledGraph
from compiled_graphs.compiler.registry.registry import Registry
from compiled_graphs.compiler.runtime.network_wrapper import NetworkWrapper
from compiled_graphs.compiler.runtime.random_check import CheckResult, check_graphs
from compiled_graphs.compiler.storage.graph_file import StoredGraph
from compiled_graphs.compiler.storage.signers import Signer, fingerprint
from compiled_graphs.compiler.storage.store import FolderStore, UrlStore
from compiled_graphs.compiler.storage.trust import Trust
from networks import compile_network, said, sizes, transformer

pytestmark = pytest.mark.usefixtures("traced_once")

KEY = "0123abcd" * 8
CHOICE = b"choice"


class Learner:
    """An executable that knows more after its first call."""

    def __init__(self, inner, loaded=b""):
        self.inner, self.loaded, self.learned = inner, loaded, loaded

    def __call__(self, *tensors):
        self.learned = CHOICE
        return self.inner(*tensors)

    def to_bytes(self):
        return self.inner.to_bytes() + self.learned

    def has_grown(self, data=None):
        return not (self.loaded if data is None else data).endswith(self.learned)


class LearningBackend(EagerBackend):
    def compile(self, exported):
        return Learner(super().compile(exported))

    def load(self, data, spec):
        return Learner(super().load(data.removesuffix(CHOICE), spec), CHOICE if data.endswith(CHOICE) else b"")


@pytest.fixture
def store(tmp_path):
    return FolderStore(tmp_path / "graphs")


@pytest.fixture
def spec(store):
    """The spec of a real graph."""
    compiled = compile_network(transformer(), Registry(GraphCache(store)))
    return compiled.graphs()[0].spec


@pytest.fixture
def entry(spec):
    """A graph that has run and learned something since it was stored."""
    graph = CompiledGraph(KEY, "ab", "[]", "eager", {}, spec, Learner(SimpleNamespace(to_bytes=lambda: b"code")))
    graph.executable.learned = CHOICE
    return SimpleNamespace(graph=graph, is_out=False)


def put(store, entry):
    """Write what the graph was before it ran."""
    assert store.put(replace(StoredGraph.of(entry.graph), executable=b"code"))


def renewed(store, entry):
    """Return the bytes in a store after the graph was looked at."""
    renewals = Renewals(store, CompileJobs())
    renewals.note([entry])
    renewals.finish()
    stored = store.get(entry.graph.key)
    return stored and stored.executable


@pytest.fixture
def run():
    """Call a network as its host does. Returns the compiled model."""

    def run(cache, backend=None, calls=1):
        network = transformer()
        compiled = compile_network(network, Registry(cache), backend or LearningBackend())
        for block in network.blocks:
            block.__dict__.pop("forward", None)
        wrapper = NetworkWrapper(network, "forward", None, compiled)
        wrapper.install_while_running(compiled.forwards())
        for _ in range(calls):
            wrapper(*network.inputs(sizes()))
        assert not compiled.counters.eager_calls
        return compiled

    return run


def test_what_a_graph_learns_in_its_first_call_is_stored_later(run, store):
    cache = GraphCache(store)
    (graph,) = run(cache, calls=3).graphs()
    assert not store.get(graph.key).executable.endswith(CHOICE)  # not on the path of the call
    cache.renewals.finish()
    assert store.get(graph.key).executable.endswith(CHOICE)
    (loaded,) = run(GraphCache(store)).graphs()
    assert loaded.executable.learned == CHOICE


def test_nobody_need_ask_for_it(run, store, monkeypatch):
    monkeypatch.setattr(renewals_module, "DELAY", 0)
    cache, asked = GraphCache(store), threading.Event()
    cache.renewals.give_way = asked.set
    (graph,) = run(cache).graphs()
    assert asked.wait(60)
    cache.renewals._background.wait()
    assert store.get(graph.key).executable.endswith(CHOICE)


def test_prompts_go_first(run, store, monkeypatch):
    monkeypatch.setattr(renewals_module, "DELAY", 0)
    cache, over = GraphCache(store), threading.Event()
    cache.renewals.give_way = lambda: over.wait(60)
    (graph,) = run(cache).graphs()
    assert not store.get(graph.key).executable.endswith(CHOICE)
    over.set()
    cache.renewals._background.wait()
    assert store.get(graph.key).executable.endswith(CHOICE)


def test_each_graph_is_looked_at_once(run, store, monkeypatch):
    looked = []
    monkeypatch.setattr(FolderStore, "own", lambda store, key: looked.append(key))
    cache = GraphCache(store)
    (graph,) = run(cache, calls=2).graphs()
    cache.renewals.finish()
    run(cache)
    cache.renewals.finish()
    assert looked == [graph.key]


def test_a_check_at_small_sizes_is_no_first_call(store):
    cache, network = GraphCache(store), transformer()
    compiled = compile_network(network, Registry(cache), LearningBackend())
    assert set(check_graphs(compiled).values()) == {CheckResult()}
    cache.renewals.finish()
    (graph,) = compiled.graphs()
    assert not store.get(graph.key).executable.endswith(CHOICE)


def test_graphs_that_learn_nothing_and_caches_without_a_store_have_nothing_to_do(run, store, monkeypatch):
    monkeypatch.setattr(FolderStore, "own", lambda *args: pytest.fail("it was looked at"))
    for cache, backend in ((GraphCache(store), EagerBackend()), (GraphCache(), LearningBackend())):
        run(cache, backend)
        assert not cache.renewals._background.is_busy
        cache.renewals.finish()


def test_an_entry_is_written_again_where_the_store_is_a_url(entry):
    store = UrlStore("memory://renewals")
    fsspec.filesystem("memory").mkdirs("/renewals", exist_ok=True)
    put(store, entry)
    assert renewed(store, entry) == b"code" + CHOICE


def test_an_entry_that_has_it_stays_as_it_is(store, entry, monkeypatch):
    store.put(StoredGraph.of(entry.graph))
    monkeypatch.setattr(FolderStore, "replace", lambda *args: pytest.fail("it was written again"))
    assert renewed(store, entry) == b"code" + CHOICE


def test_what_the_store_does_not_have_is_not_put_there(store, entry):
    assert renewed(store, entry) is None


def test_a_graph_that_was_wrong_does_not_replace_the_one_that_came_after_it(store, entry):
    put(store, entry)
    entry.is_out = True
    assert renewed(store, entry) == b"code"


def test_what_was_loaded_with_all_it_knows_is_not_read_again(run, store, monkeypatch):
    cache = GraphCache(store)
    run(cache)
    cache.renewals.finish()
    monkeypatch.setattr(FolderStore, "own", lambda *args: pytest.fail("it was read"))
    again = GraphCache(store)
    assert run(again).counters.from_disk
    again.renewals.finish()


def test_an_entry_of_another_signer_stays_his(store, entry, tmp_path):
    """Others may trust him and not this machine."""
    pytest.importorskip("cryptography")
    theirs = Trust(tmp_path / "theirs")
    theirs.maker.make()
    put(FolderStore(store.folder, theirs), entry)
    Trust().signers.add(Signer(fingerprint(theirs.maker.public()), "Alice"))
    assert store.get(KEY).executable == b"code"
    assert renewed(store, entry) == b"code"


def test_a_graph_of_another_signer_does_not_replace_the_one_in_the_store(store, entry):
    """Its maker's signature stands for it, and not this machine's."""
    put(store, entry)
    cache = GraphCache(store)
    cache.note_run([CacheEntry(replace(entry.graph, is_foreign=True), "file")])
    cache.renewals.finish()
    assert store.get(KEY).executable == b"code"


def test_a_graph_that_turns_out_wrong_while_it_is_written_is_removed(store, entry, monkeypatch):
    put(store, entry)
    replace_ = FolderStore.replace

    def found_wrong(store, graph):
        replace_(store, graph)
        entry.is_out = True

    monkeypatch.setattr(FolderStore, "replace", found_wrong)
    assert renewed(store, entry) is None


def test_a_store_that_cannot_be_written_to_stays_as_it_is(store, entry, monkeypatch, caplog):
    put(store, entry)

    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(FolderStore, "_write", refuse)
    with caplog.at_level("INFO"):
        assert renewed(store, entry) == b"code"
    (message,) = said(caplog)
    assert "stays as it is" in message
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_bytes_that_cannot_be_made_leave_the_others_their_turn(store, entry, spec, caplog):
    broken = SimpleNamespace(graph=replace(entry.graph, key="f" * 64, executable=Learner(None)), is_out=False)
    broken.graph.executable.learned = CHOICE
    put(store, entry)
    assert store.put(StoredGraph("f" * 64, "ab", "[]", "eager", {}, spec, b"code"))
    renewals = Renewals(store, CompileJobs())
    renewals.note([broken, entry])
    with caplog.at_level("INFO"):
        renewals.finish()
    assert store.get(KEY).executable == b"code" + CHOICE
    assert store.get("f" * 64).executable == b"code"
    assert len(said(caplog)) == 1


def test_networks_compute_the_same_after_a_renewal(run, store):
    cache = GraphCache(store)
    run(cache)
    cache.renewals.finish()
    network = transformer()
    inputs = network.inputs(sizes())
    expected = network(*inputs)
    compile_network(network, Registry(GraphCache(store)), LearningBackend(), verify=False)
    torch.testing.assert_close(network(*inputs), expected)
