"""Blocks as files: <folder>/<namespace>/<2 hex>/<key hex>.

A file appears whole or not at all: it is written beside its place and renamed. One process uses the folder at a time,
by a lock on <folder>/.lock that ends with the process; another one goes without until then. Files of other namespaces
count against the cap and go first. Names of other forms are never touched. Knows files. Knows nothing of what blocks
mean.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Unpack

from kvreuse.kv.tiers.base import TierOptions
from kvreuse.kv.tiers.booked import BookedTier, Entry
from kvreuse.kv.tiers.entry import BadEntry, Block, header_of, read_header, view_of
from kvreuse.types import Tier

__all__ = ["DiskTier"]

_PAGE_BYTES = 4096  # files take whole pages
_USE_S = 60.0  # uses closer together than this are one to the next process
_KEY_BYTES = 16
_NAMES = "[0-9a-f]" * 32 + "/" + "[0-9a-f]" * 2 + "/" + "[0-9a-f]" * 32


class DiskTier(BookedTier):
    """Opens at once; a fault then is one like any other."""

    tier = Tier.DISK

    def __init__(self, folder: Path, **options: Unpack[TierOptions]) -> None:
        super().__init__(**options)
        self._folder = folder
        self._lock_file: FileIO | None = None
        self.open()

    def close(self) -> None:
        if self._lock_file is not None:
            self._lock_file.close()

    def _listed(self) -> dict[bytes, Entry]:
        self._hold_lock()
        for path in self._folder.glob(_NAMES + ".part"):
            path.unlink()
        aged = [(self._key(path), path, path.stat()) for path in self._folder.glob(_NAMES)]
        # Those of other models first, then the least recently used.
        aged.sort(key=lambda item: (len(item[0]) == _KEY_BYTES, item[2].st_mtime_ns))
        entries = {key: self._adopted(path, stat.st_size) for key, path, stat in aged}
        return {key: entry for key, entry in entries.items() if entry is not None}

    def _hold_lock(self) -> None:
        """Also after the folder was removed. Raises BlockingIOError when another process has it."""
        path = self._folder / ".lock"
        with suppress(FileNotFoundError):
            if self._lock_file is not None and os.path.samestat(os.fstat(self._lock_file.fileno()), path.stat()):
                return
        self._folder.mkdir(parents=True, exist_ok=True)
        self.close()
        lock_file = FileIO(os.open(path, os.O_RDONLY | os.O_CREAT, 0o644))
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock_file.close()
            raise
        self._lock_file = lock_file

    def _adopted(self, path: Path, num_bytes: int) -> Entry | None:
        """The entry of a file as its header tells it; one that makes no sense is deleted."""
        namespace, key = bytes.fromhex(path.parent.parent.name), bytes.fromhex(path.name)
        try:
            with path.open("rb") as file:
                header = read_header(file, namespace=namespace, key=key)
                if num_bytes != file.tell() + header.num_payload_bytes:
                    raise BadEntry("it is cut short or too long")
        except (BadEntry, OSError):
            self._count(num_corrupt=1)
            path.unlink()
            return None
        return Entry(_pages(num_bytes), header.tenant)

    def _key(self, path: Path) -> bytes:
        """Of an own entry its key, of one of another namespace its path."""
        if path.parent.parent.name == self._namespace.hex():
            return bytes.fromhex(path.name)
        return str(path.relative_to(self._folder)).encode()

    def _path(self, key: bytes) -> Path:
        if len(key) != _KEY_BYTES:
            return self._folder / key.decode()
        return self._folder / self._namespace.hex() / key.hex()[:2] / key.hex()

    def _size(self, block: Block) -> int:
        return _pages(block.entry_bytes)

    def _write(self, block: Block) -> None:
        self._hold_lock()
        path = self._path(block.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        temp = path.with_suffix(".part")
        with temp.open("wb") as file:
            file.write(header_of(block, namespace=self._namespace))
            file.write(view_of(block.payload))
        temp.rename(path)

    def _opened(self, key: bytes) -> BufferedReader | None:
        if len(key) != _KEY_BYTES:
            return None
        try:
            file = self._path(key).open("rb")
        except FileNotFoundError:
            return None
        if time.time() - os.fstat(file.fileno()).st_mtime > _USE_S:
            with suppress(OSError):  # the order of use need not survive a restart
                os.utime(file.fileno())
        return file

    def _delete(self, key: bytes) -> None:
        path = self._path(key)
        for file in (path, path.with_suffix(".part")):
            file.unlink(missing_ok=True)
        if len(key) != _KEY_BYTES:
            with suppress(OSError):  # not empty yet
                path.parent.rmdir()
                path.parent.parent.rmdir()


def _pages(num_bytes: int) -> int:
    return num_bytes + -num_bytes % _PAGE_BYTES
