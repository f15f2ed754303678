from __future__ import annotations

import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from compiled_graphs import __main__ as command_line
from compiled_graphs.__main__ import main
from compiled_graphs.compiler.backends import BACKENDS
from compiled_graphs.compiler.identity.graph_spec import GraphSpec
from compiled_graphs.compiler.registry import doctor
from compiled_graphs.compiler.storage import graph_file
from compiled_graphs.compiler.storage.graph_file import StoredGraph, UntrustedFile, read_graphs, write_graphs
from compiled_graphs.compiler.storage.store import FolderStore
from compiled_graphs.compiler.storage.trust import Trust
from safetensors.numpy import save


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """Return the path of a file that another machine signed."""
    monkeypatch.setenv("COMPILED_GRAPHS_TRUST", str(tmp_path / "mine"))
    path = tmp_path / "foreign.graph.safetensors"
    path.write_bytes(write_graphs([], Trust(tmp_path / "theirs")))
    return path


def test_the_owner_can_trust_a_file(foreign, capsys):
    with pytest.raises(UntrustedFile):
        read_graphs(foreign.read_bytes(), Trust())
    assert main(["trust", "add", str(foreign), "--yes"]) == 0
    assert "is trusted" in capsys.readouterr().out
    assert read_graphs(foreign.read_bytes(), Trust()) == []


@pytest.fixture
def signed(foreign, tmp_path, capsys):
    """Return the path of a file that another machine signed for others, and its fingerprint."""
    pytest.importorskip("cryptography")
    theirs = Trust(tmp_path / "theirs")
    made = theirs.maker.make()
    foreign.write_bytes(write_graphs([], theirs))
    return foreign, made


def test_a_signer_is_trusted_listed_and_removed(signed, capsys):
    path, made = signed
    assert main(["trust", "list"]) == 0
    assert "Only graphs of this machine's own key run here." in capsys.readouterr().out
    assert main(["trust", "add", str(path), "--yes", "--name", "Alice\x1b[2J  B."]) == 0
    assert read_graphs(path.read_bytes(), Trust()) == []
    capsys.readouterr()
    assert main(["trust", "list"]) == 0
    assert capsys.readouterr().out.split(maxsplit=2) == ["signer", made, "Alice?[2J B.\n"]
    assert main(["trust", "remove", made]) == 0
    with pytest.raises(UntrustedFile):
        read_graphs(path.read_bytes(), Trust())
    assert main(["trust", "remove", made]) == 1


def test_a_fingerprint_is_trusted_before_there_is_a_file(signed):
    path, made = signed
    assert main(["trust", "add", made, "--yes"]) == 0
    assert read_graphs(path.read_bytes(), Trust()) == []


def test_one_file_is_trusted_and_its_signer_is_not(signed, tmp_path, capsys):
    path, _ = signed
    assert main(["trust", "add", str(path), "--yes", "--file-only"]) == 0
    assert read_graphs(path.read_bytes(), Trust()) == []
    other = write_graphs([graph("cd" * 32)], Trust(tmp_path / "theirs"))
    with pytest.raises(UntrustedFile):
        read_graphs(other, Trust())
    capsys.readouterr()
    assert main(["trust", "list"]) == 0
    (digest,) = Trust().trusted_digests()
    assert capsys.readouterr().out == f"file    {digest}\n"
    assert main(["trust", "remove", digest]) == 0
    with pytest.raises(UntrustedFile):
        read_graphs(path.read_bytes(), Trust())


@pytest.mark.parametrize(("answer", "status"), [("yes\n", 0), ("YES \n", 0), ("\n", 1), ("y\n", 1)])
def test_the_owner_is_asked_in_words_that_say_what_trust_means(signed, answer, status, monkeypatch, capsys):
    path, made = signed
    stream = io.StringIO(answer)
    stream.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", stream)
    assert main(["trust", "add", str(path)]) == status
    out = capsys.readouterr().out
    assert "Graphs are native code." in out
    assert made in out
    assert [signer.fingerprint for signer in Trust().signers.read()] == ([] if status else [made])


def test_where_nobody_can_answer_nobody_is_trusted(signed, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("yes\n"))
    assert main(["trust", "add", str(signed[0])]) == 1
    assert "--yes" in capsys.readouterr().err
    assert Trust().signers.read() == []


def test_a_key_is_made_shown_and_made_again(monkeypatch, tmp_path, capsys):
    pytest.importorskip("cryptography")
    monkeypatch.setenv("COMPILED_GRAPHS_TRUST", str(tmp_path / "mine"))
    assert main(["key", "show"]) == 1
    assert "`key new` makes one" in capsys.readouterr().err
    shown = []
    for _ in range(2):
        assert main(["key", "new"]) == 0
        assert main(["key", "show"]) == 0
        shown.append(capsys.readouterr().out.splitlines()[-1])
    assert len(set(shown)) == 2
    assert all(re.fullmatch("SHA256:.{43}", line) for line in shown)


def test_trusting_repeats_no_escape_sequence(foreign, tmp_path, capsys):
    named = tmp_path / "\x1b[2J.graph.safetensors"
    named.write_bytes(foreign.read_bytes())
    assert main(["trust", "add", str(named), "--yes"]) == 0
    named.write_bytes(save({}, {"compiled_graphs": json.dumps({"format": "\x1b[2J\n\x9b"})}))
    assert main(["trust", "add", str(named), "--yes"]) == 1
    out, err = capsys.readouterr()
    assert [text.count("?[2J") for text in (out, err)] == [1, 1]
    assert not any(text.rstrip("\n").count(character) for text in (out, err) for character in "\x1b\x9b\n")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
def test_a_pipe_is_not_waited_for(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    assert main(["trust", "add", str(tmp_path / "pipe"), "--yes"]) == 1
    assert "a pipe" in capsys.readouterr().err


def test_output_replaces_characters_that_the_stream_lacks(foreign, tmp_path, monkeypatch):
    named = tmp_path / "gr\u00fc\u00dfe\u2192.graph.safetensors"
    named.write_bytes(foreign.read_bytes())
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["trust", "add", str(named), "--yes"]) == 0
    stream.flush()
    assert stream.buffer.getvalue().startswith(b"gr??e?.graph.safetensors, 0 graphs")


@pytest.mark.parametrize("content", [None, b"no graphs"])
def test_invalid_file_is_not_trusted(tmp_path, monkeypatch, capsys, content):
    monkeypatch.setenv("COMPILED_GRAPHS_TRUST", str(tmp_path / "mine"))
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    assert main(["trust", "add", str(path), "--yes"]) == 1
    assert "cannot be trusted" in capsys.readouterr().err
    assert not Trust().trusted_digests()


def test_it_runs_as_a_module(foreign):
    command = [sys.executable, "-m", "compiled_graphs", "trust", "add", str(foreign), "--yes"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("name", ["compiled-graphs", "compiled graphs.v1"])
def test_it_runs_by_the_path_of_its_folder(tmp_path, name):
    """As Windows' portable Python needs it. It looks for modules neither in the current folder nor in PYTHONPATH."""
    folder = tmp_path / name
    folder.symlink_to(Path(__file__).parents[1], target_is_directory=True)
    environment = os.environ | {"COMPILED_GRAPHS_TRUST": str(tmp_path / "trust")}
    command = [sys.executable, "-I", str(folder), "trust"]
    listed = subprocess.run([*command, "list"], env=environment, capture_output=True, text=True, check=False)
    assert (listed.returncode, "Only graphs of this machine's own key run here." in listed.stdout) == (0, True)
    failed = subprocess.run([*command, "add", "nowhere"], env=environment, capture_output=True, text=True, check=False)
    assert failed.returncode == 1


def graph(key, region="Block"):
    """Return a graph with 2 MB of noise, which does not compress."""
    spec = GraphSpec(
        region=region, device="cpu", weights=(), inputs=(), guards=(), mutated=(), outputs=(True,), tree="[1, {}]"
    )
    return StoredGraph(key, "ab", "[]", "eager", {}, spec, random.Random(key).randbytes(2_000_000))


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Return a store with two graphs that the command line finds."""
    monkeypatch.setenv("COMPILED_GRAPHS_TRUST", str(tmp_path / "mine"))
    monkeypatch.setenv("COMPILED_GRAPHS_STORE", str(tmp_path / "graphs"))
    monkeypatch.delenv("COMPILED_GRAPHS_STORE_LIMIT", raising=False)
    store = FolderStore(tmp_path / "graphs")
    store.put(graph("a" * 64, "FirstBlock"))
    store.put(graph("b" * 64, "SecondBlock"))
    used(store, "a", "2021-03-04 05:06")
    used(store, "b", "2022-03-04 05:06")
    return store


def path_of(store, letter):
    return store.folder / f"{letter * 64}.graph.safetensors"


def used(store, letter, when):
    then = time.mktime(time.strptime(when, "%Y-%m-%d %H:%M"))
    os.utime(path_of(store, letter), (then, then))


def spoil(store, tmp_path):
    """Add a damaged graph, a foreign graph, and a graph in a file with another graph's name."""
    data = bytearray(path_of(store, "a").read_bytes())
    data[-1] ^= 1
    path_of(store, "d").write_bytes(data)
    FolderStore(store.folder, Trust(tmp_path / "theirs")).put(graph("f" * 64, "Foreign"))
    path_of(store, "9").write_bytes(path_of(store, "a").read_bytes())


def names(store):
    return "".join(sorted(path.name[0] for path in store.folder.iterdir()))


def test_list_says_what_each_graph_is(store, capsys):
    assert main(["store", "list"]) == 0
    second, first, total = capsys.readouterr().out.splitlines()
    assert first.split() == ["a" * 16, "FirstBlock", "eager", "2.0", "MB", "2021-03-04", "05:06"]
    assert second.split() == ["b" * 16, "SecondBlock", "eager", "2.0", "MB", "2022-03-04", "05:06"]
    assert total.startswith("2 graphs, 4.0 MB, of 10000.0 MB in ")


def test_list_reads_any_file_and_is_no_use_of_it(store, tmp_path, capsys):
    spoil(store, tmp_path)
    path_of(store, "8").write_bytes(b"no graph")
    before = store.entries()
    assert main(["store", "list"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 7
    assert "Foreign" in out
    assert "not a graph file" in out
    assert sorted(before, key=str) == sorted(store.entries(), key=str)


def test_names_in_a_foreign_file_do_not_steer_the_terminal(store, tmp_path, capsys):
    FolderStore(store.folder, Trust(tmp_path / "theirs")).put(graph("f" * 64, "\x1b[2J\nBlock"))
    assert main(["store", "list"]) == 0
    out = capsys.readouterr().out
    assert "?[2J?Block" in out
    assert "\x1b" not in out


def test_verify_finds_nothing_in_a_good_store(store, capsys):
    assert main(["store", "verify"]) == 0
    (total,) = capsys.readouterr().out.splitlines()
    assert total.startswith("2 graphs, 4.0 MB,")
    assert total.endswith("; 0 bad")


def test_verify_says_what_is_wrong_with_each_file(store, tmp_path, capsys):
    spoil(store, tmp_path)
    assert main(["store", "verify"]) == 1
    *lines, total = capsys.readouterr().out.splitlines()
    said = {line[0]: line for line in lines}
    assert sorted(said) == ["9", "d", "f"]
    assert "damaged" in said["d"]
    assert "not made on this machine" in said["f"]
    assert "not hold the graph that its name says" in said["9"]
    assert total.endswith("; 3 bad")
    assert names(store) == "9abdf"


def test_prune_removes_damaged_and_misnamed_but_not_foreign(store, tmp_path, capsys):
    spoil(store, tmp_path)
    for writer, hours in (("store-dead", 2), ("store-living", 0), ("saved-dead", 2)):
        path = store.folder / f".{writer}.compiled_graphs.partial"
        path.write_bytes(b"half")
        os.utime(path, (time.time() - 3600 * hours,) * 2)
    (store.folder / "zebra.txt").write_bytes(b"mine")
    assert main(["store", "prune"]) == 0
    assert names(store) == "..abfz"
    *lines, total = capsys.readouterr().out.splitlines()
    assert sorted(line.split()[1][0] for line in lines) == [".", "9", "d"]
    assert total.startswith("3 graphs, 6.0 MB, left")


def test_prune_brings_the_store_under_its_limit(store, monkeypatch, capsys):
    store.put(graph("c" * 64))
    monkeypatch.setenv("COMPILED_GRAPHS_STORE_LIMIT", "0.005")
    assert main(["store", "prune"]) == 0
    assert names(store) == "bc"
    assert "last used 2021-03-04 05:06" in capsys.readouterr().out
    assert main(["store", "prune", "--limit", "0.003"]) == 0
    assert names(store) == "c"
    assert main(["store", "prune", "--limit", "0"]) == 0
    assert names(store) == ""


def test_prune_leaves_what_comfyuis_settings_allow(store, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("COMPILED_GRAPHS_STORE_LIMIT", raising=False)
    installed = tmp_path / "ComfyUI" / "custom_nodes" / "compiled_graphs" / "__main__.py"
    monkeypatch.setattr(command_line, "__file__", str(installed))
    settings = tmp_path / "ComfyUI" / "user" / "default" / "comfy.settings.json"
    settings.parent.mkdir(parents=True)
    settings.write_text('{"CompiledGraphs.StoreLimit": 0.003}')
    assert main(["store", "prune"]) == 0
    assert names(store) == "ab"  # a place that has been named is not the dialog's
    monkeypatch.delenv("COMPILED_GRAPHS_STORE")
    shutil.copytree(store.folder, default := settings.parents[1] / "compiled_graphs")
    store = FolderStore(default)
    assert main(["store", "list"]) == 0
    assert " of 3.0 MB in " in capsys.readouterr().out
    assert main(["store", "prune", "--limit", "0.005"]) == 0
    assert names(store) == "ab"
    assert main(["store", "prune"]) == 0
    assert names(store) == "b"


def test_graphs_of_another_version_are_not_damaged(store, capsys):
    with pytest.MonkeyPatch.context() as newer:
        newer.setattr(graph_file, "FORMAT", graph_file.FORMAT + 1)
        path_of(store, "c").write_bytes(graph_file.write_graphs([graph("c" * 64)], Trust()))
    assert main(["store", "verify"]) == 0
    assert main(["store", "prune"]) == 0
    assert names(store) == "abc"
    assert "and this version reads" in capsys.readouterr().out


@pytest.mark.parametrize("limit", ["much", "-1", "nan"])
def test_invalid_limit_removes_nothing(store, limit):
    with pytest.raises(SystemExit) as exit_:
        main(["store", "prune", f"--limit={limit}"])
    assert exit_.value.code == 2
    assert names(store) == "ab"


def test_clear_command_removes_only_the_stores_files(store, capsys):
    with store.exclusive("a" * 64):
        pass
    (store.folder / ".store-new.compiled_graphs.partial").write_bytes(b"half")
    (store.folder / "zebra.txt").write_bytes(b"mine")
    assert main(["store", "clear"]) == 0
    assert capsys.readouterr().out.startswith("2 graphs, 4.0 MB, removed from ")
    assert names(store) == "z"


@pytest.mark.parametrize("action", [["prune", "--limit", "0"], ["clear"]])
def test_foreign_files_in_the_stores_folder_stay(store, action):
    data = path_of(store, "a").read_bytes()
    others = ["sdxl_00001_.graph.safetensors", "unet.graph.safetensors", "x.wanted.json", ".download.partial"]
    for name in [*others, "damaged_00001_.graph.safetensors", "locks/apt.lock"]:
        path = store.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data[: len(data) // 2] if "damaged" in name else data)
        os.utime(path, (0, 0))
    assert main(["store", *action]) == 0
    left = sorted(path.name for path in store.folder.rglob("*") if path.is_file())
    assert left == sorted([*others, "damaged_00001_.graph.safetensors", "apt.lock"])


def test_verify_and_prune_print_one_line_per_hostile_file(store, capsys):
    data = path_of(store, "a").read_bytes()
    begin = data.index(b'"signature":"') + len(b'"signature":"')
    path_of(store, "1").write_bytes(data[:begin] + b"\\ud800" + data[begin + 6 :])
    path_of(store, "2").write_bytes((2**22).to_bytes(8, "little") + b"[]," * 2**21)
    path_of(store, "3").touch()
    os.truncate(path_of(store, "3"), 6 * 2**30)
    for action, status in (("list", 0), ("verify", 1), ("prune", 0)):
        assert main(["store", action]) == status
    assert names(store) == "ab"
    assert len(capsys.readouterr().out.splitlines()) == 6 + 4 + 4


def test_clear_says_what_it_could_not_remove(store, monkeypatch, capsys):
    monkeypatch.setattr(FolderStore, "remove", lambda store, name: False)
    assert main(["store", "clear"]) == 1
    assert "2 graphs, 4.0 MB, left" in capsys.readouterr().out


def test_a_place_on_the_command_line_comes_first(store, tmp_path, capsys):
    FolderStore(tmp_path / "other").put(graph("c" * 64))
    assert main(["store", "list", "--store", str(tmp_path / "other")]) == 0
    assert capsys.readouterr().out.startswith("cccc")
    assert main(["store", "list", "--store", (tmp_path / "other").as_uri()]) == 0
    assert capsys.readouterr().out.startswith("cccc")
    assert main(["store", "list", "--store", "memory://nothing"]) == 0
    assert capsys.readouterr().out.startswith("0 graphs")


def test_a_package_below_the_root_knows_no_comfyui(store, monkeypatch, capsys):
    monkeypatch.setattr(command_line, "__file__", "/compiled_graphs/__main__.py")
    assert main(["store", "list"]) == 0
    assert " of 10000.0 MB in " in capsys.readouterr().out


def test_by_default_it_is_comfyuis_user_folder(store, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("COMPILED_GRAPHS_STORE")
    installed = tmp_path / "ComfyUI" / "custom_nodes" / "compiled_graphs" / "__main__.py"
    monkeypatch.setattr(command_line, "__file__", str(installed))
    assert main(["store", "list"]) == 2
    assert "--store" in capsys.readouterr().err
    FolderStore(tmp_path / "ComfyUI" / "user" / "compiled_graphs").put(graph("c" * 64))
    assert main(["store", "list"]) == 0
    assert capsys.readouterr().out.startswith("cccc")


@pytest.mark.parametrize("action", ["list", "verify", "prune", "clear"])
@pytest.mark.parametrize("place", ["{}/missing", "{}/file", "nonsense://place"])
def test_bad_place_is_one_sentence(tmp_path, capsys, action, place):
    (tmp_path / "file").write_text("in the way")
    assert main(["store", action, "--store", place.format(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1


def test_unlistable_store_is_one_sentence(store, monkeypatch, capsys):
    def denied(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(FolderStore, "_list", denied)
    assert main(["store", "list"]) == 2
    assert "Permission denied" in capsys.readouterr().err


def test_backends_are_listed_with_versions_or_reasons(monkeypatch, capsys):
    monkeypatch.setattr(type(BACKENDS["inductor"]), "available", lambda self, device: "Install a compiler.")
    monkeypatch.setattr(type(BACKENDS["oneflow"]), "available", lambda self, device: "OneFlow is not there.")
    assert main(["backends"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [lines[0], lines[3]] == ["inductor: Install a compiler.", "oneflow: OneFlow is not there."]
    assert lines[1].startswith("inductor_fp8: ")
    assert re.fullmatch(rf"eager: can be used on \w+ \(torch {re.escape(torch.__version__)}\)", lines[2])


@pytest.mark.parametrize(("ok", "status"), [(True, 0), (False, 1)])
def test_doctor_prints_a_line_per_fact_and_returns_a_status(monkeypatch, capsys, ok, status):
    facts = [
        doctor.Fact("torch", "2.8.0"),
        doctor.Fact("oneflow", "not installed", present=False),
        doctor.Fact("store", "a\x1b[2Jb", ok, "" if ok else "Make room."),
    ]
    monkeypatch.setattr(doctor, "examine", lambda around: facts)
    assert main(["doctor"]) == status
    store = "ok  store: a?[2Jb" if ok else "!!  store: a?[2Jb. Make room."
    assert capsys.readouterr().out.splitlines() == ["ok  torch: 2.8.0", "--  oneflow: not installed", store]


def test_the_doctor_is_told_where_comfyuis_folders_are(tmp_path, monkeypatch, capsys):
    """In containers the code and the folders of models and users are often in two places."""
    monkeypatch.delenv("COMPILED_GRAPHS_STORE", raising=False)
    monkeypatch.setenv("COMPILED_GRAPHS_TRUST", str(tmp_path / "trust"))
    code, base, user = tmp_path / "code", tmp_path / "base", tmp_path / "user"
    code.mkdir()
    (code / "comfyui_version.py").write_text('__version__ = "0.33.0"\n')
    (base / "custom_nodes" / "teacache").mkdir(parents=True)
    main(["doctor", "--comfyui", str(code), "--base-directory", str(base)])
    out = capsys.readouterr().out
    assert f"ok  ComfyUI: 0.33.0, in {code}, with its folders in {base}\n" in out
    assert f"ok  store: {base / 'user' / 'compiled_graphs'}, 0 graphs" in out
    assert "ok  TeaCache: teacache" in out
    main(["doctor", "--comfyui", str(code), "--user-directory", str(user)])
    assert f"ok  store: {user / 'compiled_graphs'}, 0 graphs" in capsys.readouterr().out


def test_the_doctor_looks_at_this_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COMPILED_GRAPHS_TRUST", str(tmp_path / "trust"))
    monkeypatch.setenv("COMPILED_GRAPHS_STORE", str(tmp_path / "file" / "store"))
    (tmp_path / "file").touch()
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len({line.split(":")[0] for line in lines}) > len(BACKENDS)
    assert any(line.startswith(f"!!  store: {tmp_path}") for line in lines)
