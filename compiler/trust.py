"""Which graph files this machine may run code from: those it signed, and those its owner named.

The key and the list lie in the owner's configuration folder, which no workflow, prompt or HTTP request
reaches. Trust is given on the command line and nowhere else.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from .files import create_whole

KEY_BYTES = 32


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

    def sign(self, manifest: bytes) -> str:
        """Return this machine's signature (HMAC-SHA256). Raises OSError if there can be no key."""
        return hmac.new(self._read_or_make_key(), manifest, hashlib.sha256).hexdigest()

    def covers(self, manifest: bytes, signature: str, file: bytes) -> bool:
        """Whether this machine signed the manifest, or its owner trusted exactly this file."""
        try:
            signed = hmac.compare_digest(self.sign(manifest).encode(), signature.encode())
        except OSError:
            signed = False
        return signed or hashlib.sha256(file).hexdigest() in self.trusted_digests()

    def trusted_digests(self) -> set[str]:
        """Return the SHA-256 digests of the files that the owner trusted."""
        try:
            return set((self.folder / "trusted").read_text().split())
        except (OSError, UnicodeDecodeError):
            return set()

    def add(self, file: bytes) -> str:
        """Trust a file by its SHA-256, and return that. For the owner's command line only."""
        digest = hashlib.sha256(file).hexdigest()
        self.folder.mkdir(parents=True, exist_ok=True)
        if digest not in self.trusted_digests():
            with (self.folder / "trusted").open("a") as list_file:
                list_file.write(f"{digest}\n")
        return digest

    def _read_or_make_key(self) -> bytes:
        if self._key is None:
            path = self.folder / "key"
            if not path.exists():
                self.folder.mkdir(parents=True, exist_ok=True)
                create_whole(path, secrets.token_bytes(KEY_BYTES))
            key = path.read_bytes()
            if len(key) != KEY_BYTES:
                raise OSError(f"{path} is not a key; remove it, and a new one is made")
            self._key = key
        return self._key
