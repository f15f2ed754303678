from __future__ import annotations

import dataclasses
import errno
import hashlib
import importlib
import json
import os
import pickle
import random
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import ClassVar

import filelock
import fsspec
import pytest
import torch
from compiled_graphs.compiler.common.files import write_whole
from compiled_graphs.compiler.compile_cache.graph_cache import GraphCache
from compiled_graphs.compiler.identity.graph_spec import GraphSpec, InputSpec, WeightSpec
from compiled_graphs.compiler.registry.registry import Registry
from compiled_graphs.compiler.storage import claims
from compiled_graphs.compiler.storage import store as store_module
from compiled_graphs.compiler.storage.graph_file import StoredGraph, read_graphs, write_graphs
from compiled_graphs.compiler.storage.store import FolderStore, StoreError, UrlStore, default_limit, open_store
from compiled_graphs.compiler.storage.trust import Trust
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry
from networks import ConvolutionNetwork, StreamNetwork, call, compile_network, said, sizes, transformer
from safetensors.torch import save

fcntl = None if os.name == "nt" else importlib.import_module("fcntl")

pytestmark = pytest.mark.usefixtures("traced_once")

SPEC = GraphSpec(
    region="Block",
    device="cpu",
    weights=(WeightSpec("linear.weight", (4, 3), (3, 1), "torch.float32"), WeightSpec("scale", (), (), "torch.half")),
    inputs=(InputSpec(("s0", "s1*2", 16), "torch.float32", "contiguous"),),
    guards=("s0 % 2 == 0",),
    mutated=(0,),
    outputs=(True, False),
    tree="[1, {}]",
)
GRAPH = StoredGraph("0123abcd" * 8, "ab", "[]", "eager", {"torch": "2.13"}, SPEC, bytes(range(256)) * 3)


@pytest.fixture
def store(tmp_path):
    return FolderStore(tmp_path / "graphs")


def files(store):
    return sorted(path.name for path in store.folder.iterdir() if path.is_file())


def only_file(store):
    (path,) = (path for path in store.folder.iterdir() if path.is_file())
    return path


def fail_with(error):
    def fail(*args, **kwargs):
        raise error

    return fail


def key(word):
    """Return a key that depends only on the word."""
    return hashlib.sha256(word.encode()).hexdigest()


WORDS = ["a", "b", "c", "d", "last", "large", "middle", "new", "newer", "newest", "next", "old", "older", "oldest"]
WORD = {key(word): word for word in [*WORDS, "open", "small", "unused", "used", "vanished"]}


def graph(word, size=1000):
    """Return a graph with an executable of `size` random bytes, which do not compress."""
    return dataclasses.replace(GRAPH, key=key(word), executable=random.Random(word).randbytes(size))


def file_name(word):
    return f"{key(word)}.graph.safetensors"


def keys(store):
    """Return the words whose graphs a store has, in order."""
    return sorted(WORD[entry.name.split(".")[0]] for entry in store.entries())


def last_used(store, word, seconds_ago):
    then = time.time() - seconds_ago
    os.utime(store.folder / file_name(word), (then, then))


@contextmanager
def python(script, *arguments):
    """Run a script in a process that is killed at the end of the block."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_graph_comes_back_as_it_was_put(store):
    assert store.put(GRAPH) is True
    assert store.get(GRAPH.key) == GRAPH


def test_unknown_graph_is_none_and_logs_nothing(store, caplog):
    assert store.get(key("absent")) is None
    assert said(caplog) == []


def test_graphs_do_not_get_in_each_others_way(store):
    other = dataclasses.replace(GRAPH, key=key("other"), executable=b"other")
    store.put(GRAPH)
    store.put(other)
    assert (store.get(GRAPH.key), store.get(key("other"))) == (GRAPH, other)


def test_a_graph_put_again_replaces_the_old_one(store):
    store.put(GRAPH)
    newer = dataclasses.replace(GRAPH, executable=b"newer")
    store.put(newer)
    assert store.get(GRAPH.key) == newer
    assert len(files(store)) == 1


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_truncated_file_is_absent_and_logged(store, caplog, part):
    store.put(GRAPH)
    path = only_file(store)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])
    assert store.get(GRAPH.key) is None
    assert len(said(caplog)) == 1


@pytest.mark.parametrize("data", [b"not a graph at all", b"\x00" * 4096, save({"weight": torch.zeros(3)})], ids=len)
def test_file_without_a_graph_is_absent(store, caplog, data):
    store.put(GRAPH)
    only_file(store).write_bytes(data)
    assert store.get(GRAPH.key) is None
    assert len(said(caplog)) == 1


def test_graph_signed_elsewhere_is_absent(store, tmp_path, caplog):
    FolderStore(store.folder, Trust(tmp_path / "elsewhere")).put(GRAPH)
    assert store.get(GRAPH.key) is None
    assert "not made on this machine" in said(caplog)[0]


def test_folder_in_place_of_a_file_is_absent(store):
    store.put(GRAPH)
    path = only_file(store)
    path.unlink()
    path.mkdir()
    assert store.get(GRAPH.key) is None


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_full_disk_logs_once_without_partial_files(store, monkeypatch, caplog, step):
    Trust().sign(b"")  # make the key first, so that only writing the graph fails
    monkeypatch.setattr(os, step, fail_with(OSError(errno.ENOSPC, "No space left on device")))
    assert store.put(GRAPH) is False
    assert files(store) == []
    (message,) = said(caplog)
    assert "No space left on device" in message
    assert "COMPILED_GRAPHS_STORE" in message


def test_store_folder_that_cannot_be_made_logs_once(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    assert FolderStore(tmp_path / "file" / "graphs").put(GRAPH) is False
    assert len(said(caplog)) == 1


def test_an_interrupted_write_leaves_the_old_graph(store, monkeypatch):
    store.put(GRAPH)
    monkeypatch.setattr(os, "replace", fail_with(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        store.put(dataclasses.replace(GRAPH, executable=b"newer"))
    assert store.get(GRAPH.key) == GRAPH
    assert len(files(store)) == 1


WRITER = """
import sys
from pathlib import Path
from compiled_graphs.compiler.common.files import write_whole
contents = b"0" * 2_000_000, b"1" * 2_000_000
print("writing", flush=True)
while True:
    for content in contents:
        write_whole(Path(sys.argv[1]), content)
"""


def test_a_file_is_whole_after_each_of_100_kills(tmp_path):
    path = tmp_path / "graph"
    contents = b"0" * 2_000_000, b"1" * 2_000_000
    write_whole(path, contents[0])
    survivors, interrupted = set(), 0
    for moment in range(100):
        with python(WRITER, path) as writer:
            writer.stdout.readline()
            time.sleep(random.Random(moment).uniform(0, 0.03))
        content = path.read_bytes()
        assert content in contents
        survivors.add(content)
        for partial in tmp_path.glob(".*.partial"):
            partial.unlink()
            interrupted += 1
    assert len(survivors) == 2
    assert interrupted > 10


def test_a_restart_with_the_store_compiles_nothing(store):
    for network, reference in ((ConvolutionNetwork(), None), (StreamNetwork(), None)):
        inputs = network.inputs(sizes())
        reference = network(*[t.clone() for t in inputs])
        first = compile_network(network, Registry(GraphCache(store)))
        assert (first.counters.compiles, first.counters.from_disk) == (1, 0)
        again = compile_network(network, Registry(GraphCache(store)))
        assert (again.counters.compiles, again.counters.from_disk) == (0, 1)
        torch.testing.assert_close(network(*inputs), reference)
        assert not again.counters.eager_calls


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: b"garbage"], ids=["cut", "garbage"]
)
def test_a_damaged_file_is_compiled_again_and_mended(store, damage):
    network = transformer()
    compile_network(network, Registry(GraphCache(store)))
    path = only_file(store)
    path.write_bytes(damage(path.read_bytes()))
    again = compile_network(network, Registry(GraphCache(store)))
    assert (again.counters.compiles, again.counters.from_disk) == (1, 0)
    assert compile_network(network, Registry(GraphCache(store))).counters.from_disk == 1


def test_unloadable_executable_is_compiled_again(store):
    network = transformer()
    compile_network(network, Registry(GraphCache(store)))
    stored = read_graphs(only_file(store).read_bytes(), Trust())[0]
    store.put(dataclasses.replace(stored, executable=b"no program"))
    again = compile_network(network, Registry(GraphCache(store)))
    assert (again.counters.compiles, again.counters.from_disk) == (1, 0)


@pytest.mark.parametrize("change", [{"key": key("another")}, {"backend": "inductor"}])
def test_file_with_another_graphs_name_is_not_used(store, change):
    network = transformer()
    compile_network(network, Registry(GraphCache(store)))
    path = only_file(store)
    (graph,) = read_graphs(path.read_bytes(), Trust())
    path.write_bytes(write_graphs([dataclasses.replace(graph, **change)], Trust()))
    assert compile_network(network, Registry(GraphCache(store))).counters.compiles == 1


def test_full_disk_still_serves_this_session(store, monkeypatch, caplog):
    network = transformer()
    x = network.inputs(sizes())
    expected = network(*x)
    Trust().sign(b"")
    monkeypatch.setattr(os, "fsync", fail_with(OSError(errno.ENOSPC, "No space left on device")))
    compiled = compile_network(network, Registry(GraphCache(store)))
    torch.testing.assert_close(network(*x), expected)
    assert compiled.summary().compiled == 1
    assert not compiled.counters.eager_calls
    assert len(said(caplog)) == 1
    assert files(store) == []


def test_without_a_store_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compile_network(transformer(), Registry(), probe=call)
    assert not list(tmp_path.iterdir())


def test_the_least_recently_used_graphs_go_first(store):
    for age, word in enumerate(["newest", "middle", "oldest"]):
        store.put(graph(word))
        last_used(store, word, 100 * age + 100)
    size = only_size(store)
    store.limit = 3 * size
    store.put(graph("next"))
    assert keys(store) == ["middle", "newest", "next"]
    store.limit = size
    store.put(graph("last"))
    assert keys(store) == ["last"]


def test_a_get_keeps_a_graph_alive(store):
    for age, word in enumerate(["unused", "used"]):
        store.put(graph(word))
        last_used(store, word, 100 * age + 100)
    store.limit = 2 * only_size(store)
    assert store.get(key("used"))
    store.put(graph("next"))
    assert keys(store) == ["next", "used"]


def test_within_the_limit_nothing_goes(store):
    for word in ("a", "b", "c"):
        store.put(graph(word))
    store.limit = sum(entry.size for entry in store.entries())
    store.put(graph("c"))
    assert keys(store) == ["a", "b", "c"]


def test_newest_graph_stays_even_above_the_limit(store, tmp_path):
    store.put(graph("small"))
    small = FolderStore(store.folder, limit=10)
    assert small.put(graph("large", 100_000)) is True
    assert keys(store) == ["large"]
    assert store.get(key("large")) == graph("large", 100_000)


def test_only_graph_files_count_and_go(store):
    store.put(graph("old"))
    (store.folder / "notes.txt").write_bytes(bytes(10_000))
    (store.folder / "folder.graph.safetensors").mkdir()
    store.limit = only_size(store)
    store.put(graph("new"))
    assert keys(store) == ["new"]
    assert {path.name for path in store.folder.iterdir()} == {
        "folder.graph.safetensors",
        file_name("new"),
        "notes.txt",
    }


def test_unremovable_file_is_skipped(store, monkeypatch, caplog):
    for age, word in enumerate(["newer", "older", "open"]):
        store.put(graph(word))
        last_used(store, word, 100 * age + 100)
    unlink = Path.unlink

    def windows_unlink(path, missing_ok=False):
        if path.name == file_name("open"):
            raise PermissionError(errno.EACCES, "The process cannot access the file")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", windows_unlink)
    store.limit = 3 * only_size(store)
    assert store.put(graph("next")) is True
    assert keys(store) == ["newer", "next", "open"]
    assert said(caplog) == []


def test_a_file_that_vanished_meanwhile_counts_as_gone(store, monkeypatch, caplog):
    for age, word in enumerate(["newer", "older", "vanished"]):
        store.put(graph(word))
        last_used(store, word, 100 * age + 100)
    listed = store.entries()
    (store.folder / file_name("vanished")).unlink()
    monkeypatch.setattr(store, "_list", lambda: listed)
    store.shrink(2 * listed[0].size)
    monkeypatch.undo()
    assert keys(store) == ["newer", "older"]
    assert said(caplog) == []


def only_size(store):
    """Return the size of a store's graph files, which must be equal."""
    (size,) = {entry.size for entry in store.entries()}
    return size


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        (None, 10 * 10**9),
        ("", 10 * 10**9),
        ("2.5", 2.5e9),
        ("0", 0),
        ("much", 10 * 10**9),
        ("-1", 10 * 10**9),
        ("nan", 10 * 10**9),
        ("inf", 10 * 10**9),
    ],
)
def test_limit_is_in_gigabytes_and_invalid_means_ten(monkeypatch, tmp_path, text, limit):
    monkeypatch.delenv("COMPILED_GRAPHS_STORE_LIMIT", raising=False)
    if text is not None:
        monkeypatch.setenv("COMPILED_GRAPHS_STORE_LIMIT", text)
    assert default_limit() == limit
    assert FolderStore(tmp_path).limit == limit


def test_sweep_removes_only_old_partial_files(store):
    store.put(graph("a"))
    end = ".compiled_graphs.partial"
    left = {f".store-dead{end}": 61, f".store-living{end}": 59, f".saved-dead{end}": 61, ".download.partial": 61}
    for name, minutes in left.items():
        path = store.folder / name
        path.write_bytes(b"half")
        then = time.time() - 60 * minutes
        os.utime(path, (then, then))
    store.put(graph("b"))
    del left[f".store-dead{end}"]
    assert files(store) == sorted([*left, file_name("a"), file_name("b")])


def test_partial_files_are_not_graphs(store):
    store.put(graph("a"))
    (store.folder / f".{file_name('b')}").write_bytes(b"half")
    assert keys(store) == ["a"]


def test_entries_say_name_size_and_last_use(store):
    assert store.entries() == []
    before = time.time() - 1
    store.put(graph("a"))
    (entry,) = store.entries()
    assert entry.name == file_name("a")
    with store.open(entry.name) as file:
        assert entry.size == len(file.read()) == only_file(store).stat().st_size
    assert before <= entry.used <= time.time() + 1
    assert store.remove(entry.name) is True
    assert store.entries() == []


def test_notes_come_back_and_are_no_graphs(store):
    assert store.note(key("a")) is None
    store.put_note(key("a"), b"[1]")
    store.put_note(key("a"), b"[2]")
    assert store.note(key("a")) == b"[2]"
    assert store.entries() == []
    assert store.keys() == set()
    store.shrink(0)
    assert store.note(key("a")) == b"[2]"


def test_unwritable_or_unreadable_note_is_none(store, monkeypatch):
    store.put_note(key("a"), b"[1]")
    (store.folder / f"{key('b')}.wanted.json").mkdir()
    assert store.note(key("b")) is None
    store.put_note(key("b"), b"[2]")
    monkeypatch.setattr(FolderStore, "open", fail_with(PermissionError(13, "Permission denied")))
    assert store.note(key("a")) is None


def note_path(store, word="a"):
    return store.folder / f"{key(word)}.wanted.json"


def test_note_from_another_machine_is_none_and_logged(store, tmp_path, caplog):
    FolderStore(store.folder, Trust(tmp_path / "elsewhere")).put_note(key("a"), b"[1]")
    assert store.note(key("a")) is None
    (message,) = said(caplog)
    assert "not made on this machine" in message
    store.put_note(key("a"), b"[2]")
    assert store.note(key("a")) == b"[2]"


def test_note_under_another_name_is_none(store):
    store.put_note(key("a"), b"[1]")
    note_path(store, "b").write_bytes(note_path(store).read_bytes())
    assert store.note(key("b")) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[1]",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        b" " * (2**20 + 1),
        b'{"note": 5, "signature": ""}',
        b'{"note": "[]", "signature": "\\ud800"}',
        b'{"note": "\\ud800", "signature": ""}',
        b'{"note": "[]", "signature": null}',
    ],
    ids=lambda data: repr(data[:30]),
)
def test_invalid_note_logs_one_sentence(store, caplog, data):
    store.folder.mkdir()
    note_path(store).write_bytes(data)
    assert store.note(key("a")) is None
    (message,) = said(caplog)
    assert "is made again" in message
    assert len(message) < 300


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
def test_store_does_not_wait_for_a_pipe(store, caplog):
    store.folder.mkdir()
    os.mkfifo(store.folder / file_name("a"))
    os.mkfifo(note_path(store))
    assert (store.get(key("a")), store.note(key("a"))) == (None, None)
    assert ["a pipe" in message for message in said(caplog)] == [True, True]
    assert store.entries() == []
    assert store.put(graph("a"))
    assert store.get(key("a")) == graph("a")


def test_oversized_file_is_logged_and_replaced(store, caplog):
    store.folder.mkdir()
    for path in (store.folder / file_name("a"), note_path(store)):
        path.touch()
        os.truncate(path, 6 * 2**30)
    assert (store.get(key("a")), store.note(key("a"))) == (None, None)
    assert len(said(caplog)) == 2
    assert store.put(graph("a"))
    assert store.get(key("a")) == graph("a")


def header_with(data, **texts):
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"] |= texts
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


@pytest.mark.parametrize("name", ["signature", "compiled_graphs"])
def test_file_with_a_lone_surrogate_is_replaced(store, name):
    network = transformer()
    compile_network(network, Registry(GraphCache(store)))
    path = only_file(store)
    path.write_bytes(header_with(path.read_bytes(), **{name: "\ud800"}))
    again = compile_network(network, Registry(GraphCache(store)))
    assert (again.counters.compiles, again.counters.from_disk, dict(again.counters.eager_calls)) == (1, 0, {})
    assert compile_network(network, Registry(GraphCache(store))).counters.from_disk == 1


def test_discarded_graph_is_gone(store):
    store.put(graph("a"))
    store.put(graph("b"))
    assert [store.discard(key(word)) for word in ("a", "a")] == [True, True]
    assert keys(store) == ["b"]


OTHERS = [
    "sdxl_00001_.graph.safetensors",
    "unet.graph.safetensors",
    "0123abcd.graph.safetensors",
    f"{'A' * 64}.graph.safetensors",
    f"{'g' * 64}.graph.safetensors",
    f"{'0' * 65}.graph.safetensors",
    f"{'0' * 64}.safetensors",
    f"x{'0' * 64}.graph.safetensors",
    f"{'0' * 64}.graph.safetensors.bak",
    f"{'0' * 64}.json",
    "model.wanted.json",
    "mine.wanted.json",
    ".download.partial",
    ".abcd1234.partial",
    ".saved-abcd1234.compiled_graphs.partial",
    "locks/00.lock",
    "locks/apt.lock",
    "compiled_graphs.locks/apt.lock",
    "compiled_graphs.locks/000.lock",
    "notes.txt",
]


def filled(store):
    """Fill the store's folder with files that the store did not write. Return their paths."""
    data = write_graphs([GRAPH], Trust())
    paths = [store.folder / name for name in OTHERS]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        os.utime(path, (0, 0))
    return paths


def test_foreign_files_are_ignored_and_stay(store):
    others = filled(store)
    store.limit = 0
    for word in ("a", "b"):
        with store.exclusive(key(word)):
            assert store.put(graph(word))
            store.put_note(key(word), b"[]")
    assert keys(store) == ["b"]
    assert store.keys() == {key("b")}
    assert [entry.name for entry in store.shrink(0)] == [file_name("b")]
    assert store.sweep(age=0) == []
    assert [store.remove(name) for name in OTHERS] == [False] * len(OTHERS)
    store.put(graph("a"))
    store.clear()
    assert sorted(path for path in store.folder.rglob("*") if path.is_file()) == sorted(others)


@pytest.mark.parametrize("name", ["../a", "a", "", "A" * 64, "0" * 63, "0" * 64 + "\n", "\x1b" + "0" * 63])
def test_invalid_key_names_no_file(store, name, caplog):
    store.folder.mkdir()
    assert store.put(dataclasses.replace(GRAPH, key=name)) is False
    assert store.get(name) is None
    assert store.discard(name) is False
    store.put_note(name, b"[]")
    assert store.note(name) is None
    assert list(store.folder.parent.rglob("*.*")) == []
    assert all(message.isprintable() for message in said(caplog))


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps permissions elsewhere")
def test_readable_key_is_logged_and_stops_the_store(store, caplog):
    store.put(GRAPH)
    (Trust().folder / "key").chmod(0o644)
    again = FolderStore(store.folder)
    assert again.get(GRAPH.key) is None
    assert again.put(graph("a")) is False
    assert again.note(key("a")) is None
    again.put_note(key("a"), b"[]")
    assert ["chmod 600" in message for message in said(caplog)] == [True, True]
    assert files(store) == [f"{GRAPH.key}.graph.safetensors"]


def test_clear_removes_only_the_stores_files(store):
    store.put(graph("a"))
    store.put_note(key("a"), b"[]")
    with store.exclusive(key("a")):
        pass
    (store.folder / ".store-new.compiled_graphs.partial").write_bytes(b"half")
    (store.folder / "notes.txt").write_bytes(b"mine")
    (store.folder / "mine").mkdir()
    assert [entry.name for entry in store.clear()] == [file_name("a")]
    assert sorted(path.name for path in store.folder.iterdir()) == ["mine", "notes.txt"]


COMPILER = """
import pickle, sys, time
from pathlib import Path
from compiled_graphs.compiler.storage import claims
from compiled_graphs.compiler.storage.store import FolderStore
store, graph = FolderStore(sys.argv[1]), pickle.loads(Path(sys.argv[2]).read_bytes())
print("ready", flush=True)
sys.stdin.readline()
with store.exclusive(graph.key):
    if store.get(graph.key) == graph:
        print("found", flush=True)
    else:
        time.sleep(0.5)
        store.put(graph)
        print("compiled", flush=True)
"""


def test_two_processes_compile_a_graph_once(store, tmp_path):
    (tmp_path / "graph").write_bytes(pickle.dumps(GRAPH))
    arguments = COMPILER, store.folder, tmp_path / "graph"
    with python(*arguments) as first, python(*arguments) as second:
        assert [process.stdout.readline() for process in (first, second)] == ["ready\n"] * 2
        for process in (first, second):
            process.stdin.write("go\n")
            process.stdin.flush()
        done = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert sorted(done) == ["compiled\n", "found\n"]


HOLDER = """
import sys, time
from compiled_graphs.compiler.storage import claims
from compiled_graphs.compiler.storage.store import FolderStore
with FolderStore(sys.argv[1]).exclusive(sys.argv[2]):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_killed_process_frees_its_lock(store, monkeypatch, caplog):
    with python(HOLDER, store.folder, "0123") as holder:
        assert holder.stdout.readline() == "held\n"
        monkeypatch.setattr(store_module, "LOCK_LIMIT", 0.2)
        with store.exclusive("0123"):
            assert len(said(caplog)) == 1
    caplog.clear()
    monkeypatch.setattr(store_module, "LOCK_LIMIT", 30)
    with store.exclusive("0123"):
        assert said(caplog) == []


def test_keys_that_begin_alike_are_compiled_at_the_same_time(store, monkeypatch, caplog):
    """Of 14 keys two begin with the same two characters in three of ten networks."""
    monkeypatch.setattr(store_module, "LOCK_LIMIT", 0.2)
    with store.exclusive("01" + "2" * 62), store.exclusive("01" + "3" * 62):
        assert said(caplog) == []


def test_threads_take_turns(store):
    inside, most = 0, 0

    def work():
        nonlocal inside, most
        with store.exclusive("0123"):
            inside += 1
            most = max(most, inside)
            time.sleep(0.02)
            inside -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (inside, most) == (0, 1)


def test_lock_timeout_goes_on_without_the_lock(store, monkeypatch, caplog):
    monkeypatch.setattr(store_module, "LOCK_LIMIT", 0.1)
    with store.exclusive("0123"):
        assert said(caplog) == []
        with FolderStore(store.folder).exclusive("0123"):
            (message,) = said(caplog)
            assert "compiles without waiting" in message
        with FolderStore(store.folder).exclusive("0123"):
            assert len(said(caplog)) == 2


def test_other_graphs_do_not_wait(store, monkeypatch, caplog):
    monkeypatch.setattr(store_module, "LOCK_LIMIT", 0.1)
    with store.exclusive("0123"), store.exclusive("1123"):
        assert said(caplog) == []


def test_locks_are_at_most_one_per_key_prefix(store):
    for number in range(600):
        with store.exclusive(f"{number % 256:02x}{number:062x}"):
            pass
    assert len(list((store.folder / store_module.LOCKS).iterdir())) <= 256


def test_lock_is_freed_by_an_error(store, monkeypatch, caplog):
    with pytest.raises(TimeoutError, match="mine"), store.exclusive("0123"):
        raise TimeoutError("mine")
    monkeypatch.setattr(store_module, "LOCK_LIMIT", 0.1)
    with store.exclusive("0123"):
        assert said(caplog) == []


@pytest.mark.parametrize("error", [NotImplementedError(), PermissionError(errno.EACCES, "denied"), OSError("strange")])
def test_unsupported_lock_is_not_logged(store, monkeypatch, caplog, error):
    monkeypatch.setattr(filelock.FileLock, "acquire", fail_with(error))
    with store.exclusive("0123"):
        assert store.put(GRAPH) is True
    assert said(caplog) == []


@pytest.mark.skipif(os.name == "nt", reason="Windows locks files in another way")
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EIO])
def test_a_folder_without_locks_keeps_nobody_waiting(store, monkeypatch, caplog, number):
    monkeypatch.setattr(fcntl, "flock", fail_with(OSError(number, "no locks here")))
    monkeypatch.setattr(store_module, "LOCK_LIMIT", 3600)
    for _ in range(2):
        with store.exclusive("0123"), FolderStore(store.folder).exclusive("0123"):
            assert store.put(GRAPH) is True
    assert said(caplog) == []


def test_missing_lock_folder_is_no_obstacle(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    with FolderStore(tmp_path / "file").exclusive("0123"):
        pass
    assert said(caplog) == []


class Bucket(MemoryFileSystem):
    """S3 as s3fs shows it: the listing is cached and has the field LastModified."""

    protocol = "s3"
    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]
    listed = None

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("s3://"))

    def ls(self, path, detail=True, **kwargs):
        if self.listed is None:
            self.listed = super().ls(path, detail=True)
            for info in self.listed:
                info["LastModified"] = datetime.fromtimestamp(info.pop("created"), timezone.utc)
        return self.listed

    def invalidate_cache(self, path=None):
        self.listed = None


class Unreachable(fsspec.AbstractFileSystem):
    """A file system in which every operation raises something other than OSError."""

    protocol = "unreachable"

    def fail(self, *args, **kwargs):
        raise RuntimeError("the endpoint cannot be reached")

    ls = info = _open = _rm = rm_file = pipe_file = cat_file = invalidate_cache = fail


class Unconnectable(Unreachable):
    protocol = "unconnectable"

    def __init__(self, *args, **kwargs):
        self.fail()


class Unlistable(MemoryFileSystem):
    protocol = "unlistable"
    ls = _rm = Unreachable.fail


@pytest.fixture
def drivers(monkeypatch):
    """Register these protocols in fsspec for a test, and empty its memory file system afterwards."""
    made = (Bucket, Unreachable, Unconnectable, Unlistable)
    for driver in made:
        monkeypatch.setitem(_registry, driver.protocol, driver)
    yield
    for driver in made:
        driver.clear_instance_cache()
    Bucket.store.clear()
    MemoryFileSystem.store.clear()


URLS = ["memory://graphs", "memory://graphs/", "memory://", "s3://bucket/fleet/graphs", "dir::memory://graphs"]


@pytest.mark.parametrize("url", URLS)
def test_a_graph_comes_back_from_a_url(drivers, url, caplog):
    store = open_store(url)
    assert isinstance(store, UrlStore)
    assert store.get(GRAPH.key) is None
    assert store.entries() == []
    assert store.put(GRAPH) is True
    assert store.get(GRAPH.key) == GRAPH
    assert UrlStore(url).get(GRAPH.key) == GRAPH
    assert store.keys() == {GRAPH.key}
    with store.exclusive(GRAPH.key), store.exclusive(GRAPH.key):
        pass
    assert [entry.name for entry in store.clear()] == [f"{GRAPH.key}.graph.safetensors"]
    assert store.entries() == []
    assert said(caplog) == []


def test_notes_come_back_from_a_url(drivers):
    UrlStore("memory://graphs").put_note(key("a"), b"[1]")
    assert UrlStore("memory://graphs").note(key("a")) == b"[1]"
    assert UrlStore("memory://graphs").note(key("b")) is None


def test_oversized_object_at_a_url_logs_one_sentence(drivers, caplog, monkeypatch):
    store = UrlStore("memory://graphs")
    store.put(GRAPH)
    monkeypatch.setattr(store_module, "MAX_FILE", 100)
    assert store.get(GRAPH.key) is None
    (message,) = said(caplog)
    assert "more than 100 bytes" in message


def test_foreign_files_at_a_url_stay(drivers):
    store, files = UrlStore("memory://graphs", limit=0), MemoryFileSystem()
    others = [name for name in OTHERS if "/" not in name]
    for name in others:
        files.pipe_file(f"graphs/{name}", b"theirs")
    store.put(graph("a"))
    store.put_note(key("a"), b"[]")
    assert keys(store) == ["a"]
    store.clear()
    assert sorted(path.rsplit("/", 1)[1] for path in files.ls("graphs", detail=False)) == sorted(others)


def test_a_restart_with_the_same_url_compiles_nothing(drivers):
    network = transformer()
    assert compile_network(network, Registry(GraphCache(UrlStore("s3://bucket/graphs")))).counters.compiles == 1
    again = compile_network(network, Registry(GraphCache(UrlStore("s3://bucket/graphs"))))
    assert (again.counters.compiles, again.counters.from_disk) == (0, 1)


def test_machines_that_share_a_url_compile_a_graph_once(drivers, monkeypatch):
    for name, seconds in (("SETTLE", 0.1), ("POLL", 0.02)):
        monkeypatch.setattr(claims, name, seconds)
    made = []

    def machine():
        store = UrlStore("s3://bucket/graphs")
        with store.exclusive(GRAPH.key):
            if store.get(GRAPH.key) is None:
                made.append(store)
                time.sleep(0.3)
                store.put(GRAPH)

    machines = [threading.Thread(target=machine) for _ in range(5)]
    for each in machines:
        each.start()
    for each in machines:
        each.join()
    assert len(made) == 1
    assert [entry.name for entry in UrlStore("s3://bucket/graphs").entries()] == [f"{GRAPH.key}.graph.safetensors"]
    assert [name for name in Bucket.store if name.endswith(".claim")] == []


def test_a_graph_that_is_there_is_not_claimed(drivers, monkeypatch):
    store = UrlStore("s3://bucket/graphs")
    store.put(GRAPH)
    monkeypatch.setattr(store_module._ClaimObject, "write", lambda place, data: pytest.fail("claimed"))
    with store.exclusive(GRAPH.key):
        pass


@pytest.mark.parametrize("is_damaged", [True, False], ids=["damaged", "of others"])
def test_a_graph_that_cannot_be_used_is_made_again_by_one_machine(drivers, tmp_path, monkeypatch, is_damaged):
    monkeypatch.setattr(claims, "SETTLE", 0.0)
    store, written = UrlStore("s3://bucket/graphs"), []
    if is_damaged:
        store.put(GRAPH)
        store._write(f"{GRAPH.key}.graph.safetensors", b"damaged")
    else:
        UrlStore("s3://bucket/graphs", Trust(tmp_path / "elsewhere")).put(GRAPH)
    write = store_module._ClaimObject.write
    monkeypatch.setattr(
        store_module._ClaimObject, "write", lambda place, data: written.append(data) or write(place, data)
    )
    with store.exclusive(GRAPH.key):
        assert written


@pytest.mark.parametrize("url", ["memory://graphs", "s3://bucket/graphs"])
def test_at_a_url_the_graphs_written_first_go_first(drivers, url):
    store = UrlStore(url)
    for word in ("c", "a", "b"):
        store.put(graph(word))
        time.sleep(0.002)
    assert store.get(key("c"))
    store.limit = 3 * only_size(store)
    store.put(graph("d"))
    assert keys(store) == ["a", "b", "d"]
    store.limit = 10
    store.put(graph("a"))
    assert keys(store) == ["a"]


def test_what_another_worker_wrote_counts(drivers):
    mine, theirs = UrlStore("s3://bucket/graphs"), UrlStore("s3://bucket/graphs")
    mine.put(graph("a"))
    Bucket(skip_instance_cache=True).pipe_file(f"bucket/graphs/{file_name('b')}", b"theirs")
    assert keys(mine) == keys(theirs) == ["a", "b"]


def test_a_url_holds_only_graphs_of_its_own_key(drivers, tmp_path, caplog):
    UrlStore("memory://graphs", Trust(tmp_path / "elsewhere")).put(GRAPH)
    assert UrlStore("memory://graphs").get(GRAPH.key) is None
    assert "not made on this machine" in said(caplog)[0]


def test_workers_that_share_the_key_share_the_graphs(drivers, tmp_path):
    (tmp_path / "shared").mkdir()
    UrlStore("memory://graphs", Trust(tmp_path / "shared")).put(GRAPH)
    assert UrlStore("memory://graphs", Trust(tmp_path / "shared")).get(GRAPH.key) == GRAPH


@pytest.mark.parametrize("url", ["unreachable://graphs", "unconnectable://graphs"])
def test_failing_driver_acts_as_an_empty_store(drivers, caplog, url):
    store = open_store(url)
    assert store.get(GRAPH.key) is None
    (message,) = said(caplog)
    assert "the endpoint cannot be reached" in message
    caplog.clear()
    assert store.put(GRAPH) is False
    (message,) = said(caplog)
    assert "the endpoint cannot be reached" in message
    assert url in message
    assert store.remove(file_name("a")) is False
    with store.exclusive(GRAPH.key):
        pass
    with pytest.raises(OSError, match="the endpoint cannot be reached"):
        store.entries()


def test_slow_url_is_not_asked_again_for_a_while(drivers, monkeypatch):
    now, asked = [0.0], []

    def fail_slowly(*args, **kwargs):
        asked.append(args)
        now[0] += store_module.PATIENCE + 1
        raise RuntimeError("timed out")

    monkeypatch.setattr(Unreachable, "cat_file", fail_slowly)
    monkeypatch.setattr(store_module.time, "monotonic", lambda: now[0])
    store = UrlStore("unreachable://graphs")
    assert [store.get(key("one")), store.get(key("two")), len(asked)] == [None, None, 1]
    now[0] += store_module.PAUSE
    assert [store.get(key("three")), len(asked)] == [None, 2]


def test_unreachable_url_still_serves_this_session(drivers):
    network = transformer()
    x = network.inputs(sizes())
    expected = network(*x)
    compiled = compile_network(network, Registry(GraphCache(UrlStore("unreachable://graphs"))))
    torch.testing.assert_close(network(*x), expected)
    assert compiled.summary().compiled == 1


def test_unlistable_url_still_keeps_graphs(drivers, caplog):
    store = UrlStore("unlistable://graphs", limit=0)
    assert store.put(GRAPH) is True
    assert store.get(GRAPH.key) == GRAPH
    assert said(caplog) == []


@pytest.mark.parametrize("place", ["{}", "file://{}", "local://{}"])
def test_a_folder_is_a_folder_however_it_is_named(tmp_path, place):
    store = open_store(place.format(tmp_path.as_posix()))
    assert isinstance(store, FolderStore)
    assert store.folder == tmp_path


@pytest.mark.parametrize("place", ["graphs", "C:\\graphs", "c:/graphs", "./a/graphs", "\\\\server\\graphs"])
def test_what_is_no_url_is_a_folder(place):
    store = open_store(place)
    assert isinstance(store, FolderStore)
    assert store.folder == Path(place)


def test_unknown_protocol_is_refused_in_one_sentence():
    with pytest.raises(StoreError, match=r"nonsense://x cannot be used .*nonsense.*s3://bucket/folder with s3fs"):
        open_store("nonsense://x")


@pytest.mark.parametrize("url", ["s3://bucket/graphs", "simplecache::s3://bucket/graphs"])
def test_missing_driver_names_the_package(monkeypatch, url):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(StoreError, match="not installed here: Install s3fs"):
        open_store(url)


@pytest.mark.parametrize("place", ["memory://graphs", "file:///graphs"])
def test_without_fsspec_a_folder_will_do(monkeypatch, store, place):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    assert store.put(GRAPH) is True
    with pytest.raises(StoreError, match="fsspec"):
        open_store(place)


def test_a_password_is_not_shown(drivers, caplog):
    store = UrlStore("unreachable://somebody:secret@host/graphs")
    store.put(GRAPH)
    (message,) = said(caplog)
    assert "unreachable://host/graphs" in message
    with pytest.raises(StoreError) as error:
        open_store("nonsense://somebody:secret@host/graphs")
    assert "secret" not in message + str(error.value)
