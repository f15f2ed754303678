"""Has the kernels of an artifact keep their choices in this machine's folder of Inductor.

Inductor times the forms of a kernel when it first runs, and keeps the fastest one's name in the folder in which the
kernel was compiled. The path of that folder travels with the artifact. Elsewhere it may belong to somebody else, or be
one that nobody may make: writing to it would end the kernel's first call.
"""

from __future__ import annotations

import logging
import os
import re
from typing import Any

from ...common.torch_compat import cache_dir
from .artifact_content import ArtifactContent

log = logging.getLogger(__name__)


def in_this_folder(data: bytes) -> bytes:
    """Return an artifact whose kernels name this machine's folder. One that is not understood stays as it is.

    This unpickles `data`, so callers pass only bytes that they trust.
    """
    try:
        folder = cache_dir.get()()
        if os.path.join(folder, "").encode() in data:  # it was compiled here
            return data
        content = ArtifactContent.read(data)
        kernels = list(content.timed_kernels()) if content else []
        for kernel in kernels:
            _name_here(kernel, folder)
        return content.to_bytes() if content and kernels else data
    except Exception as error:  # names of torch's own, which another version may lack
        log.info("An artifact's kernels keep their choices where they were compiled: %r", error)
        return data


def _name_here(kernel: Any, folder: str) -> None:
    """Name another folder in a kernel, and in the method that keeps its choice (AutotuneCache.save)."""
    kernel.filename = _path_in(folder, kernel.filename)
    if (keep := kernel.save_cache_hook) and (local := keep.__self__.local_cache):
        cache, path = local
        keep.__self__.local_cache = cache, _path_in(folder, path)


def _path_in(folder: str, path: str) -> str:
    """Return where a folder has a file. Inductor's files are in subfolders of one level."""
    return os.path.join(folder, *re.split(r"[\\/]", path)[-2:])
