"""The script that starts a process of this package; see `boot.command`. OneFlow's Python may be 3.7: it runs there."""

import importlib
import sys
import types


def start(name: str, folder: str, module: str, *arguments: str) -> None:
    """Run `main` of a module in `folder` as part of the package `name`, whose own `__init__` is not run."""
    sys.argv[1:] = []
    package = types.ModuleType(name)
    package.__path__ = [folder]
    sys.modules[name] = package
    importlib.import_module(f"{name}.{module}").main(*arguments)


if __name__ == "__main__":
    start(*sys.argv[1:])
