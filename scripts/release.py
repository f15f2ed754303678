"""Build the archive that ComfyUI's registry expects: `python scripts/release.py`, with Python 3.11 or newer.

That is a zip of the tracked files, less what .comfyignore names, with this folder's content at its root. It is the
same for the same commit. `comfy node publish` packs and sends the same files; this script looks first whether the
versions agree, and lets the archive be looked at, tried and kept. It sends nothing.
"""

from __future__ import annotations

import argparse
import re
import stat
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).resolve().parent.parent
IGNORE = ".comfyignore"
PLACEHOLDER = "placeholder"
OLDEST = (1980, 1, 1, 0, 0, 0)
"""The date of each file in the archive, which is the earliest that a zip can say."""


class ReleaseError(Exception):
    """A tree that is not to be released; the message is one sentence."""


def main(arguments: list[str] | None = None) -> int:
    """Build the archive and say what is in it; the result is the exit status."""
    parser = argparse.ArgumentParser(description="Build the archive for ComfyUI's registry.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the archive (dist)")
    options = parser.parse_args(arguments)
    try:
        require_committed()
        path = build(options.out)
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    with zipfile.ZipFile(path) as archive:
        print(f"{path}: {len(archive.namelist())} files, {path.stat().st_size / 1e6:.1f} MB")
    for line in missing_to_publish():
        print(f"before publishing: {line}")
    return 0


def build(folder: Path) -> Path:
    """Write the archive of the tree as it is on disk to a folder and return its path. Raises ReleaseError."""
    path = folder / f"{project()['name']}-{version()}.zip"
    files = released_files()
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in files:
            source = ROOT / name
            entry = zipfile.ZipInfo(name, OLDEST)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (stat.S_IFREG | (0o755 if source.stat().st_mode & stat.S_IXUSR else 0o644)) << 16
            archive.writestr(entry, source.read_bytes())
    return path


def released_files() -> list[str]:
    """Return the names of the files that go out, sorted: in a committed tree, of those that are tracked.

    Raises ReleaseError without git.
    """
    listed = ("ls-files", "-z", "--cached", "--others")
    known = _git(*listed, "--exclude-standard").split("\0")
    left_out = _git(*listed, "--ignored", f"--exclude-from={IGNORE}").split("\0")
    return sorted(name for name in set(known) - set(left_out) if (ROOT / name).is_file())


def version() -> str:
    """Return the version that pyproject.toml, the package and the changelog agree on. Raises ReleaseError."""
    found = {
        "pyproject.toml": project()["version"],
        "__init__.py": _first(r'^__version__ = "(.+)"$', "__init__.py"),
        "CHANGELOG.md": _first(r"^## \[(\d.*?)\]", "CHANGELOG.md"),
    }
    if len(set(found.values())) > 1:
        told = ", ".join(f"{name} says {value}" for name, value in found.items())
        raise ReleaseError(f"The versions differ: {told}.")
    if not re.fullmatch(r"\d+\.\d+\.\d+", project()["version"]):
        raise ReleaseError(f"The version {project()['version']} is not of the form MAJOR.MINOR.PATCH.")
    return project()["version"]


def missing_to_publish() -> list[str]:
    """Return what the registry still wants of pyproject.toml and the changelog, one sentence each."""
    missing = []
    if PLACEHOLDER in _pyproject()["tool"]["comfy"]["PublisherId"]:
        missing.append("[tool.comfy] PublisherId in pyproject.toml is a placeholder.")
    if "Repository" not in project().get("urls", {}):
        missing.append("[project.urls] in pyproject.toml has no Repository.")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", _first(r"^## \[\d.*?\] - (.+)$", "CHANGELOG.md")):
        missing.append("CHANGELOG.md has no date for this version.")
    return missing


def require_committed() -> None:
    """Raise ReleaseError if something on disk is in no commit: nobody could build that archive again."""
    if changed := _git("status", "--porcelain").splitlines():
        raise ReleaseError(f"{len(changed)} files differ from the last commit, such as {changed[0][3:]}: commit first.")


def project() -> dict[str, Any]:
    """Return pyproject.toml's table `project`."""
    return _pyproject()["project"]


def _pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _first(pattern: str, name: str) -> str:
    found = re.search(pattern, (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise ReleaseError(f"{name} has no version.")
    return found[1]


def _git(*arguments: str) -> str:
    try:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, check=True, encoding="utf-8"
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        reason = (getattr(error, "stderr", "") or str(error)).strip()
        raise ReleaseError(f"git does not say which files are tracked here: {reason}") from None


if __name__ == "__main__":
    sys.exit(main())
