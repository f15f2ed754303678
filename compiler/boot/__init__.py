"""How a process of this package begins: without the current directory among the places that it imports from."""

from __future__ import annotations

import os
from pathlib import Path

_START = Path(__file__).resolve().with_name("start.py")


def command(python: str, name: str, folder: Path, module: str, *arguments: str) -> list[str]:
    """Return the command line for `main(*arguments)` of a module below a folder that is imported under a name.

    With `python -c` and `-m` the current directory leads the places that modules come from, from Python 3.13 on before
    the first line of our own runs; -P came with 3.11, and -I loses what people installed for themselves. A script's own
    folder leads them instead, and that has nothing else in it.
    """
    return [python, str(_START), name, str(folder), module, *arguments]


def environment(**changes: str) -> dict[str, str]:
    """Return this process's environment with changes, and without those places of PYTHONPATH that depend on where
    somebody stands: an empty one, as a colon too many makes it, is the current directory."""
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(os.path.isabs, places))} | changes
