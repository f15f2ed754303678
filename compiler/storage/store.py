"""The store keeps compiled graphs on disk, by key, for this machine or for a fleet that shares one signing key."""

from __future__ import annotations

import errno
import io
import json
import logging
import math
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ..common import bounded_json
from ..common.errors import printable
from ..common.files import PARTIAL_AGE, STORE, is_partial, open_regular, write_whole
from .base import StoreEntry
from .claims import claimed
from .graph_file import MAX_FILE, SUFFIX, GraphFileError, StoredGraph, is_signed_by, read_graphs, write_graphs
from .private_files import UnusableKey
from .signers import Signature
from .trust import Trust

if TYPE_CHECKING:
    from filelock import BaseFileLock
    from fsspec import AbstractFileSystem

log = logging.getLogger(__name__)

GIGABYTE = 10**9
DEFAULT_LIMIT = 10 * GIGABYTE
"""Bytes that a store may hold by default."""
LOCK_LIMIT = 300.0
"""A process waits this many seconds for another one's compile. Then it compiles the same graph itself."""
LOCKS = "compiled_graphs.locks"
_HELD = (errno.EAGAIN, errno.EACCES)
"""What the system says of a lock that somebody else holds."""
NOTE_SUFFIX = ".wanted.json"
MAX_NOTE = 2**20
"""Bytes. The note of a model has a few kilobytes."""
PATIENCE = 2.0
"""A store at a URL that takes longer than these seconds to fail is not asked again for PAUSE seconds."""
PAUSE = 60.0
"""Seconds."""
_KEY = "[0-9a-f]{64}"
_GRAPH_NAME = _KEY + re.escape(SUFFIX)
_NOTE_NAME = _KEY + re.escape(NOTE_SUFFIX)
CLAIM_SUFFIX = ".claim"
MAX_CLAIM = 100
"""Bytes."""
_CLAIM_NAME = _KEY + re.escape(CLAIM_SUFFIX)
LOCK_CHARACTERS = 4
"""A key begins with the name of its lock."""
_LOCK_NAME = r"(?:[0-9a-f]{2}){1,2}\.lock"
"""Only this module gives files these names. Other files stay: the folder may hold saved graphs, or anything else."""
WRITTEN = ("LastModified", "last_modified", "mtime", "created")
"""Names of the time of writing: in S3, Azure, Google and most others, and in fsspec's memory file system."""


class StoreError(Exception):
    """This place cannot be a store. The message is one sentence for people."""


class _Store(ABC):
    """The store holds one signed file per graph, up to a size limit.

    A subclass adds the operations on files, which raise only OSError. `get` and `put` treat a store that fails as an
    empty one: the image is made either way. Keys and the names of notes are 64 hexadecimal digits.
    """

    is_near = True
    """Whether a listing takes almost no time."""

    def __init__(self, place: str, trust: Trust | None, limit: int | None) -> None:
        self.place = place
        self.limit = default_limit() if limit is None else limit
        self._trust = trust or Trust()

    def get(self, key: str) -> StoredGraph | None:
        """Return a graph, or None if its file is missing, damaged, or not signed by this machine."""
        name = f"{key}{SUFFIX}"
        try:
            graph = self.read_graph(name)
        except FileNotFoundError:
            return None
        except (OSError, GraphFileError) as error:
            log.warning("The stored graph %s is compiled again: %s.", printable(name), printable(str(error)))
            return None
        self.note_use(key)
        return graph

    def note_use(self, key: str) -> None:
        """Record that a graph was used: the least recently used ones go first."""
        with suppress(OSError):
            self._touch(f"{key}{SUFFIX}")

    def put(self, graph: StoredGraph) -> bool:
        """Write a graph and return True, or log why it could not be kept and return False."""
        name = f"{graph.key}{SUFFIX}"
        try:
            self._write(_checked(name, _GRAPH_NAME), write_graphs([graph], self._trust))
        except (UnusableKey, GraphFileError) as error:
            log.warning("A compiled graph could not be kept: %s.", error)
            return False
        except OSError as error:
            log.warning(
                "A compiled graph could not be kept in %s (%s); it serves this session and is compiled again in the "
                "next. Check that there is room and that ComfyUI may write there, or set COMPILED_GRAPHS_STORE.",
                self.place,
                error.strerror or error,
            )
            return False
        with suppress(OSError):  # some places can be written but not listed
            self.shrink(self.limit, keep=name)
        return True

    def own(self, key: str) -> StoredGraph | None:
        """Return a graph that was signed with this machine's key, or None. That is no use of it."""
        try:
            with self.open(_checked(f"{key}{SUFFIX}", _GRAPH_NAME)) as file:
                graphs = read_graphs(file, self._trust) if is_signed_by(file, self._trust) else []
        except (OSError, GraphFileError, UnusableKey):
            return None
        return next((graph for graph in graphs if graph.key == key), None)

    def replace(self, graph: StoredGraph) -> None:
        """Write a graph that the store has. Raises OSError, GraphFileError and UnusableKey, and the old one stays."""
        self._write(_checked(f"{graph.key}{SUFFIX}", _GRAPH_NAME), write_graphs([graph], self._trust))

    def discard(self, key: str) -> bool:
        """Remove a graph that has turned out to be wrong, and return whether it is gone."""
        return self.remove(f"{key}{SUFFIX}")

    def note(self, name: str) -> bytes | None:
        """Return the note that this machine keeps under a name, or None if there is none or it cannot be read."""
        try:
            with self.open(_checked(f"{name}{NOTE_SUFFIX}", _NOTE_NAME)) as file:
                return self._read_note(name, file)
        except FileNotFoundError:
            return None
        except (OSError, GraphFileError) as error:
            log.warning("The note %s%s is made again: %s.", printable(name), NOTE_SUFFIX, printable(str(error)))
            return None

    def put_note(self, name: str, data: bytes) -> None:
        """Keep a short UTF-8 text that is costly to find out again. Notes do not count towards the limit."""
        with suppress(OSError, GraphFileError):
            fields = {"note": data.decode(), "signature": self._trust.sign(_signed(name, data))}
            if made := self._trust.countersign(_signed(name, data)):
                fields |= {"signer": made.key, "signature_of_signer": made.value}
            self._write(_checked(f"{name}{NOTE_SUFFIX}", _NOTE_NAME), json.dumps(fields).encode())

    def _read_note(self, name: str, file: BinaryIO) -> bytes:
        data = file.read(MAX_NOTE + 1)
        if len(data) > MAX_NOTE:
            raise GraphFileError(f"it has more than {MAX_NOTE} bytes")
        try:
            fields = bounded_json.parse(data)
            note, signature = fields["note"].encode(), fields["signature"]
            is_ours = self._trust.is_own(_signed(name, note), signature)
            maker = Signature(str(fields.get("signer", "")), str(fields.get("signature_of_signer", "")))
        except (AttributeError, KeyError, TypeError, ValueError):
            raise GraphFileError("it is not a note") from None
        if is_ours:
            return note
        distrust = self._trust.distrust_of(_signed(name, note), maker) if maker.key else None
        if distrust or not maker.key:
            raise GraphFileError(distrust.reason if distrust else "it was not made on this machine")
        return note

    def exclusive(self, key: str) -> AbstractContextManager[None]:
        """Keep others from compiling a graph at the same time, where the place has locks. Not reentrant."""
        return nullcontext()

    def keys(self) -> set[str]:
        """Return the keys of all graphs. The set is empty if the place cannot be listed."""
        try:
            return {entry.name.removesuffix(SUFFIX) for entry in self.entries()}
        except OSError:
            return set()

    def entries(self) -> list[StoreEntry]:
        """Return the graph files that stores wrote. Raises OSError if the place cannot be listed."""
        return [file for file in self._files() if re.fullmatch(_GRAPH_NAME, file.name)]

    @abstractmethod
    def open(self, name: str) -> BinaryIO:
        """Open a file for reading, and never wait for a writer. Raises OSError."""

    def read_graph(self, name: str) -> StoredGraph:
        """Return the graph of a file.

        Raises OSError and UntrustedFile, and GraphFileError if the file is damaged or holds another graph.
        """
        with self.open(_checked(name, _GRAPH_NAME)) as file:
            graphs = read_graphs(file, self._trust)
        named = [graph for graph in graphs if f"{graph.key}{SUFFIX}" == name]
        if not named:
            raise GraphFileError("the file does not hold the graph that its name says")
        return named[0]

    def remove(self, name: str) -> bool:
        """Remove a file that a store wrote. Return whether it is gone: Windows keeps a file that is open elsewhere."""
        if not _is_ours(name):
            return False
        try:
            self._delete(name)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def shrink(self, limit: int, keep: str = "") -> list[StoreEntry]:
        """Remove the least recently used graphs until the rest fit, but never `keep`. Return those removed.

        Raises OSError if the place cannot be listed.
        """
        entries = sorted(self.entries(), key=lambda entry: (entry.used, entry.name))
        excess = sum(entry.size for entry in entries) - limit
        gone = []
        for entry in entries:
            if excess > 0 and entry.name != keep and self.remove(entry.name):
                excess -= entry.size
                gone.append(entry)
        return gone

    def sweep(self, age: float = PARTIAL_AGE) -> list[StoreEntry]:
        """Remove and return partial files and claims older than `age` seconds. Raises OSError as `entries` does."""
        latest = time.time() - age
        left = [file for file in self._files() if is_partial(file.name, STORE) or re.fullmatch(_CLAIM_NAME, file.name)]
        return [file for file in left if file.used <= latest and self.remove(file.name)]

    def clear(self) -> list[StoreEntry]:
        """Remove only what the store has written. Return the graph files that were removed. Raises OSError."""
        self.sweep(age=-math.inf)
        for file in self._files():
            if re.fullmatch(_NOTE_NAME, file.name) or re.fullmatch(_CLAIM_NAME, file.name):
                self.remove(file.name)
        return [entry for entry in self.entries() if self.remove(entry.name)]

    def _files(self) -> list[StoreEntry]:
        try:
            return self._list()
        except FileNotFoundError:
            return []

    @abstractmethod
    def _list(self) -> list[StoreEntry]: ...

    @abstractmethod
    def _write(self, name: str, data: bytes) -> None: ...

    @abstractmethod
    def _delete(self, name: str) -> None: ...

    def _touch(self, name: str) -> None:  # noqa: B027  not every place keeps the time of use
        """Record that a file was used."""


class FolderStore(_Store):
    """A store in a folder. Each file is written whole or not at all, and its time stamp is that of its last use."""

    def __init__(self, folder: str | os.PathLike, trust: Trust | None = None, limit: int | None = None) -> None:
        super().__init__(str(folder), trust, limit)
        self.folder = Path(folder)
        self._has_locks: bool | None = None

    @contextmanager
    def exclusive(self, key: str) -> Iterator[None]:
        """Keep other processes and threads from compiling a graph at the same time. Not reentrant.

        The operating system frees the lock of a process that dies. After LOCK_LIMIT, or where locks do not work, the
        caller goes on without one: at worst two processes compile the same graph, and each of them writes it whole.
        """
        lock = self._lock(key)
        try:
            yield
        finally:
            if lock:
                with suppress(OSError):
                    lock.release()

    def clear(self) -> list[StoreEntry]:
        """Remove only what the store has written, and its locks even if held. Return the graph files removed."""
        gone = super().clear()
        for path in (self.folder / LOCKS).glob("*.lock"):
            if re.fullmatch(_LOCK_NAME, path.name):
                with suppress(OSError):
                    path.unlink()
        with suppress(OSError):
            (self.folder / LOCKS).rmdir()
        return gone

    def _lock(self, key: str) -> BaseFileLock | None:
        # A lock file cannot safely be deleted while others wait for it. It is empty, and some characters of the key
        # name it, so their number is bounded. Graphs that share a lock are compiled one after the other: with two
        # characters, two of 14 graphs would share one in three of ten networks.
        path = self.folder / LOCKS / f"{key[:LOCK_CHARACTERS]}.lock"
        try:
            import filelock

            path.parent.mkdir(parents=True, exist_ok=True)
            if self._has_locks is None:
                self._has_locks = _has_locks(path)
            if not self._has_locks:
                return None
            lock = filelock.FileLock(path)  # a new object keeps threads apart too
            lock.acquire(timeout=LOCK_LIMIT)
        except TimeoutError:
            log.warning("Another process has held %s for %.0f s. This one compiles without waiting.", path, LOCK_LIMIT)
            return None
        except (ImportError, OSError, NotImplementedError) as error:
            log.debug("No lock at %s (%r): two processes may compile the same graph.", path, error)
            return None
        return lock

    def _list(self) -> list[StoreEntry]:
        with os.scandir(self.folder) as files:
            entries = [_entry(file) for file in files]
        return [entry for entry in entries if entry]

    def open(self, name: str) -> BinaryIO:
        return open_regular(self.folder / name)

    def _write(self, name: str, data: bytes) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / name, data, STORE)

    def _delete(self, name: str) -> None:
        (self.folder / name).unlink()

    def _touch(self, name: str) -> None:
        os.utime(self.folder / name)


class UrlStore(_Store):
    """A store at any URL that fsspec has a driver for. The bucket or folder must exist.

    An object store writes an object whole or not at all, so no partial file is needed. If a driver writes differently,
    the digests show the damage. There are no locks, so machines take turns by claims (`claims.py`). Reading a file does
    not change its time stamp, so the order of use is the order of writing.
    """

    is_near = False

    def __init__(self, url: str, trust: Trust | None = None, limit: int | None = None) -> None:
        super().__init__(_without_password(url), trust, limit)
        _require_driver(url)
        self._url = url
        self._paused_until = 0.0

    @contextmanager
    def exclusive(self, key: str) -> Iterator[None]:
        """Keep other machines from compiling a graph at the same time, until it exists. Not reentrant."""
        graph = f"{key}{SUFFIX}"
        with claimed(_ClaimObject(self, f"{key}{CLAIM_SUFFIX}"), LOCK_LIMIT, lambda: self._is_made(graph)):
            yield

    def _is_made(self, name: str) -> bool:
        """Whether there is a graph that this machine can use. A damaged one is made again, by one machine."""
        if not self._exists(name):
            return False
        try:
            self.read_graph(name)
        except (OSError, GraphFileError):
            return False
        return True

    def _exists(self, name: str) -> bool:
        try:
            with self._driver_errors():
                files, folder = self._root
                files.invalidate_cache(folder)
                return files.exists(f"{folder}/{name}")
        except OSError:
            return False

    @cached_property
    def _root(self) -> tuple[AbstractFileSystem, str]:
        """The file system and the folder in it. Some drivers connect here, which may fail."""
        from fsspec.core import url_to_fs

        files, folder = url_to_fs(self._url)
        return files, folder.rstrip("/")

    @contextmanager
    def _driver_errors(self) -> Iterator[None]:
        """Turn whatever a driver's library raises into OSError: the file cannot be read or written."""
        start = time.monotonic()
        if start < self._paused_until:
            raise OSError("the place did not answer and is not asked again for a minute")
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:
            if time.monotonic() - start > PATIENCE:  # otherwise every graph of a model would wait for it
                self._paused_until = time.monotonic() + PAUSE
            raise OSError(f"{type(error).__name__}: {error}") from error

    def _list(self) -> list[StoreEntry]:
        with self._driver_errors():
            files, folder = self._root
            files.invalidate_cache(folder)  # other machines write there too
            found = [info for info in files.ls(folder, detail=True) if info["type"] == "file"]
            return [
                StoreEntry(info["name"].rsplit("/", 1)[-1], info.get("size") or 0, _written(info)) for info in found
            ]

    def open(self, name: str) -> BinaryIO:
        with self._driver_errors():
            files, folder = self._root
            data = files.cat_file(f"{folder}/{name}", start=0, end=MAX_FILE + 1)
        if len(data) > MAX_FILE:
            raise OSError(f"it has more than {MAX_FILE} bytes")
        return io.BytesIO(data)

    def _write(self, name: str, data: bytes) -> None:
        with self._driver_errors():
            files, folder = self._root
            files.pipe_file(f"{folder}/{name}", data)

    def _delete(self, name: str) -> None:
        with self._driver_errors():
            files, folder = self._root
            files.rm_file(f"{folder}/{name}")


class _ClaimObject:
    """A claim in a store at a URL."""

    def __init__(self, store: UrlStore, name: str) -> None:
        self._store = store
        self._name = _checked(name, _CLAIM_NAME)

    def read(self) -> bytes | None:
        try:
            return self._store.open(self._name).read(MAX_CLAIM)
        except FileNotFoundError:
            return None

    def write(self, data: bytes) -> None:
        self._store._write(self._name, data)

    def delete(self) -> None:
        self._store._delete(self._name)


def open_store(place: str) -> FolderStore | UrlStore:
    """Return the store in a folder or at a URL. Raises StoreError if there is no driver for the URL."""
    if "://" not in place:
        return FolderStore(os.path.expanduser(place))
    if place.split("://")[0] not in ("file", "local"):
        return UrlStore(place)
    _require_driver(place)
    from fsspec.core import strip_protocol

    return FolderStore(strip_protocol(place))


def _has_locks(path: Path) -> bool:
    """Whether files can be locked here. Some network folders cannot, and filelock then waits until its limit ends, or
    takes a marker file for a lock, which stays when a process dies. Raises OSError if there can be no such file.
    """
    if os.name == "nt":
        return True
    import fcntl

    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in _HELD
    return True


def default_limit() -> int:
    """Return how many bytes a store may hold: COMPILED_GRAPHS_STORE_LIMIT gigabytes, or 10 without that variable."""
    text = os.environ.get("COMPILED_GRAPHS_STORE_LIMIT")
    if not text:
        return DEFAULT_LIMIT
    try:
        return gigabytes(text)
    except ValueError:
        log.warning("COMPILED_GRAPHS_STORE_LIMIT is %r, which is not a number of gigabytes. The limit is 10.", text)
        return DEFAULT_LIMIT


def gigabytes(text: str) -> int:
    """Return a number of gigabytes in bytes. Raises ValueError."""
    number = float(text)
    if not 0 <= number < math.inf:
        raise ValueError(f"{text} gigabytes")
    return int(number * GIGABYTE)


def _require_driver(url: str) -> None:
    place = _without_password(url)
    try:
        from fsspec import get_filesystem_class

        for protocol in url.split("://")[0].split("::"):
            get_filesystem_class(protocol)
    except ImportError as error:
        raise StoreError(f"The store {place} needs a package that is not installed here: {error}.") from None
    except Exception as error:  # a driver's module may fail in its own ways
        raise StoreError(
            f"The store {place} cannot be used ({error}): name a folder, or a URL whose fsspec driver is installed, "
            "such as s3://bucket/folder with s3fs."
        ) from None


def _is_ours(name: str) -> bool:
    names = _GRAPH_NAME, _NOTE_NAME, _CLAIM_NAME
    return any(re.fullmatch(pattern, name) for pattern in names) or is_partial(name, STORE)


def _checked(name: str, pattern: str) -> str:
    """Return a name that matches the pattern. Raises GraphFileError: another name could lead to somebody's file."""
    if not re.fullmatch(pattern, name):
        raise GraphFileError(f"{printable(name)!r} is not the name of a store's file")
    return name


def _signed(name: str, note: bytes) -> bytes:
    """Return the bytes that are signed. They hold the name, so no note passes for another, nor for a manifest."""
    return b"note\0" + name.encode() + b"\0" + note


def _without_password(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//", url)


def _entry(file: os.DirEntry) -> StoreEntry | None:
    """Return the entry of a file, or None if it is not a file or has vanished meanwhile."""
    try:
        status = file.stat()
        return StoreEntry(file.name, status.st_size, status.st_mtime) if file.is_file() else None
    except OSError:
        return None


def _written(info: Mapping[str, Any]) -> float:
    written = next((info[name] for name in WRITTEN if name in info), None)
    if isinstance(written, datetime):
        return written.timestamp()
    return float(written) if isinstance(written, int | float) else 0.0
