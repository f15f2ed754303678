from __future__ import annotations

import errno
import io
import os
import stat
import threading

import pytest
from compiled_graphs.compiler.storage.private_files import UnusableKey
from compiled_graphs.compiler.storage.trust import KEY_BYTES, Trust, default_folder

POSIX = pytest.mark.skipif(os.name == "nt", reason="Windows keeps permissions elsewhere")


@pytest.fixture
def trust(tmp_path):
    return Trust(tmp_path / "trust")


def test_a_signature_covers_its_manifest_and_no_other(trust):
    signature = trust.sign(b"manifest")
    assert trust.signed(b"manifest", signature)
    assert not trust.signed(b"manifesto", signature)
    assert not any(trust.signed(b"manifest", wrong) for wrong in ("", "é", "\ud800", signature + "\ud800"))


def test_key_survives_a_restart_and_is_private(trust):
    signature = trust.sign(b"manifest")
    assert Trust(trust.folder).signed(b"manifest", signature)
    if os.name != "nt":
        assert stat.S_IMODE((trust.folder / "key").stat().st_mode) == 0o600


def test_two_machines_do_not_trust_each_other(trust, tmp_path):
    assert not Trust(tmp_path / "other").signed(b"manifest", trust.sign(b"manifest"))


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


def test_key_without_hard_links(trust, monkeypatch):
    def refuse(source, target):
        raise PermissionError(errno.EPERM, "Operation not permitted", source)

    monkeypatch.setattr(os, "link", refuse)
    test_key_survives_a_restart_and_is_private(trust)
    assert [path.name for path in trust.folder.iterdir()] == ["key"]


def test_only_the_very_file_that_was_trusted_is(trust):
    for _ in range(2):
        trust.add(io.BytesIO(b"file"))
    assert trust.trusts(io.BytesIO(b"file"))
    assert not trust.trusts(io.BytesIO(b"file2"))
    assert len(trust.trusted_digests()) == 1


def test_a_list_that_was_edited_loses_nothing(trust):
    first = trust.add(io.BytesIO(b"first"))
    (trust.folder / "trusted").write_text(first)  # some editors leave out the last newline
    trust.add(io.BytesIO(b"second"))
    assert all(trust.trusts(io.BytesIO(content)) for content in (b"first", b"second"))


@pytest.mark.parametrize("length", [0, 5, KEY_BYTES + 1, 10_000])
def test_a_damaged_key_signs_and_trusts_nothing(trust, length):
    trust.folder.mkdir()
    write_own(trust.folder / "key", bytes(length))
    with pytest.raises(UnusableKey, match="not a key"):
        trust.sign(b"manifest")
    with pytest.raises(UnusableKey, match="not a key"):
        trust.signed(b"manifest", "")


def write_own(path, data):
    path.write_bytes(data)
    path.chmod(0o600)


@POSIX
@pytest.mark.parametrize("umask", [0, 0o022, 0o777])
def test_files_are_private_whatever_the_umask(tmp_path, umask):
    trust = Trust(tmp_path / "config" / "trust")
    before = os.umask(umask & ~0o700)
    try:
        trust.sign(b"manifest")
        trust.add(io.BytesIO(b"file"))
    finally:
        os.umask(before)
    made = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "config").rglob("*")}
    assert made == {"trust": 0o700, "key": 0o600, "trusted": 0o600}
    assert stat.S_IMODE((tmp_path / "config").stat().st_mode) == 0o700


@POSIX
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o602, 0o777])
def test_readable_key_is_refused_with_a_reason(trust, mode):
    signature = trust.sign(b"manifest")
    (trust.folder / "key").chmod(mode)
    again = Trust(trust.folder)
    with pytest.raises(UnusableKey, match=rf"key can be read by other users \(mode 0{mode:o}\): .*chmod 600"):
        again.signed(b"manifest", signature)
    (trust.folder / "key").chmod(0o400)
    assert again.signed(b"manifest", signature)


@POSIX
def test_writable_list_trusts_nothing_and_is_logged(trust, caplog):
    trust.add(io.BytesIO(b"file"))
    (trust.folder / "trusted").chmod(0o666)
    assert not trust.trusts(io.BytesIO(b"file"))
    (message,) = [record.getMessage() for record in caplog.records]
    assert "can be changed by other users (mode 0666)" in message
    with pytest.raises(OSError, match="0666"):
        trust.add(io.BytesIO(b"another"))
    (trust.folder / "trusted").chmod(0o644)
    assert trust.trusts(io.BytesIO(b"file"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
@pytest.mark.parametrize("name", ["key", "trusted"])
def test_pipe_in_place_of_a_file_is_refused(trust, name, caplog):
    trust.folder.mkdir()
    os.mkfifo(trust.folder / name)
    with pytest.raises(OSError, match="a pipe"):
        trust.sign(b"manifest") if name == "key" else trust.add(io.BytesIO(b"file"))
    assert not trust.trusts(io.BytesIO(b"file"))


def test_unwritable_key_folder_names_the_remedy(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UnusableKey, match="COMPILED_GRAPHS_TRUST"):
        Trust(tmp_path / "file" / "trust").sign(b"manifest")


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
