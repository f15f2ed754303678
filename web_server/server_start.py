"""What is done when ComfyUI's server starts to answer.

Somebody who has compiled here before will want those graphs again. Loading them takes seconds, with what they import,
and these pass while the browser opens the workflow. Where nothing was ever compiled, nothing is imported here. On a GPU
a process beside this one imports what compiling needs, so that a first compile waits less.

All this gives way to prompts. Python runs one thread at a time, and a sampling that streams weights gives up its turn
thousands of times: beside the warm-up, a first prompt of a plain SDXL took 12 s instead of 8. A prompt with nodes of
this extension begins its own warm-up (`queued_prompt`).

Where nobody looks on, the warm-up can come first: with COMPILED_GRAPHS_LISTEN=warm the server begins to listen when the
graphs are loaded. Whoever balances load then sends no prompt to a server that would make it wait.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from typing import Any

from .prompt_server import prompt_server

log = logging.getLogger(__name__)

MAX_WAIT = 300.0
"""Seconds that the server waits for its graphs before it listens without them."""
PAUSE = 0.2
"""Seconds between looks at ComfyUI's queue."""
LISTEN = "COMPILED_GRAPHS_LISTEN"
"""Variable of the environment. With "warm", the server listens when the graphs that were used last are loaded."""


def register() -> None:
    """Have ComfyUI's server begin the warm-up when it starts, if there is a server that says so."""
    starts = getattr(getattr(prompt_server(), "app", None), "on_startup", None)
    if starts is None or getattr(starts, "frozen", True):  # a prompt begins the warm-up at the latest
        return
    starts.append(_on_startup)


async def _on_startup(app: Any) -> None:
    """ComfyUI's server listens when this returns."""
    loaded = threading.Event()
    threading.Thread(target=_warm_up, args=(loaded,), name="warm up after the start", daemon=True).start()
    if (wanted := os.environ.get(LISTEN, "")) == "warm":
        if not await asyncio.to_thread(loaded.wait, MAX_WAIT):
            log.warning("The server listens before its graphs are loaded: they took more than %.0f s.", MAX_WAIT)
    elif wanted:
        log.warning('%s is "%s", which says nothing: it may be "warm", or left out.', LISTEN, wanted)


def _warm_up(loaded: threading.Event) -> None:
    from ..compiler.hosts.comfy.process import prepare_workers, warm_up_as_before

    try:
        has_graphs = warm_up_as_before(_wait_for_prompts)
    finally:
        loaded.set()
    if has_graphs:
        _wait_for_prompts()  # whoever has graphs is more likely to load them than to compile
    prepare_workers()


def _wait_for_prompts() -> None:
    """Return once no prompt runs or is queued."""
    remaining = getattr(getattr(prompt_server(), "prompt_queue", None), "get_tasks_remaining", None)
    while remaining is not None and remaining() > 0:
        time.sleep(PAUSE)
