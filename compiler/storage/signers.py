"""Public-key signatures: who made a graph file, and whose files the owner of this machine lets run.

A maker signs with Ed25519 (RFC 8032). The library `cryptography` does the arithmetic. Only those need it who sign for
others or trust others: what this machine made itself is known by its own key (`trust.py`).
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.files import create_whole
from .private_files import READABLE, WRITABLE, UnusableKey, make_private_folder, read_private, replace_private

PREFIX = "SHA256:"
FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")
"""As ssh-keygen prints them: the digest of the public key in base64, without padding."""
SIGNING_KEY = "signing_key"
SIGNERS = "signers"
KEY_BYTES = 32
MAX_SIGNERS = 2**20
"""Bytes that the list of signers may have."""
MAX_NAME = 60
_PURPOSE = b"compiled_graphs manifest\n"
"""Signed with each manifest, so that a signature of this key on something else cannot pass for one."""
INSTALL = "pip install cryptography"


@dataclass(frozen=True)
class Signature:
    """What a file says of its maker. Nothing of it is believed before `is_valid`."""

    key: str
    """The public key, 64 hexadecimal digits."""
    value: str
    """The signature, 128 hexadecimal digits."""

    @property
    def fingerprint(self) -> str:
        """What people call the key. Raises ValueError if it is none."""
        return fingerprint(bytes.fromhex(self.key))

    def is_valid(self, text: bytes) -> bool:
        """Whether the owner of this key signed this manifest. Raises UnusableKey without the library."""
        ed25519, invalid = _library()
        try:
            ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.key)).verify(
                bytes.fromhex(self.value), _PURPOSE + text
            )
        except (ValueError, invalid):
            return False
        return True


@dataclass(frozen=True)
class Signer:
    """Somebody whose files may run here."""

    fingerprint: str
    name: str = ""


def fingerprint(public: bytes) -> str:
    """Return the fingerprint of a public key. Raises ValueError if it is none."""
    if len(public) != KEY_BYTES:
        raise ValueError(f"a public key of {len(public)} bytes")
    return PREFIX + base64.b64encode(hashlib.sha256(public).digest()).decode().rstrip("=")


class Maker:
    """This machine's own signing key, which its owner makes with `key new`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / SIGNING_KEY

    @property
    def exists(self) -> bool:
        """Whether there is a key."""
        return self._path.exists()

    def make(self) -> str:
        """Make a key. One that is there is kept beside it under another name. Return the fingerprint.

        Raises UnusableKey without the library, and OSError if the key cannot be written.
        """
        ed25519, _ = _library()
        make_private_folder(self._path.parent)
        if self.exists:
            os.replace(self._path, self._unused_name())
        with suppress(FileExistsError):  # another process was first
            create_whole(self._path, ed25519.Ed25519PrivateKey.generate().private_bytes_raw(), is_private=True)
        return fingerprint(self.public())

    def public(self) -> bytes:
        """Return the public key. Raises UnusableKey, and FileNotFoundError without a key."""
        return self._private().public_key().public_bytes_raw()

    def sign(self, text: bytes) -> Signature:
        """Sign a manifest. Raises as `public` does."""
        private = self._private()
        return Signature(private.public_key().public_bytes_raw().hex(), private.sign(_PURPOSE + text).hex())

    def _private(self) -> Any:
        key = read_private(self._path, KEY_BYTES, READABLE, "read")
        if len(key) != KEY_BYTES:
            raise UnusableKey(f"{self._path} is not a key. Make another one with `key new`")
        return _library()[0].Ed25519PrivateKey.from_private_bytes(key)

    def _unused_name(self) -> Path:
        number = 1
        while (path := self._path.with_name(f"{SIGNING_KEY}.{number}")).exists():
            number += 1
        return path


class Signers:
    """The list of those whose files may run here. The owner's command line changes it, and nothing else."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / SIGNERS

    def read(self) -> list[Signer]:
        """Return them in the order in which they were added. Raises OSError if others can write to the list."""
        try:
            text = read_private(self._path, MAX_SIGNERS, WRITABLE, "changed").decode("utf-8", "replace")
        except FileNotFoundError:
            return []
        lines = [line.partition(" ") for line in text.splitlines()]
        return [Signer(first, rest.strip()) for first, _, rest in lines if FINGERPRINT.fullmatch(first)]

    def add(self, signer: Signer) -> bool:
        """Add a signer, and return whether it was missing. Raises OSError."""
        known = self.read()
        if any(signer.fingerprint == other.fingerprint for other in known):
            return False
        self._write([*known, signer])
        return True

    def remove(self, fingerprint: str) -> bool:
        """Remove a signer, and return whether it was there. Raises OSError."""
        known = self.read()
        kept = [signer for signer in known if signer.fingerprint != fingerprint]
        if len(kept) < len(known):
            self._write(kept)
        return len(kept) < len(known)

    def _write(self, signers: list[Signer]) -> None:
        text = "".join(f"{signer.fingerprint} {signer.name}".rstrip() + "\n" for signer in signers)
        replace_private(self._path, text.encode())


def _library() -> tuple[Any, type[Exception]]:
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise UnusableKey(f"signatures of others need the library cryptography: {INSTALL}") from None
    return ed25519, InvalidSignature
