"""How a block is written outside of this process: a header that checks itself and the payload, then the payload.

Header: a fixed part, the tenant, the block's token bytes, zeros, and the xxh3_128 of all of it; a multiple of 64 bytes.
Integers are little-endian everywhere; the payload is in the byte order of the machine that wrote it, which the header
names. Knows bytes. Knows nothing of where they are kept.
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from xxhash import xxh3_128_digest

from kvreuse.kv.tiers.base import BadEntry
from kvreuse.kv.tiers.block import Block

__all__ = [
    "ENTRY_VERSION",
    "FIXED_BYTES",
    "MAX_HEADER_BYTES",
    "Header",
    "block_of",
    "entry_size",
    "header_bytes",
    "view_of",
]

ENTRY_VERSION = 1
_MAGIC = b"KVRB"
_ORDER = {"little": 1, "big": 2}[sys.byteorder]
# magic, version, byte order, header, tenant, tokens and payload in bytes, encoding, namespace, key, payload's checksum
_FIXED = struct.Struct("<4sHBxIIIQ8s16s16s16s")
FIXED_BYTES = _FIXED.size
_SUM_BYTES = 16
_ALIGNMENT = 64
MAX_HEADER_BYTES = 2**17


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """namespace: 16 bytes, whose KV it is. checksum: xxh3_128 of the payload. The rest is as in Block."""

    namespace: bytes
    key: bytes
    tenant: str
    token_bytes: bytes
    encoding: str
    num_payload_bytes: int
    checksum: bytes

    @classmethod
    def of(cls, block: Block, *, namespace: bytes) -> Self:
        return cls(
            namespace=namespace,
            key=block.key,
            tenant=block.tenant,
            token_bytes=block.token_bytes,
            encoding=block.encoding,
            num_payload_bytes=block.num_bytes,
            checksum=xxh3_128_digest(view_of(block.payload)),
        )

    def encode(self, *, version: int = ENTRY_VERSION, byte_order: int = _ORDER) -> bytes:
        tenant = _encoded(self.tenant)
        num_bytes = _header_size(tenant, self.token_bytes)
        fixed = _FIXED.pack(
            _MAGIC,
            version,
            byte_order,
            num_bytes,
            len(tenant),
            len(self.token_bytes),
            self.num_payload_bytes,
            self.encoding.encode("ascii"),
            self.namespace,
            self.key,
            self.checksum,
        )
        body = (fixed + tenant + self.token_bytes).ljust(num_bytes - _SUM_BYTES, b"\0")
        return body + xxh3_128_digest(body)

    @classmethod
    def decode(cls, raw: bytes) -> Self:
        """A whole header. Raises BadEntry."""
        if header_bytes(raw) != len(raw) or xxh3_128_digest(raw[:-_SUM_BYTES]) != raw[-_SUM_BYTES:]:
            raise BadEntry("its header does not match its checksum")
        _, _, _, _, num_tenant, num_tokens, num_payload, encoding, namespace, key, checksum = _FIXED.unpack_from(raw)
        tokens_at = FIXED_BYTES + num_tenant
        try:
            tenant = raw[FIXED_BYTES:tokens_at].decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise BadEntry("its tenant is no text") from error
        return cls(
            namespace=namespace,
            key=key,
            tenant=tenant,
            token_bytes=raw[tokens_at : tokens_at + num_tokens],
            encoding=encoding.rstrip(b"\0").decode("ascii", "replace"),
            num_payload_bytes=num_payload,
            checksum=checksum,
        )

    def check(self, *, namespace: bytes, key: bytes, token_bytes: bytes = b"") -> None:
        """Raises BadEntry when it is another's; no token_bytes: whatever its tokens."""
        if self.namespace != namespace:
            raise BadEntry("it belongs to another model")
        if self.key != key:
            raise BadEntry("it has another name")
        if token_bytes and self.token_bytes != token_bytes:
            raise BadEntry("it holds other tokens")

    def block(self, payload: Tensor) -> Block:
        """Raises BadEntry when the payload, uint8 (num_payload_bytes,), is not what was written."""
        if xxh3_128_digest(view_of(payload)) != self.checksum:
            raise BadEntry("its payload does not match its checksum")
        return Block(
            key=self.key, tenant=self.tenant, token_bytes=self.token_bytes, payload=payload, encoding=self.encoding
        )


def entry_size(block: Block) -> int:
    """Bytes of header and payload."""
    return _header_size(_encoded(block.tenant), block.token_bytes) + block.num_bytes


def view_of(payload: Tensor) -> memoryview:
    """The bytes of a uint8 tensor on the CPU, not copied."""
    return memoryview(payload.numpy())  # type: ignore[arg-type]  # numpy's stubs say nothing of buffers


def _encoded(tenant: str) -> bytes:
    return tenant.encode("utf-8", "surrogatepass")


def _header_size(tenant: bytes, token_bytes: bytes) -> int:
    num_bytes = FIXED_BYTES + len(tenant) + len(token_bytes) + _SUM_BYTES
    return num_bytes + -num_bytes % _ALIGNMENT


def header_bytes(fixed: bytes) -> int:
    """How long the header is that begins like this. Raises BadEntry when it is none that this machine can use."""
    if len(fixed) < FIXED_BYTES:
        raise BadEntry("it is cut short")
    magic, version, byte_order, num_bytes = struct.unpack_from("<4sHBxI", fixed)
    if magic != _MAGIC:
        raise BadEntry("it is no entry")
    if version != ENTRY_VERSION:
        raise BadEntry(f"its layout has version {version}, not {ENTRY_VERSION}")
    if byte_order != _ORDER:
        raise BadEntry("it was written on a machine with another byte order")
    if not FIXED_BYTES + _SUM_BYTES <= num_bytes <= MAX_HEADER_BYTES:
        raise BadEntry("its header has an impossible size")
    return int(num_bytes)


def block_of(value: bytes, *, namespace: bytes, key: bytes, token_bytes: bytes = b"") -> Block:
    """The block in a whole entry, copied once. Raises BadEntry."""
    at = header_bytes(value[:FIXED_BYTES])
    header = Header.decode(value[:at])
    header.check(namespace=namespace, key=key, token_bytes=token_bytes)
    if len(value) != at + header.num_payload_bytes:
        raise BadEntry("it is cut short or too long")
    payload = torch.empty(header.num_payload_bytes, dtype=torch.uint8)
    view_of(payload)[:] = memoryview(value)[at:]
    return header.block(payload)
