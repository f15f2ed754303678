"""Triton's own small library (`cuda_utils`), which travels with an artifact.

Triton compiles it from C when it first runs on a machine, and keeps it in its cache. A machine without a C compiler
cannot. So an artifact has the library of the machine that made it, and loading puts it where Triton looks first
(`triton.runtime.build.compile_module_from_src`). With other C code, another Python or another system Triton builds its
own as before.
"""

from __future__ import annotations

import logging
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TritonLibrary:
    """A file of Triton's cache."""

    source: str
    """SHA-256 of the C code."""
    name: str
    """With the suffix of the Python and the system that it was built for."""
    data: bytes

    def put(self) -> None:
        """Write the file to Triton's cache unless it is there. A failure is logged: Triton then builds its own."""
        try:
            source = _source()
            if (self.source, self.name) != (_digest(source), _name()):
                log.info("An artifact brings %s, and this machine's Triton needs %s", self.name, _name())
                return
            cache = _cache_of(source)
            if cache.get_file(self.name) is None:
                cache.put(self.data, self.name, binary=True)
        except Exception as error:
            log.info("Triton's library was not put into its cache: %s: %s", type(error).__name__, error)


@lru_cache(maxsize=1)
def built_library() -> TritonLibrary | None:
    """Return the library that this machine's Triton runs with, built if need be; None if this Triton has none."""
    try:
        from triton.runtime import driver

        _ = driver.active.utils  # builds it
        source = _source()
        path = _cache_of(source).get_file(_name())
        return TritonLibrary(_digest(source), _name(), Path(path).read_bytes()) if path else None
    except Exception as error:
        log.info("Artifacts go without Triton's library: %s: %s", type(error).__name__, error)
        return None


def _source() -> str:
    from triton.backends.nvidia import driver

    return Path(driver.__file__).with_name("driver.c").read_text()


def _name() -> str:
    return f"cuda_utils{sysconfig.get_config_var('EXT_SUFFIX')}"


def _cache_of(source: str) -> Any:
    """Return Triton's cache for what it builds of C code. The system is part of its key, as `file` on PATH names it."""
    from triton.runtime.build import platform_key
    from triton.runtime.cache import get_cache_manager

    return get_cache_manager(_digest(source + platform_key()))


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()
