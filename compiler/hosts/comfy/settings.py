"""What people chose in ComfyUI's settings dialog, as far as others than the browser have to know it: the store's size.

ComfyUI keeps the dialog's values in `default/comfy.settings.json` of its user folder, and writes them as soon as one
is changed. So that file is read when a node runs: it needs no route of our own, and holds after a restart, for prompts
that no browser sent and for the command line. With --multi-user everybody has another file, and none of them speaks for
a store that all share; only the environment variable does. The other settings are what new nodes begin with, and known
to the frontend alone (`web/settings.js`).
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from ...storage.store import DEFAULT_LIMIT, gigabytes
from .comfy_compat import SETTINGS_FILE

log = logging.getLogger(__name__)

STORE_LIMIT = "CompiledGraphs.StoreLimit"
LOCALE = "Comfy.Locale"


def store_limit(user_folder: Path) -> int | None:
    """Return the bytes that the store may take, or None to leave it at what it may take now.

    That is where COMPILED_GRAPHS_STORE names the place, since other machines may share it and anybody who can open
    ComfyUI can choose, where COMPILED_GRAPHS_STORE_LIMIT says it, and where the file cannot be read: ComfyUI may just
    be writing it.
    """
    if os.environ.get("COMPILED_GRAPHS_STORE") or os.environ.get("COMPILED_GRAPHS_STORE_LIMIT"):
        return None
    try:
        value = _settings(user_folder).get(STORE_LIMIT)
    except FileNotFoundError:
        return DEFAULT_LIMIT
    except (OSError, ValueError, AttributeError):
        return None
    try:
        return DEFAULT_LIMIT if value is None else gigabytes(str(value))
    except ValueError:
        log.warning("%s in %s is %r and not a number of gigabytes; using 10.", STORE_LIMIT, SETTINGS_FILE[-1], value)
        return DEFAULT_LIMIT


def chosen_language(user_folder: Path) -> str:
    """Return the language that was chosen in the dialog, such as "zh"; "en" if none was."""
    try:
        value = _settings(user_folder).get(LOCALE)
    except (OSError, ValueError, AttributeError):
        return "en"
    return value.partition("-")[0] if isinstance(value, str) else "en"


def _settings(user_folder: Path) -> Any:
    return json.loads((user_folder / Path(*SETTINGS_FILE)).read_text(encoding="utf-8"))
