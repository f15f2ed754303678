"""This module decides which graph files may run here: those that this machine signed or its owner named.

The key and the list are in the owner's configuration folder, which no workflow, prompt or HTTP request can
reach. The owner gives trust on the command line and nowhere else.
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

from ..common.files import create_whole, open_regular

log = logging.getLogger(__name__)

KEY_BYTES = 32
MAX_LIST = 2**24
"""Bytes that the list of trusted files may have."""
_ELSEWHERE = "set COMPILED_GRAPHS_TRUST to a folder that only you can read"
_CHUNK = 2**20
_READABLE, _WRITABLE = 0o077, 0o022
"""Bits of a file's mode that let others read it or write to it."""


class UnusableKey(OSError):
    """No key can be used to sign. The message says why, and what to do."""


def default_folder() -> Path:
    """Return the folder of the key: COMPILED_GRAPHS_TRUST, or `compiled_graphs` in the user's configuration folder."""
    if named := os.environ.get("COMPILED_GRAPHS_TRUST"):
        return Path(named)
    if os.name == "nt":
        base = os.environ.get("APPDATA") or Path.home() / "AppData" / "Roaming"
    else:
        base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "compiled_graphs"


class Trust:
    """The signing key, which is made on first use, and the digests of the files that the owner trusts."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._key: bytes | None = None

    @property
    def folder(self) -> Path:
        """The folder of the key and the list."""
        return self._folder or default_folder()

    def sign(self, text: bytes) -> str:
        """Return this machine's signature (HMAC-SHA256, hex). Raises UnusableKey."""
        return hmac.new(self._read_or_make_key(), text, hashlib.sha256).hexdigest()

    def signed(self, text: bytes, signature: str) -> bool:
        """Whether a signature is this machine's. Raises UnusableKey as `sign` does."""
        return signature.isascii() and hmac.compare_digest(self.sign(text), signature)

    def trusts(self, file: BinaryIO) -> bool:
        """Whether the owner trusted exactly this file. Raises OSError if it cannot be read."""
        digests = self.trusted_digests()
        return bool(digests) and _digest(file) in digests

    def trusted_digests(self) -> set[str]:
        """Return the SHA-256 digests of trusted files. The set is empty if others can write to the list."""
        try:
            return set(self._read_list().split())
        except FileNotFoundError:
            return set()
        except OSError as error:
            log.warning("The list of trusted files is not used: %s.", error)
            return set()

    def add(self, file: BinaryIO) -> str:
        """Trust a file by its SHA-256 digest, and return the digest. Only the owner's command line calls this.

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
        return _read_private(self.folder / "trusted", MAX_LIST, _WRITABLE, "changed").decode("ascii", "replace")

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
                f"no key can be written to {self.folder} ({error.strerror or error}): {_ELSEWHERE}"
            ) from None
        return self._read_key()

    def _read_key(self) -> bytes:
        path = self.folder / "key"
        try:
            key = _read_private(path, KEY_BYTES, _READABLE, "read")
        except FileNotFoundError:
            raise
        except OSError as error:
            unreadable = f"{path} cannot be read ({error.strerror}): {_ELSEWHERE}"
            raise UnusableKey(str(error) if error.errno is None else unreadable) from None
        if len(key) != KEY_BYTES:
            raise UnusableKey(f"{path} is not a key. Remove it, and a new one is made")
        return key


def _read_private(path: Path, most: int, forbidden: int, done: str) -> bytes:
    """Return at most `most + 1` bytes of a file: with the last one the caller sees that the file is too long.

    Raises OSError, also if the file's mode has a `forbidden` bit. `done` is the verb for what others could have done.
    """
    with open_regular(path) as file:
        found = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if os.name != "nt" and found & forbidden:
            raise OSError(
                f"{path} can be {done} by other users (mode {found:04o}): make it yours with chmod 600, or remove it "
                "if somebody may have done so"
            )
        return file.read(most + 1)


def _make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, which only the owner can enter, whatever the process's umask allows."""
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
