from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
import torch
from compiled_graphs.__main__ import main
from compiled_graphs.baking import bundle
from compiled_graphs.compiler.backends import BACKENDS
from compiled_graphs.compiler.compile_cache.key import environment
from compiled_graphs.compiler.hosts.comfy.rules.host import HOST
from compiled_graphs.compiler.identity.graph_spec import GraphSpec
from compiled_graphs.compiler.storage.graph_file import SUFFIX, StoredGraph, read_contents, read_manifest, write_graphs
from compiled_graphs.compiler.storage.store import FolderStore
from compiled_graphs.compiler.storage.trust import Trust

HERE = environment(BACKENDS["eager"], torch.device("cpu"), HOST)
SPEC = GraphSpec("Block", "cpu", (), (), (), (), (), "")


def graph(number, spec=SPEC, **fields):
    key = hashlib.sha256(b"%d" % number).hexdigest()
    return StoredGraph(key, "f" * 64, "[]", "eager", {**HERE, **fields}, spec, b"x" * number)


OURS, OTHER_TORCH, OTHER_MODEL = graph(1), graph(2, torch="1.0"), graph(3, replace(SPEC, region="Other"))


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPILED_GRAPHS_TRUST", str(tmp_path / "mine"))
    monkeypatch.setenv("COMPILED_GRAPHS_STORE", str(tmp_path / "store"))


@pytest.fixture
def files(tmp_path):
    """Two graph files of this machine."""
    paths = [tmp_path / f"{number}{SUFFIX}" for number in (1, 2)]
    for path, graphs in zip(paths, ([OURS, OTHER_MODEL], [OURS, OTHER_TORCH]), strict=True):
        path.write_bytes(write_graphs(graphs, Trust()))
    return [str(path) for path in paths]


def test_files_and_a_store_become_one_file_that_says_what_it_is(files, tmp_path, capsys):
    FolderStore(tmp_path / "store").put(graph(4))
    target = tmp_path / f"all{SUFFIX}"
    command = ["bundle", "make", str(tmp_path / "all"), *files, "--store", str(tmp_path / "store")]
    assert main([*command, "--where", "ask Alice"]) == 0
    assert {entry.key for entry in read_manifest(target.read_bytes())} == {graph(n).key for n in (1, 2, 3, 4)}
    made = capsys.readouterr().out
    assert main(["bundle", "show", str(target)]) == 0
    assert capsys.readouterr().out == made
    for text in (
        "4 graphs",
        "torch 1.0",
        "Block, Other",
        "where: ask Alice",
        hashlib.sha256(target.read_bytes()).hexdigest(),
    ):
        assert text in made


def test_a_bundle_keeps_what_it_has(files, tmp_path):
    for file in files:
        assert main(["bundle", "make", str(tmp_path / "all"), file, "--where", file]) == 0
    data = (tmp_path / f"all{SUFFIX}").read_bytes()
    assert len(read_manifest(data)) == 3


def test_a_file_of_others_is_not_put_into_a_bundle(files, tmp_path, capsys):
    theirs = tmp_path / f"theirs{SUFFIX}"
    theirs.write_bytes(write_graphs([OURS], Trust(tmp_path / "theirs")))
    assert main(["bundle", "make", str(tmp_path / "all"), str(theirs)]) == 2
    assert "not made on this machine" in capsys.readouterr().out
    assert not (tmp_path / f"all{SUFFIX}").exists()
    (tmp_path / f"all{SUFFIX}").write_bytes(theirs.read_bytes())
    assert main(["bundle", "make", str(tmp_path / "all"), files[0]]) == 2
    assert (tmp_path / f"all{SUFFIX}").read_bytes() == theirs.read_bytes()


def test_a_store_takes_what_fits_and_says_what_does_not(files, tmp_path, capsys):
    (tmp_path / "store").mkdir()
    assert main(["store", "add", *files]) == 0
    assert FolderStore(tmp_path / "store").keys() == {OURS.key, OTHER_MODEL.key}
    said = capsys.readouterr().out
    assert "2 graphs added" in said
    assert "0 graphs added" in said
    assert "1 were there" in said
    assert "not taken: 1 graphs for cpu, torch 1.0, eager: Block" in said.replace(str(HERE.get("device", "")), "cpu")
    assert main(["store", "add", "--all", *files]) == 0
    assert OTHER_TORCH.key in set(FolderStore(tmp_path / "store").keys())


def test_a_store_takes_nothing_of_others(tmp_path, capsys):
    (tmp_path / "store").mkdir()
    theirs = tmp_path / f"theirs{SUFFIX}"
    theirs.write_bytes(write_graphs([OURS], Trust(tmp_path / "theirs")))
    assert main(["store", "add", str(theirs)]) == 1
    assert "not made on this machine" in capsys.readouterr().out
    assert FolderStore(tmp_path / "store").keys() == set()


def test_files_that_cannot_be_read_are_named_and_the_others_are_taken(files, tmp_path, capsys):
    store, damaged = FolderStore(tmp_path / "store"), tmp_path / f"damaged{SUFFIX}"
    store.put(graph(4))
    store.put(graph(5))
    path = store.folder / f"{graph(5).key}{SUFFIX}"
    path.write_bytes(path.read_bytes()[:-1])
    damaged.write_bytes(b"damaged")
    command = ["bundle", "make", str(tmp_path / "all"), files[0], str(damaged), "--store", str(store.folder)]
    assert main(command) == 1
    said = capsys.readouterr().out
    assert f"{damaged.name}: the file is not a graph file" in said
    assert f"not in the bundle: {graph(5).key[:16]}: " in said
    made = read_manifest((tmp_path / f"all{SUFFIX}").read_bytes())
    assert {entry.key for entry in made} == {graph(n).key for n in (1, 3, 4)}


def test_a_graph_that_is_gone_from_the_store_is_said(tmp_path):
    FolderStore(tmp_path / "store").put(OURS)
    said = []
    keys = [OURS.key, OTHER_MODEL.key]
    assert bundle.write_from_store(tmp_path / "all", str(tmp_path / "store"), keys, said.append) == 1
    assert said[0].startswith("  not in the bundle: ")
    assert len(read_manifest((tmp_path / f"all{SUFFIX}").read_bytes())) == 1


def test_only_wanted_graphs_are_read(files, tmp_path):
    main(["bundle", "make", str(tmp_path / "all"), *files])
    data = (tmp_path / f"all{SUFFIX}").read_bytes()
    contents = read_contents(data, Trust(), lambda entry: entry.spec.region == "Other")
    assert contents.graphs == [OTHER_MODEL]
    assert {entry.key for entry in contents.listed} == {OURS.key, OTHER_TORCH.key}
    foreign = read_contents(data, Trust(tmp_path / "another"), lambda entry: entry.spec.region == "Other")
    assert (foreign.graphs, len(foreign.listed)) == ([], 3)
    assert foreign.untrusted


@pytest.mark.parametrize(("device", "needs"), [("cpu", "no compiler"), ("cuda", "Triton; on AMD, or with another")])
def test_a_file_says_what_its_graphs_need(device, needs, tmp_path, capsys):
    path = tmp_path / f"one{SUFFIX}"
    path.write_bytes(write_graphs([graph(1, replace(SPEC, device=device))], Trust()))
    assert main(["bundle", "show", str(path)]) == 0
    assert f"to run them: {needs}" in capsys.readouterr().out
