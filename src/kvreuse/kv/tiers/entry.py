"""One block of KV on its way between tiers, and its form outside of this process.

    [ fixed part | tenant | token bytes | xxh3_128 of these ][ payload ]

Integers are little-endian; the payload is in the byte order of the machine that wrote it, which the fixed part names.
Knows bytes. Knows nothing of where they are kept.
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass
from io import BufferedIOBase
from typing import NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_128_digest

__all__ = ["MAX_HEADER_BYTES", "BadEntry", "Block", "Header", "header_of", "read_block", "read_header", "view_of"]

MAX_HEADER_BYTES = 2**17
# magic, version, byte order; encoding, namespace, key, the payload's xxh3_128; bytes of tenant, tokens and payload
_FIXED = struct.Struct("<4sHH8s16s16s16sIIQ")
_OURS = (b"KVRB", 2, {"little": 1, "big": 2}[sys.byteorder])
_SUM_BYTES = 16


class BadEntry(Exception):
    """An entry that is not what its name says: short, flipped, foreign, of another version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """The KV of one block of tokens.

    key: the chained hash of the block (16 bytes). tenant: whose it is; part of the hash too, kept for purge.
    token_bytes: the block's own token ids, 4 bytes each, compared on every hit.
    payload: uint8 (num_bytes,) on the CPU; `encoding` says how it is packed ("raw", or a quantised form).
    """

    key: bytes
    tenant: str
    token_bytes: bytes
    payload: Tensor
    encoding: str = "raw"

    @property
    def num_bytes(self) -> int:
        """Bytes of the payload."""
        return self.payload.numel()

    @property
    def entry_bytes(self) -> int:
        """Bytes of header and payload."""
        return _FIXED.size + len(_encoded(self.tenant)) + len(self.token_bytes) + _SUM_BYTES + self.num_bytes


class Header(NamedTuple):
    """What an entry says of its payload; tenant, token_bytes and encoding as in Block."""

    tenant: str
    token_bytes: bytes
    encoding: str
    checksum: bytes
    num_payload_bytes: int


def header_of(block: Block, *, namespace: bytes) -> bytes:
    """What is written before the payload. namespace: 16 bytes, whose KV it is."""
    tenant = _encoded(block.tenant)
    names = (block.encoding.encode("ascii"), namespace, block.key, xxh3_128_digest(view_of(block.payload)))
    sizes = (len(tenant), len(block.token_bytes), block.num_bytes)
    header = _FIXED.pack(*_OURS, *names, *sizes) + tenant + block.token_bytes
    return header + xxh3_128_digest(header)


def read_header(file: BufferedIOBase, *, namespace: bytes, key: bytes) -> Header:
    """Leaves the file at the payload. Raises BadEntry when it is damaged or another's."""
    fixed = file.read(_FIXED.size)
    if len(fixed) < _FIXED.size:
        raise BadEntry("it is cut short")
    *ours, encoding, owner, name, checksum, num_tenant, num_tokens, num_payload = _FIXED.unpack(fixed)
    if tuple(ours) != _OURS:
        raise BadEntry("it has another form, version or byte order")
    if num_tenant + num_tokens > MAX_HEADER_BYTES:
        raise BadEntry("its header has an impossible size")
    rest = file.read(num_tenant + num_tokens + _SUM_BYTES)
    if xxh3_128_digest(fixed + rest[:-_SUM_BYTES]) != rest[-_SUM_BYTES:]:
        raise BadEntry("its header does not match its checksum")
    if (owner, name) != (namespace, key):
        raise BadEntry("it belongs to another model or has another name")
    tenant = rest[:num_tenant].decode("utf-8", "surrogatepass")
    return Header(tenant, rest[num_tenant:-_SUM_BYTES], encoding.rstrip(b"\0").decode("ascii"), checksum, num_payload)


def read_block(file: BufferedIOBase, *, namespace: bytes, key: bytes, token_bytes: bytes = b"") -> Block:
    """The block that the whole file holds; no token_bytes: whatever its tokens. Raises BadEntry."""
    header = read_header(file, namespace=namespace, key=key)
    if token_bytes and header.token_bytes != token_bytes:
        raise BadEntry("it holds other tokens")
    payload = torch.empty(header.num_payload_bytes, dtype=torch.uint8)
    if file.readinto(view_of(payload)) != header.num_payload_bytes or file.read(1):
        raise BadEntry("it is cut short or too long")
    if xxh3_128_digest(view_of(payload)) != header.checksum:
        raise BadEntry("its payload does not match its checksum")
    return Block(
        key=key, tenant=header.tenant, token_bytes=header.token_bytes, payload=payload, encoding=header.encoding
    )


def view_of(payload: Tensor) -> memoryview:
    """The bytes of a uint8 tensor on the CPU, not copied."""
    return memoryview(payload.numpy())  # type: ignore[arg-type]  # numpy's stubs say nothing of buffers


def _encoded(tenant: str) -> bytes:
    return tenant.encode("utf-8", "surrogatepass")
