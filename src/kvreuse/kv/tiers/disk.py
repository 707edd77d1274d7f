"""Blocks as files: <folder>/<namespace>/<2 hex>/<key hex>.

A file appears whole or not at all: it is written beside its place and renamed. One process uses the folder at a time,
by a lock on <folder>/.lock that ends with the process; another one goes without until then. Files of other namespaces
count against the cap and go first. Names of other forms are never touched. Knows files. Knows nothing of what blocks
mean.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path

import torch

from kvreuse.kv.tiers.base import BadEntry
from kvreuse.kv.tiers.block import Block
from kvreuse.kv.tiers.booked import BookedTier, Found
from kvreuse.kv.tiers.entry import FIXED_BYTES, Header, entry_size, header_bytes, view_of
from kvreuse.types import Tier

__all__ = ["DiskTier"]

_PAGE_BYTES = 4096  # files take whole pages
_USE_S = 60.0  # uses closer together than this are one to the next process
_NAMESPACE, _FOLDER = re.compile("[0-9a-f]{32}"), re.compile("[0-9a-f]{2}")
_FILE = re.compile(r"([0-9a-f]{32})(\.part)?")
_KEY_BYTES = 16


class DiskTier(BookedTier):
    """namespace: 32 hex digits, the identity of the KV. Opens at once; a fault then is one like any other."""

    tier = Tier.DISK

    def __init__(
        self, folder: Path, *, namespace: str, max_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(max_bytes=max_bytes, clock=clock)
        self._folder = folder
        self._namespace = namespace
        self._lock_file: FileIO | None = None
        self.open()

    def close(self) -> None:
        if self._lock_file is not None:
            self._lock_file.close()

    def _open(self) -> list[Found]:
        self._hold_lock()
        aged = [(path, path.stat()) for path in self._listed()]
        # Those of other models first, then the least recently used.
        aged.sort(key=lambda item: (item[0].parent.parent.name == self._namespace, item[1].st_mtime_ns))
        return [found for path, stat in aged if (found := self._adopt(path, stat.st_size))]

    def _hold_lock(self) -> None:
        """Also after the folder was removed. Raises BlockingIOError when another process has it."""
        path = self._folder / ".lock"
        with suppress(FileNotFoundError):
            if self._lock_file is not None and os.path.samestat(os.fstat(self._lock_file.fileno()), path.stat()):
                return
        self._folder.mkdir(parents=True, exist_ok=True)
        self.close()
        lock_file = FileIO(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock_file.close()
            raise
        self._lock_file = lock_file

    def _listed(self) -> Iterator[Path]:
        for namespace in _below(self._folder, _NAMESPACE):
            for folder in _below(namespace, _FOLDER):
                yield from _below(folder, _FILE)

    def _adopt(self, path: Path, num_bytes: int) -> Found | None:
        """The entry of a file as its header tells it; one that was never finished or makes no sense is deleted."""
        namespace, key = path.parent.parent.name, path.name
        try:
            with FileIO(path) as file:
                header = _read_header(file)
            header.check(namespace=bytes.fromhex(namespace), key=bytes.fromhex(key))
            if num_bytes != len(header.encode()) + header.num_payload_bytes:
                raise BadEntry("it is cut short or too long")
        except (BadEntry, ValueError, OSError):
            self._count("corrupt", not path.suffix)
            path.unlink()
            return None
        name = header.key if namespace == self._namespace else str(path.relative_to(self._folder)).encode()
        return Found(name, _pages(num_bytes), header.tenant)

    def _size(self, block: Block) -> int:
        return _pages(entry_size(block))

    def _path(self, key: bytes) -> Path:
        """Of an own entry by its key, of one of another namespace by its path."""
        if len(key) != _KEY_BYTES:
            return self._folder / key.decode()
        return self._folder / self._namespace / key.hex()[:2] / key.hex()

    def _write(self, block: Block) -> None:
        self._hold_lock()
        path = self._path(block.key)
        header = Header.of(block, namespace=bytes.fromhex(self._namespace)).encode()
        temp = path.with_suffix(".part")
        try:
            file = temp.open("wb")
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = temp.open("wb")
        with file:
            file.write(header)
            file.write(view_of(block.payload))
        temp.rename(path)

    def _read(self, key: bytes, token_bytes: bytes) -> Block:
        try:
            file = FileIO(self._path(key))
        except FileNotFoundError:
            raise KeyError("its file is gone") from None
        with file:
            header = _read_header(file)
            header.check(namespace=bytes.fromhex(self._namespace), key=key, token_bytes=token_bytes)
            stat = os.fstat(file.fileno())
            if stat.st_size != file.tell() + header.num_payload_bytes:
                raise BadEntry("it is cut short or too long")
            payload = torch.empty(header.num_payload_bytes, dtype=torch.uint8)
            _fill(file, view_of(payload))
            if time.time() - stat.st_mtime > _USE_S:
                with suppress(OSError):  # the order of use need not survive a restart
                    os.utime(file.fileno())
        return header.block(payload)

    def _delete(self, key: bytes) -> None:
        path = self._path(key)
        for file in (path, path.with_suffix(".part")):
            file.unlink(missing_ok=True)
        if len(key) != _KEY_BYTES:
            with suppress(OSError):  # not empty yet
                path.parent.rmdir()
                path.parent.parent.rmdir()


def _below(folder: Path, names: re.Pattern[str]) -> Iterable[Path]:
    try:
        return [path for path in folder.iterdir() if names.fullmatch(path.name)]
    except NotADirectoryError:
        return []


def _pages(num_bytes: int) -> int:
    return num_bytes + -num_bytes % _PAGE_BYTES


def _read_header(file: FileIO) -> Header:
    fixed = file.read(FIXED_BYTES)
    return Header.decode(fixed + file.read(header_bytes(fixed) - len(fixed)))


def _fill(file: FileIO, view: memoryview) -> None:
    while view:
        num_bytes = file.readinto(view)
        if not num_bytes:
            raise BadEntry("it is cut short")
        view = view[num_bytes:]
