"""Before a node runs: what was chosen in ComfyUI's settings dialog holds for the store."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

import folder_paths

from ..compiler.hosts.comfy.settings import store_limit

log = logging.getLogger(__name__)


def apply() -> None:
    """Give the store the size that was chosen. What is too much for it goes at once."""
    from ..compiler.hosts.comfy.process import registry

    store, limit = registry().store, store_limit(Path(folder_paths.user_directory))
    if store is None or limit is None or limit == store.limit:
        return
    store.limit = limit
    with suppress(OSError):  # a place that cannot be listed
        gone = store.shrink(limit)
        log.info("The store may take %g GB from now on; %d graphs were removed.", limit / 1e9, len(gone))
