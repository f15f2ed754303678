"""What the doctor wants to know of ComfyUI: of the one that runs, or of the one on disk around this package."""

from __future__ import annotations

import os
import re
from importlib import metadata
from pathlib import Path

from ...registry.doctor import Surroundings, usual_device
from . import comfy_compat

_VERSION = re.compile(r"""^(?:__version__|version)\s*=\s*["']([^"']+)""", re.MULTILINE)


def running() -> Surroundings:
    """Return what the ComfyUI of this process knows."""
    import folder_paths

    from .process import registry

    return Surroundings(
        comfy_compat.torch_device(),
        os.environ.get("COMPILED_GRAPHS_STORE") or registry().cache.store.place,
        _text(Path(folder_paths.__file__).parent),
        tuple(path for place in comfy_compat.extension_folders() for path in _folders(Path(place))),
    )


def on_disk(package: Path) -> Surroundings:
    """Return what files tell of the ComfyUI in whose `custom_nodes` this package lies, if it lies in one.

    Without one, the store is the one that diffusers' pipelines use.
    """
    root = package.parents[1] if package.parent.name == "custom_nodes" else None
    store = os.environ.get("COMPILED_GRAPHS_STORE")
    if root is None:
        from ..diffusers.pipeline import registry

        return Surroundings(usual_device(), store or registry().cache.store.place, _installed())
    default = root / "user" / "compiled_graphs"
    return Surroundings(usual_device(), store or str(default), _text(root), tuple(_folders(package.parent)))


def _text(root: Path) -> str:
    """Return the version and place of a ComfyUI, in words."""
    version = next(filter(None, map(_version_in, (root / "comfyui_version.py", root / "pyproject.toml"))), None)
    if version is None and (installed := _installed()):
        return installed
    return f"{version or 'of 2024, without a version'}, in {root}"


def _version_in(path: Path) -> str | None:
    try:
        found = _VERSION.search(path.read_text(encoding="utf-8"))
    except OSError:
        return None
    return found[1] if found else None


def _installed() -> str:
    """Return the version of a ComfyUI that is installed as a package, in words, or nothing."""
    try:
        return f"{metadata.version('comfyui')}, installed as a package"
    except metadata.PackageNotFoundError:
        return ""


def _folders(place: Path) -> list[Path]:
    try:
        return sorted(path for path in place.iterdir() if path.is_dir() and not path.name.startswith((".", "__")))
    except OSError:
        return []
