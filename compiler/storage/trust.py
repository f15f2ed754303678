"""This module decides which graph files may run here: those that this machine signed, or that its owner trusts.

The owner trusts single files by their digest, and signers by the fingerprint of their public key (`signers.py`). Keys
and lists are in the owner's configuration folder, which no workflow, prompt or HTTP request can reach. The owner gives
trust on the command line and nowhere else.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..common.files import create_whole
from .private_files import READABLE, WRITABLE, UnusableKey, make_private_folder, read_private, replace_private
from .signers import Maker, Signature, Signers

log = logging.getLogger(__name__)

KEY_BYTES = 32
MAX_LIST = 2**24
"""Bytes that the list of trusted files may have."""
_ELSEWHERE = "set COMPILED_GRAPHS_TRUST to a folder that only you can read"
_CHUNK = 2**20


def default_folder() -> Path:
    """Return the folder of the key: COMPILED_GRAPHS_TRUST, or `compiled_graphs` in the user's configuration folder."""
    if named := os.environ.get("COMPILED_GRAPHS_TRUST"):
        return Path(named).expanduser()
    if os.name == "nt":
        base = os.environ.get("APPDATA") or Path.home() / "AppData" / "Roaming"
    else:
        base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "compiled_graphs"


@dataclass(frozen=True)
class Distrust:
    """Why a manifest may not run here."""

    reason: str
    signer: str = ""
    """The fingerprint of whoever signed it, if the owner's trust is all that is missing."""


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

    def is_own(self, text: bytes, signature: str) -> bool:
        """The same, and False where this machine has no key that can be used."""
        try:
            return self.signed(text, signature)
        except UnusableKey:
            return False

    @property
    def maker(self) -> Maker:
        """The key with which this machine signs for others, if its owner has made one."""
        return Maker(self.folder)

    @property
    def signers(self) -> Signers:
        """The list of those whose files may run here."""
        return Signers(self.folder)

    def countersign(self, text: bytes) -> Signature | None:
        """Return the signature for others; None if this machine has no such key, or cannot use it."""
        maker = self.maker
        if not maker.exists:
            return None
        try:
            return maker.sign(text)
        except OSError as error:
            log.warning("What is saved is signed for this machine only: %s.", error)
            return None

    def distrust_of(self, text: bytes, signature: Signature) -> Distrust | None:
        """Return why a manifest that somebody else signed may not run here, or None if it may."""
        try:
            fingerprint = signature.fingerprint
            if not signature.is_valid(text):
                return Distrust(f"it names {fingerprint} as its signer, and the signature is not valid")
            if not any(signer.fingerprint == fingerprint for signer in self.signers.read()):
                reason = f"it is signed by {fingerprint}, and the owner of this machine has not trusted this signer"
                return Distrust(reason, fingerprint)
        except ValueError:
            return Distrust("it names a signer in a form that is none")
        except OSError as error:
            return Distrust(str(error))
        return None

    def trusts(self, file: BinaryIO) -> bool:
        """Whether the owner trusted exactly this file. Raises OSError if it cannot be read."""
        digests = self.trusted_digests()
        return bool(digests) and sha256(file) in digests

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
        digest = sha256(file)
        make_private_folder(self.folder)
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

    def remove(self, digest: str) -> bool:
        """No longer trust a file, and return whether it was trusted. Raises OSError."""
        known = self._read_list().split() if (self.folder / "trusted").exists() else []
        if digest not in known:
            return False
        text = "".join(f"{other}\n" for other in known if other != digest)
        replace_private(self.folder / "trusted", text.encode())
        return True

    def _read_list(self) -> str:
        return read_private(self.folder / "trusted", MAX_LIST, WRITABLE, "changed").decode("ascii", "replace")

    def _read_or_make_key(self) -> bytes:
        if self._key is None:
            try:
                self._key = self._read_key()
            except FileNotFoundError:
                self._key = self._make_key()
        return self._key

    def _make_key(self) -> bytes:
        try:
            make_private_folder(self.folder)
            create_whole(self.folder / "key", secrets.token_bytes(KEY_BYTES), is_private=True)
        except FileExistsError:  # another process was first
            pass
        except OSError as error:
            raise UnusableKey(
                f"no key can be written to {self.folder} ({error.strerror or error}): {_ELSEWHERE}"
            ) from None
        return self._read_key()

    def _read_key(self) -> bytes:
        path = self.folder / "key"
        try:
            key = read_private(path, KEY_BYTES, READABLE, "read")
        except FileNotFoundError:
            raise
        except OSError as error:
            unreadable = f"{path} cannot be read ({error.strerror}): {_ELSEWHERE}"
            raise UnusableKey(str(error) if error.errno is None else unreadable) from None
        if len(key) != KEY_BYTES:
            raise UnusableKey(f"{path} is not a key. Remove it, and a new one is made")
        return key


def sha256(file: BinaryIO) -> str:
    """Return the digest of an open file, in hexadecimal digits. Raises OSError if it cannot be read."""
    file.seek(0)
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()
