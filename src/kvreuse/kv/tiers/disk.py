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
        """As the headers tell; files that were never finished or make no sense are deleted."""
        self._hold_lock()
        for path in self._folder.glob(_NAMES + ".part"):
            path.unlink()
        found = []
        for path in self._folder.glob(_NAMES):
            owner, name = bytes.fromhex(path.parts[-3]), bytes.fromhex(path.name)
            try:
                with path.open("rb") as file:
                    header, stat = read_header(file, namespace=owner, key=name), os.fstat(file.fileno())
                    if stat.st_size != file.tell() + header.num_payload_bytes:
                        raise BadEntry("it is cut short or too long")
            except (BadEntry, OSError):
                self._count(num_corrupt=1)
                path.unlink()
                continue
            is_own = owner == self._namespace
            entry = Entry(_pages(stat.st_size), header.tenant)
            found.append((is_own, stat.st_mtime_ns, name if is_own else owner + name, entry))
        # Those of other models first, then the least recently used.
        return {key: entry for _, _, key, entry in sorted(found)}

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

    def _path(self, key: bytes) -> Path:
        """Of an own entry by its key, of one of another namespace by that and its key."""
        owner, name = (self._namespace + key)[-2 * _KEY_BYTES : -_KEY_BYTES].hex(), key[-_KEY_BYTES:].hex()
        return self._folder / owner / name[:2] / name

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
