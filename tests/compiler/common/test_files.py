from __future__ import annotations

import os
import stat
import time

import pytest
from compiled_graphs.compiler.common.files import (
    PARTIAL_AGE,
    SAVED,
    STORE,
    create_whole,
    is_partial,
    open_regular,
    read_bounded,
    write_whole,
)


def partial(folder, writer, seconds_ago=0.0):
    """Leave a partial file as a killed writer does, and return its path."""
    path = folder / f".{writer}-abcd1234.compiled_graphs.partial"
    path.write_bytes(b"half")
    then = time.time() - seconds_ago
    os.utime(path, (then, then))
    return path


@pytest.mark.parametrize("writer", [STORE, SAVED])
def test_partial_file_is_known_by_name_and_writer(tmp_path, monkeypatch, writer):
    names, replace = [], os.replace
    monkeypatch.setattr(
        os, "replace", lambda source, path: names.append(os.path.basename(source)) or replace(source, path)
    )
    write_whole(tmp_path / "file", b"data", writer)
    (name,) = names
    assert [each for each in (STORE, SAVED) if is_partial(name, each)] == [writer]


@pytest.mark.parametrize(
    "name",
    [
        ".download.partial",
        ".abcd1234.partial",
        "store-abcd1234.compiled_graphs.partial",
        ".store-a.partial",
        ".partial",
    ],
)
def test_another_programs_partial_file_is_not_ours(name):
    assert not any(is_partial(name, writer) for writer in (STORE, SAVED))


def test_writer_removes_only_its_own_old_partial_files(tmp_path):
    dead = partial(tmp_path, SAVED, PARTIAL_AGE + 60)
    kept = [partial(tmp_path, STORE, PARTIAL_AGE + 60), tmp_path / ".download.partial", tmp_path / "mine.partial"]
    for path in kept[1:]:
        path.write_bytes(b"half")
        os.utime(path, (0, 0))
    write_whole(tmp_path / "file", b"data")
    assert not dead.exists()
    assert sorted(tmp_path.iterdir()) == sorted([*kept, tmp_path / "file"])


def test_recent_partial_file_stays(tmp_path):
    alive = partial(tmp_path, SAVED, PARTIAL_AGE - 60)
    write_whole(tmp_path / "file", b"data")
    assert alive.exists()


def test_bytes_are_read_up_to_a_bound(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bounded(path, 5) == b"12345"
    with pytest.raises(OSError, match="file has more than 4 bytes"):
        read_bounded(path, 4)
    os.truncate(path, 2**40)
    with pytest.raises(OSError, match="more than 10 bytes"):
        read_bounded(path, 10)


def test_pipe_or_folder_is_not_opened(tmp_path):
    places = [tmp_path]
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "link").symlink_to(tmp_path / "pipe")
        places += [tmp_path / "pipe", tmp_path / "link"]
    for path in places:
        with pytest.raises(OSError, match="not a file"):
            open_regular(path)
    if os.path.isdir("/proc/self/fd"):
        before = len(os.listdir("/proc/self/fd"))
        for path in places * 5:
            with pytest.raises(OSError, match="not a file"):
                open_regular(path)
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_the_mask_says_who_may_read_what_is_no_secret(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        write_whole(tmp_path / "graph", b"data")
        create_whole(tmp_path / "file", b"data")
        create_whole(tmp_path / "key", b"secret", is_private=True)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"graph": mode, "file": mode, "key": 0o600}


@pytest.mark.parametrize("has_links", [True, False])
def test_the_first_one_creates_a_file(has_links, tmp_path, monkeypatch):
    if not has_links:
        monkeypatch.setattr(os, "link", lambda *paths: (_ for _ in ()).throw(PermissionError("exFAT")))
    create_whole(tmp_path / "file", b"first")
    with pytest.raises(FileExistsError):
        create_whole(tmp_path / "file", b"second")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"first")]
