"""Starting a process of this package so that it imports nothing from the current directory."""

from __future__ import annotations

import os
from pathlib import Path

_START = Path(__file__).resolve().with_name("start.py")


def command(python: str, name: str, folder: Path, module: str, *arguments: str) -> list[str]:
    """Return the command line that runs `main(*arguments)` of a module in `folder`, imported as the package `name`.

    With `python -c` and `-m` the current directory comes first in `sys.path`. From Python 3.13 on it is used before the
    first line of our own runs. -P came with 3.11, and -I ignores packages that people installed for their user. With a
    script, its own folder comes first instead, and that folder holds nothing else.
    """
    return [python, str(_START), name, str(folder), module, *arguments]


def environment(**changes: str) -> dict[str, str]:
    """Return this process's environment with changes, and without the relative entries of PYTHONPATH.

    An empty entry, as an extra colon makes it, is relative too: it means the current directory.
    """
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(os.path.isabs, places))} | changes
