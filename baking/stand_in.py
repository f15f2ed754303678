"""Files that stand in for weights: a safetensors file's header, and nothing behind it.

Graphs hold no weights, so a loader needs a file's names and shapes only. The header of a file of gigabytes has a few
hundred kilobytes. Behind it comes a hole, which takes no room on disk where the file system knows holes.
"""

from __future__ import annotations

import json
from pathlib import Path

from ..compiler.common.files import write_whole

SUFFIXES = (".safetensors", ".sft")
MAX_HEADER = 100 * 2**20
"""Bytes that safetensors allows."""


class NotAHeader(Exception):
    """This file has no header of a safetensors file. The message is one sentence for people."""


def read_header(path: Path) -> bytes:
    """Return the header of a safetensors file, or of a file that holds nothing else. Raises NotAHeader and OSError."""
    with path.open("rb") as file:
        length = file.read(8)
        size = int.from_bytes(length, "little")
        if len(length) < 8 or size > MAX_HEADER:
            raise NotAHeader(f"{path.name} is not a safetensors file")
        text = file.read(size)
    _data_size(path.name, text)
    return length + text


def write_stand_in(path: Path, header: bytes) -> None:
    """Write a file with this header whose weights are all zero. Raises NotAHeader and OSError."""
    size = _data_size(path.name, header[8:])
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + size)


def headers_in(folder: Path) -> dict[str, Path]:
    """Return the files in a folder laid out as ComfyUI's models, by their paths in it."""
    found = [path for path in sorted(folder.rglob("*")) if path.suffix in SUFFIXES and path.is_file()]
    return {path.relative_to(folder).as_posix(): path for path in found}


def copy_headers(models: Path, target: Path) -> tuple[dict[str, int], list[str]]:
    """Write the header of each safetensors file of a folder to another one.

    Return their bytes by path, and why files have none, such as one whose download was cut off. Nothing is written over
    a file with weights. Raises NotAHeader and OSError.
    """
    if target.resolve().is_relative_to(models.resolve()):
        raise FileExistsError(f"{target} is a part of {models}: choose another folder")
    written, left = {}, []
    for name, path in headers_in(models).items():
        try:
            header, place = read_header(path), target / name
        except NotAHeader as error:
            left.append(f"{error} ({name})")
            continue
        if place.exists() and place.stat().st_size > len(read_header(place)):
            raise FileExistsError(f"{place} is there already and has weights: choose an empty folder")
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, header)
        written[name] = len(header)
    return written, left


def _data_size(name: str, text: bytes) -> int:
    """Return how many bytes of weights follow a header."""
    try:
        fields = json.loads(text)
        ends = [each["data_offsets"][1] for key, each in fields.items() if key != "__metadata__"]
        size = max(ends, default=0)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        raise NotAHeader(f"{name} has no header of a safetensors file") from None
    if not isinstance(size, int) or not 0 <= size < 2**44:
        raise NotAHeader(f"{name} has a header that makes no sense")
    return size
