"""The public names for diffusers: `from compiled_graphs.diffusers import compile_pipe, save_pipe, load_pipe`."""

from __future__ import annotations

if not __package__:  # Python imported this file in place of the library, because this folder is on its path
    raise ImportError(f"{__file__} is a part of compiled_graphs: run Python from another folder to import diffusers")

from .compiler.hosts.diffusers.pipeline import (
    LoadedPart,
    Options,
    SavedPart,
    compile_module,
    compile_pipe,
    load_pipe,
    restore_pipe,
    save_pipe,
    summaries,
    warmup,
)
from .compiler.tracing.host_operator import as_operator

__all__ = [
    "LoadedPart",
    "Options",
    "SavedPart",
    "as_operator",
    "compile_module",
    "compile_pipe",
    "load_pipe",
    "restore_pipe",
    "save_pipe",
    "summaries",
    "warmup",
]
