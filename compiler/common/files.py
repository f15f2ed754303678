"""Writing files whole or not at all, and reading files within bounds."""

from __future__ import annotations

import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

STORE = "store"
SAVED = "saved"
"""The kinds of writer. In a shared folder each of them removes only its own partial files."""
PARTIAL_AGE = 3600.0
"""Seconds. Nobody still writes to a partial file that is older."""
_PARTIAL = ".compiled_graphs.partial"
_PRIVATE, _FOR_OTHERS = 0o600, 0o666
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)


def write_whole(path: Path, data: bytes, writer: str = SAVED) -> None:
    """Replace a file by these bytes. A reader finds the old file or the new one, even after a crash at any moment.

    The user's mask says who may read it. Also removes the partial files that killed processes of this writer left in
    the folder. Raises OSError.
    """
    _sweep(path.parent, writer)
    _place(path, data, os.replace, writer, _FOR_OTHERS)


def create_whole(path: Path, data: bytes, is_private: bool = False) -> None:
    """Create a file, whole. If several processes do so, the first one wins. Only its owner can read a private one.

    Also removes partial files, as `write_whole` does. Raises FileExistsError if the file exists, and OSError.
    """
    _sweep(path.parent, SAVED)
    _place(path, data, _put, SAVED, _PRIVATE if is_private else _FOR_OTHERS)


def is_partial(name: str, writer: str) -> bool:
    """Whether this is the name of a writer's partial file, such as a killed process leaves behind."""
    return re.fullmatch(rf"\.{writer}-\w+{re.escape(_PARTIAL)}", name) is not None


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises OSError, also for a pipe or a device: reading one could wait for a writer."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{path.name} is a pipe, a device or a folder, and not a file")
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_bounded(path: Path, most: int) -> bytes:
    """Return a file's bytes. Raises OSError, also if the file has more than `most` bytes. It never reads further."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(f"{path.name} has more than {most} bytes, too many for a file of its kind")
    return data


def _sweep(folder: Path, writer: str) -> None:
    latest = time.time() - PARTIAL_AGE
    with suppress(OSError), os.scandir(folder) as files:
        for file in files:
            if is_partial(file.name, writer) and _written(file) <= latest:
                with suppress(OSError):
                    os.unlink(file.path)


def _written(file: os.DirEntry) -> float:
    try:
        return file.stat(follow_symlinks=False).st_mtime
    except OSError:  # another process has removed it
        return time.time()


def _place(path: Path, data: bytes, move: Callable[[Path, Path], None], writer: str, mode: int) -> None:
    temporary = path.parent / f".{writer}-{secrets.token_hex(8)}{_PARTIAL}"
    try:
        with os.fdopen(os.open(temporary, _NEW, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        move(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _put(temporary: Path, path: Path) -> None:
    """Give a file its name. Raises FileExistsError if another file has it."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # no hard links: exFAT, some network folders
        os.close(os.open(path, _NEW))
        os.replace(temporary, path)
