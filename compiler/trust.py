"""Which graph files this machine may run code from: those it signed, and those its owner named.

The key and the list lie in the owner's configuration folder, which no workflow, prompt or HTTP request
reaches. Trust is given on the command line and nowhere else.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import stat
from pathlib import Path
from typing import BinaryIO

from .files import create_whole, open_regular

log = logging.getLogger(__name__)

KEY_BYTES = 32
MAX_LIST = 2**24
"""Bytes of the list of trusted files."""
_ELSEWHERE = "set COMPILED_GRAPHS_TRUST to a folder that only you can read"
_CHUNK = 2**20
_READABLE, _WRITABLE = 0o077, 0o022
"""What others may do, by the mode of a file."""


class UnusableKey(OSError):
    """There is no key to sign with; the message says why and what to do."""


def default_folder() -> Path:
    """Return the folder for the key: COMPILED_GRAPHS_TRUST, else `compiled_graphs` in the user's configuration."""
    if named := os.environ.get("COMPILED_GRAPHS_TRUST"):
        return Path(named)
    if os.name == "nt":
        base = os.environ.get("APPDATA") or Path.home() / "AppData" / "Roaming"
    else:
        base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "compiled_graphs"


class Trust:
    """A signing key made on first use, and the digests that the owner trusted."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._key: bytes | None = None

    @property
    def folder(self) -> Path:
        """Where the key and the list are."""
        return self._folder or default_folder()

    def sign(self, text: bytes) -> str:
        """Return this machine's signature (HMAC-SHA256, hex). Raises UnusableKey if there can be no key."""
        return hmac.new(self._read_or_make_key(), text, hashlib.sha256).hexdigest()

    def signed(self, text: bytes, signature: str) -> bool:
        """Whether a signature is this machine's. Raises UnusableKey as `sign` does."""
        return signature.isascii() and hmac.compare_digest(self.sign(text), signature)

    def trusts(self, file: BinaryIO) -> bool:
        """Whether the owner trusted exactly this file. Raises OSError if it cannot be read."""
        digests = self.trusted_digests()
        return bool(digests) and _digest(file) in digests

    def trusted_digests(self) -> set[str]:
        """Return the SHA-256 digests of the files that the owner trusted; none if others may add to them."""
        try:
            return set(self._read_list().split())
        except FileNotFoundError:
            return set()
        except OSError as error:
            log.warning("No file counts as trusted: %s.", error)
            return set()

    def add(self, file: BinaryIO) -> str:
        """Trust a file by its SHA-256, and return that. For the owner's command line only.

        Raises OSError if the file cannot be read, or the list cannot be used or written.
        """
        digest = _digest(file)
        _make_folder(self.folder)
        try:
            text = self._read_list()
        except FileNotFoundError:
            text = ""
        if digest not in text.split():
            begin = "" if text.endswith("\n") or not text else "\n"  # people edit the list
            handle = os.open(self.folder / "trusted", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(handle, "w") as list_file:
                list_file.write(f"{begin}{digest}\n")
        return digest

    def _read_list(self) -> str:
        return _read_own(self.folder / "trusted", MAX_LIST, _WRITABLE, "changed").decode("ascii", "replace")

    def _read_or_make_key(self) -> bytes:
        if self._key is None:
            try:
                self._key = self._read_key()
            except FileNotFoundError:
                self._key = self._make_key()
        return self._key

    def _make_key(self) -> bytes:
        try:
            _make_folder(self.folder)
            create_whole(self.folder / "key", secrets.token_bytes(KEY_BYTES))
        except OSError as error:
            raise UnusableKey(
                f"there can be no key in {self.folder} ({error.strerror or error}): {_ELSEWHERE}"
            ) from None
        return self._read_key()

    def _read_key(self) -> bytes:
        path = self.folder / "key"
        try:
            key = _read_own(path, KEY_BYTES, _READABLE, "read")
        except FileNotFoundError:
            raise
        except OSError as error:
            told = f"{path} cannot be read ({error.strerror}): {_ELSEWHERE}"
            raise UnusableKey(str(error) if error.errno is None else told) from None
        if len(key) != KEY_BYTES:
            raise UnusableKey(f"{path} is not a key; remove it, and a new one is made")
        return key


def _read_own(path: Path, most: int, mode: int, done: str) -> bytes:
    """Return a file that nobody else may do something with. Raises OSError; one byte too many tells that it is long."""
    with open_regular(path) as file:
        found = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if os.name != "nt" and found & mode:
            raise OSError(
                f"{path} can be {done} by other users (mode {found:04o}): make it yours with chmod 600, or remove it "
                "if somebody may have done so"
            )
        return file.read(most + 1)


def _make_folder(folder: Path) -> None:
    """Make a folder that is the owner's alone, and those around it, whatever the process's umask allows."""
    if folder.is_dir():
        return
    if not folder.parent.exists():
        _make_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def _digest(file: BinaryIO) -> str:
    file.seek(0)
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()
