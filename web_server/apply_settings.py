"""Apply what was chosen in ComfyUI's settings dialog to the store."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from pathlib import Path

import folder_paths

from ..compiler.hosts.comfy.settings import store_limit

log = logging.getLogger(__name__)

_APPLYING = threading.Lock()


def apply_settings() -> None:
    """Give the store the size that was chosen. Graphs above it are removed at once."""
    from ..compiler.hosts.comfy.process import registry

    with _APPLYING:
        store, limit = registry().cache.store, store_limit(Path(folder_paths.user_directory))
        if store is None or limit is None or limit == store.limit:
            return
        store.limit = limit
        with suppress(OSError):  # The store cannot be listed.
            gone = store.shrink(limit)
            log.info("The store may take %g GB from now on; %d graphs were removed.", limit / 1e9, len(gone))
