"""Files that only the owner of this machine's account may read or change: keys, and lists of who is trusted."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ..common.files import create_whole, open_regular

READABLE, WRITABLE = 0o077, 0o022
"""Bits of a file's mode that let others read it or write to it."""


class UnusableKey(OSError):
    """No key can be used to sign. The message says why, and what to do."""


def read_private(path: Path, most: int, forbidden: int, done: str) -> bytes:
    """Return at most `most + 1` bytes of a file: with the last one the caller sees that the file is too long.

    Raises OSError, also if the file's mode has a `forbidden` bit. `done` is the verb for what others could have done.
    """
    with open_regular(path) as file:
        found = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if os.name != "nt" and found & forbidden:
            raise OSError(
                f"{path} can be {done} by other users (mode {found:04o}): make it yours with chmod 600, or remove it "
                "if somebody may have done so"
            )
        return file.read(most + 1)


def replace_private(path: Path, data: bytes) -> None:
    """Replace a file by one with these bytes, which only its owner can read. Raises OSError."""
    make_private_folder(path.parent)
    partial = path.with_name(f"{path.name}.new")
    partial.unlink(missing_ok=True)
    create_whole(partial, data, is_private=True)
    os.replace(partial, path)


def make_private_folder(folder: Path) -> None:
    """Make a folder and its missing parents, which only the owner can enter, whatever the process's umask allows."""
    if folder.is_dir():
        return
    if not folder.parent.exists():
        make_private_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
