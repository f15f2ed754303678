"""Files that are whole or not there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

PARTIAL = ".partial"


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file by these bytes: a reader, or a crash at any moment, meets the old file or the new one."""
    _place(path, data, os.replace)


def create_whole(path: Path, data: bytes) -> None:
    """Create a file that only its owner can read, unless it is there: of several processes the first one wins.

    On a file system without hard links (exFAT, some network folders) it may be the last one.
    """
    try:
        _place(path, data, os.link)
    except FileExistsError:
        return
    except OSError:
        if not path.exists():
            write_whole(path, data)


def is_partial(name: str) -> bool:
    """Whether this is the name of a file not yet in its place, which a killed process leaves behind."""
    return name.startswith(".") and name.endswith(PARTIAL)


def _place(path: Path, data: bytes, move: Callable[[str, Path], None]) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=PARTIAL)  # 0600 by its contract
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        move(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
