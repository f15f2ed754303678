"""The script that a process of this package begins with; see `boot.command`. Runs in Python 3.7 too, as OneFlow's."""

import importlib
import sys
import types


def start(name: str, folder: str, module: str, *arguments: str) -> None:
    """Import a module of a folder as a package of this name, without what the package's own `__init__` imports."""
    sys.argv[1:] = []
    package = types.ModuleType(name)
    package.__path__ = [folder]
    sys.modules[name] = package
    importlib.import_module(f"{name}.{module}").main(*arguments)


if __name__ == "__main__":
    start(*sys.argv[1:])
