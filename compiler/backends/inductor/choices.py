"""The choices of an artifact's kernels, which travel with it.

Inductor times the forms of a kernel when it first runs, and keeps the fastest one's name in its folder. A process that
finds the name there loads that form only. Where the folder is empty, it times each kernel again. So the bytes of an
artifact have the choices that were made until then, and loading puts them where torch looks. Torch ignores a choice
that was made for other forms of a kernel (`configs_hash`), and times that kernel.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ...common import bounded_json
from ...common.files import read_bounded
from ...common.torch_compat import LocalAutotuneCache, MissingName, cache_dir, write_atomic
from .artifact_content import ArtifactContent

log = logging.getLogger(__name__)

Choices = Mapping[str, str]
"""The text of each choice, by the name of its file in Inductor's folder: SUBFOLDER/NAME.best_config."""

MAX_CHOICES = 1000
"""Kernels of an artifact whose choices travel."""
MAX_CHOICE = 2000
"""Bytes. Torch writes some 300."""
MAX_BYTES = 2**23
"""Bytes of all choices in an artifact."""
_trials = threading.RLock()
_NAME = re.compile(r"\w{1,100}/\w{1,100}\.best_config", re.ASCII)


def names_of(data: bytes) -> tuple[str, ...]:
    """Return the names of the choices that the kernels of an artifact may make; none if it is not understood.

    This unpickles `data`, so callers pass only bytes that they trust.
    """
    try:
        content = ArtifactContent.read(data)
        kernels = content.timed_kernels() if content else ()
        # The method that keeps a choice (AutotuneCache.save) knows where.
        keepers = [kernel.save_cache_hook.__self__ for kernel in kernels if kernel.save_cache_hook]
        paths = [keeper.local_cache[1] for keeper in keepers if keeper.local_cache]
        return tuple(sorted({"/".join(re.split(r"[\\/]", path)[-2:]) for path in paths})[:MAX_CHOICES])
    except Exception as error:  # names of torch's own, which another version may lack
        log.info("An artifact goes without its kernels' choices: %r", error)
        return ()


def made_here(names: Iterable[str]) -> dict[str, str]:
    """Return those of these choices that Inductor's folder has."""
    found = {}
    with suppress(MissingName):
        folder = cache_dir.get()()
        for name in names:
            with suppress(OSError, ValueError):
                found[name] = read_bounded(Path(folder, name), MAX_CHOICE).decode()
    return _sound(found)


def put(choices: Choices) -> None:
    """Write choices to Inductor's folder, but none over another. A failure is logged: torch then times the kernel."""
    try:
        for name, text in choices.items():
            path = Path(cache_dir.get()(), name)
            if not path.exists():
                write_atomic.get()(str(path), text, make_dirs=True)
    except Exception as error:  # a folder that cannot be written to, or another torch
        log.info("An artifact's choices were not put into Inductor's folder: %r", error)


def to_bytes(choices: Choices) -> bytes:
    return json.dumps(choices, sort_keys=True).encode()


def from_bytes(data: bytes) -> dict[str, str]:
    """Return the choices in these bytes that torch can read. Their author is trusted, but not to know this torch."""
    try:
        found = bounded_json.parse(data)
    except ValueError:
        found = None
    return _sound(found) if isinstance(found, dict) else {}


@contextmanager
def kept_by_nobody() -> Iterator[None]:
    """Have kernels that are timed meanwhile keep no choice: their sizes are nobody's.

    Where torch lacks the name, they keep it.
    """
    try:
        keeper = LocalAutotuneCache.get()
    except MissingName:
        yield
        return
    with _trials:
        original = keeper.put
        keeper.put = lambda *choice: None
        try:
            yield
        finally:
            keeper.put = original


def _sound(choices: Mapping[str, Any]) -> dict[str, str]:
    """Return those that are as torch writes them: torch's reader may raise for others, and end a graph's loading."""
    named = {name: text for name, text in choices.items() if _NAME.fullmatch(name) and isinstance(text, str)}
    return {name: text for name, text in list(named.items())[:MAX_CHOICES] if _is_choice(text)}


def _is_choice(text: str) -> bool:
    try:
        choice = bounded_json.parse(text.encode()) if len(text) <= MAX_CHOICE else None
    except ValueError:
        return False
    if not isinstance(choice, dict) or not isinstance(choice.get("configs_hash"), str):
        return False
    return all(type(choice.get(number)) is int for number in ("num_warps", "num_stages"))
