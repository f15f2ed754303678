from __future__ import annotations

import errno
import os
import stat
import threading

import pytest
from compiled_graphs.compiler.trust import Trust, default_folder


@pytest.fixture
def trust(tmp_path):
    return Trust(tmp_path / "trust")


def test_a_signature_covers_its_manifest_and_no_other(trust):
    signature = trust.sign(b"manifest")
    assert trust.covers(b"manifest", signature, b"file")
    assert not trust.covers(b"manifesto", signature, b"file")
    assert not trust.covers(b"manifest", "", b"file")
    assert not trust.covers(b"manifest", "é", b"file")


def test_the_key_survives_a_restart_and_is_the_owners_alone(trust):
    signature = trust.sign(b"manifest")
    assert Trust(trust.folder).covers(b"manifest", signature, b"file")
    if os.name != "nt":
        assert stat.S_IMODE((trust.folder / "key").stat().st_mode) == 0o600


def test_two_machines_do_not_trust_each_other(trust, tmp_path):
    assert not Trust(tmp_path / "other").covers(b"manifest", trust.sign(b"manifest"), b"file")


def test_processes_that_start_together_share_one_key(tmp_path):
    signatures = []
    threads = [
        threading.Thread(target=lambda: signatures.append(Trust(tmp_path / "trust").sign(b"manifest")))
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(signatures)) == 1
    assert [path.name for path in (tmp_path / "trust").iterdir()] == ["key"]


def test_a_folder_without_hard_links_has_a_key_as_well(trust, monkeypatch):
    def refuse(source, target):
        raise PermissionError(errno.EPERM, "Operation not permitted", source)

    monkeypatch.setattr(os, "link", refuse)
    test_the_key_survives_a_restart_and_is_the_owners_alone(trust)
    assert [path.name for path in trust.folder.iterdir()] == ["key"]


def test_only_the_very_file_that_was_trusted_is(trust):
    trust.add(b"file")
    trust.add(b"file")
    assert trust.covers(b"manifest", "", b"file")
    assert not trust.covers(b"manifest", "", b"file2")
    assert len(trust.trusted_digests()) == 1


def test_a_damaged_key_signs_nothing_and_trusts_nothing(trust):
    trust.folder.mkdir()
    (trust.folder / "key").write_bytes(b"short")
    with pytest.raises(OSError, match="not a key"):
        trust.sign(b"manifest")
    assert not trust.covers(b"manifest", "", b"file")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"COMPILED_GRAPHS_TRUST": "/named"}, "/named"),
        ({"XDG_CONFIG_HOME": "/config"}, "/config/compiled_graphs"),
        ({"HOME": "/home/me"}, "/home/me/.config/compiled_graphs"),
    ],
)
@pytest.mark.skipif(os.name == "nt", reason="POSIX folders")
def test_the_folder_is_the_owners_configuration(monkeypatch, environment, expected):
    for name in ("COMPILED_GRAPHS_TRUST", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(default_folder()) == expected
