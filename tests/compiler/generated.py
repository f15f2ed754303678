"""Code that no file holds, such as a notebook's cell: it runs as a module of its own, made by the import system."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
from types import CodeType
from typing import Any


class _TextLoader(importlib.abc.InspectLoader):
    def __init__(self, text: str, file_name: str) -> None:
        self._text = text
        self._file_name = file_name

    def get_source(self, fullname: str) -> None:
        """Keep the text to itself: nobody may find this module's source by its loader."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._text, self._file_name)


def run_text(text: str, names: dict[str, Any], *, file_name: str = "<string>") -> dict[str, Any]:
    """Run a module's text, which may use these names, and return all that it defines. It is not in `sys.modules`."""
    loader = _TextLoader(text, file_name)
    spec = importlib.machinery.ModuleSpec(names.get("__name__", "generated"), loader)
    module = importlib.util.module_from_spec(spec)
    module.__dict__.update(names)
    loader.exec_module(module)
    return module.__dict__
