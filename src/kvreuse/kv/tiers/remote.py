"""Blocks in a Valkey or Redis server, shared by every instance that serves the same model.

Per namespace the server keeps the values, a ZSET of their names by last use, a HASH of "<bytes>:<tenant>" by name, a
HASH of bytes by tenant, and the sums; scripts change them together, so the cap holds at every instant whoever writes.
What is there is only known by asking, so `find` says "may be". Knows one server. Knows nothing of what blocks mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

from valkey import Valkey
from valkey.backoff import NoBackoff
from valkey.exceptions import ConnectionError as ValkeyConnectionError
from valkey.exceptions import ValkeyError
from valkey.retry import Retry

from kvreuse.kv.tiers.base import FAULT, Fault, StorageTier, TierUsage
from kvreuse.kv.tiers.block import Block
from kvreuse.kv.tiers.deadline import Deadline
from kvreuse.kv.tiers.entry import Header, block_of, entry_size, view_of
from kvreuse.types import Tier

__all__ = ["SCHEMES", "RedisTier"]

# A URL's scheme and what the client calls it.
SCHEMES = {"valkey": "valkey", "redis": "valkey", "valkeys": "valkeys", "rediss": "valkeys"}
_OVERHEAD_BYTES = 512  # of an entry's names and places in the server's memory
_KEYS_AT_ONCE, _BYTES_AT_ONCE = 16, 2**24
_NUM_CONNECTIONS = 4
_READ_BYTES = 2**18  # at once: the client's own 64 KiB cost half as much time again
_USAGE_TTL_S = 5.0
T = TypeVar("T")

# KEYS: last use, entries, tenants, sums. ARGV[1]: what every value's name begins with.
_FORGET = """
local function forget(name)
  redis.call('DEL', ARGV[1] .. name)
  redis.call('ZREM', KEYS[1], name)
  local entry = redis.call('HGET', KEYS[2], name)
  if not entry then return 0 end
  redis.call('HDEL', KEYS[2], name)
  local bytes, tenant = string.match(entry, '^(%d+):(.*)$')
  redis.call('HINCRBY', KEYS[4], 'bytes', -bytes)
  if redis.call('HINCRBY', KEYS[3], tenant, -bytes) <= 0 then redis.call('HDEL', KEYS[3], tenant) end
  return 1
end
"""
# ARGV: prefix, name, bytes, limit, tenant, value. Gives 1 (stored) or 0 (larger than the limit), and how many left.
_PUT = """
local name, bytes, limit, evicted = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), 0
if bytes > limit then return {0, 0} end
-- Only where there is something: a server that is out of memory refuses a script by its first write.
if redis.call('HEXISTS', KEYS[2], name) == 1 then forget(name) end
while tonumber(redis.call('HGET', KEYS[4], 'bytes') or 0) + bytes > limit do
  local oldest = redis.call('ZRANGE', KEYS[1], 0, 0)[1]
  if not oldest then return {0, evicted} end
  evicted = evicted + forget(oldest)
end
redis.call('SET', ARGV[1] .. name, ARGV[6])
redis.call('ZADD', KEYS[1], redis.call('HINCRBY', KEYS[4], 'uses', 1), name)
redis.call('HSET', KEYS[2], name, bytes .. ':' .. ARGV[5])
redis.call('HINCRBY', KEYS[3], ARGV[5], bytes)
redis.call('HINCRBY', KEYS[4], 'bytes', bytes)
return {1, evicted}
"""
# ARGV: prefix, names. Notes their use; what the server dropped on its own is forgotten. Gives how many are there.
_USE = """
local there = 0
for i = 2, #ARGV do
  if redis.call('EXISTS', ARGV[1] .. ARGV[i]) == 0 then
    forget(ARGV[i])
  else
    redis.call('ZADD', KEYS[1], 'XX', redis.call('HINCRBY', KEYS[4], 'uses', 1), ARGV[i])
    there = there + 1
  end
end
return there
"""
# ARGV: prefix, names. Gives how many were there.
_DROP = """
local dropped = 0
for i = 2, #ARGV do dropped = dropped + forget(ARGV[i]) end
return dropped
"""


class RedisTier(StorageTier):
    """url: its scheme is one of SCHEMES. timeout_s: of a connect and of an operation. Connects when first used."""

    tier = Tier.REMOTE
    faults = (OSError, ValkeyError, ValueError)  # the last where what answers speaks another language

    def __init__(
        self,
        url: str,
        *,
        namespace: str,
        max_bytes: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ValueError for a URL that is none."""
        super().__init__(max_bytes=max_bytes, clock=clock)
        scheme, _, rest = url.partition("://")
        self._client: Any = Valkey.from_url(  # half typed, and for asyncio too
            f"{SCHEMES[scheme]}://{rest}",
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            socket_read_size=_READ_BYTES,
            # A connection that the server closed while it was idle is no fault; a timeout is.
            retry=Retry(NoBackoff(), 1, supported_errors=(ValkeyConnectionError,)),
        )
        self._deadline = Deadline(timeout_s, num_threads=_NUM_CONNECTIONS)
        self._namespace = bytes.fromhex(namespace)
        self._prefix = f"kvreuse:{{{namespace}}}:"  # in braces: all in one slot of a cluster
        self._books = [self._prefix + name for name in ("used", "entries", "tenants", "sums")]
        self._put, self._use, self._drop = (
            self._client.register_script(_FORGET + script) for script in (_PUT, _USE, _DROP)
        )
        self._known = self._usage(num_entries=0, num_bytes=0, tenant_bytes={})
        self._known_until_s = 0.0
        self._block_bytes = 0

    def put(self, block: Block, *, on_evict: Callable[[Block], None] | None = None) -> bool:
        reply = self._ask(lambda: self._stored(block)) if self.is_healthy else FAULT
        if reply is FAULT:
            return False
        is_stored, num_evicted = reply
        self._count("puts", is_stored)
        self._count("evicted", num_evicted)
        self._ask(self._learn_usage)
        return bool(is_stored)

    def find(self, keys: Sequence[bytes]) -> int:
        return len(keys) if self.is_healthy else 0

    def load_run(self, keys: Sequence[bytes], token_bytes: Sequence[bytes]) -> list[Block]:
        run: list[Block] = []
        while len(run) < len(keys):
            part = slice(len(run), len(run) + self._num_at_once())
            values = self._ask(lambda names=keys[part]: self._values(names)) if self.is_healthy else FAULT  # type: ignore[misc]
            for key, tokens, value in zip(
                keys[part], token_bytes[part], [] if values is FAULT else values, strict=False
            ):
                block = self._checked(key, tokens, value)
                if block is None:
                    break
                run.append(block)
                self._block_bytes = block.num_bytes
            if len(run) < min(part.stop, len(keys)):
                self._count("misses")
                break
        self._count("hits", len(run))
        return run

    def _num_at_once(self) -> int:
        """So many that an exchange fits in the timeout on a slow network; one while their size is not known."""
        return max(1, min(_KEYS_AT_ONCE, _BYTES_AT_ONCE // self._block_bytes)) if self._block_bytes else 1

    def discard(self, key: bytes) -> None:
        self._ask(lambda: self._dropped([key.hex()]))
        self._ask(self._learn_usage)

    def purge(self, tenant: str | None) -> int:
        # Not within the timeout as a whole: there may be many.
        num_dropped = self._try(lambda: sum(map(self._dropped, self._names(tenant))))
        self._known_until_s = 0.0
        self._ask(self._learn_usage)
        return 0 if num_dropped is FAULT else num_dropped

    def usage(self) -> TierUsage:
        """Entries and bytes are those of all instances, as of the last write that asked."""
        known = self._known
        return self._usage(num_entries=known.num_entries, num_bytes=known.num_bytes, tenant_bytes=known.tenant_bytes)

    def close(self) -> None:
        self._deadline.close()
        self._client.close()

    def _ask(self, work: Callable[[], T]) -> T | Literal[Fault.FAULT]:
        """One exchange with the server, as a whole within the timeout."""
        return self._try(lambda: self._deadline.run(work))

    def _stored(self, block: Block) -> tuple[int, int]:
        """Whether it is there now, and how many left for it."""
        name = block.key.hex()
        if self._use(keys=self._books, args=(self._prefix, name)):
            return 1, 0  # another instance was quicker
        value = b"".join((Header.of(block, namespace=self._namespace).encode(), view_of(block.payload)))
        size, tenant = entry_size(block) + _OVERHEAD_BYTES, block.tenant.encode("utf-8", "surrogatepass")
        is_stored, num_evicted = self._put(
            keys=self._books, args=(self._prefix, name, size, self.max_bytes, tenant, value)
        )
        return is_stored, num_evicted

    def _values(self, keys: Sequence[bytes]) -> list[bytes | None]:
        names = [key.hex() for key in keys]
        pipeline = self._client.pipeline(transaction=False)
        pipeline.mget([self._prefix + name for name in names])
        pipeline.evalsha(self._use.sha, len(self._books), *self._books, self._prefix, *names)
        values, _ = pipeline.execute(raise_on_error=False)
        if isinstance(values, ValkeyError):
            raise values
        # A use that is not noted harms nobody: the server has no memory for it, or lost the script until the next put.
        found: list[bytes | None] = values
        return found

    def _checked(self, key: bytes, token_bytes: bytes, value: bytes | None) -> Block | None:
        if value is None:
            return None
        block = self._try(lambda: block_of(value, namespace=self._namespace, key=key, token_bytes=token_bytes), key=key)
        return None if block is FAULT else block

    def _names(self, tenant: str | None) -> Iterable[list[bytes]]:
        """Names of what is stored, of one tenant or all, some at a time."""
        wanted = None if tenant is None else tenant.encode("utf-8", "surrogatepass")
        cursor: Any = None
        while cursor != 0:
            cursor, entries = self._client.hscan(self._books[1], cursor or 0, count=1000)
            names = [name for name, entry in entries.items() if wanted in (None, entry.partition(b":")[2])]
            if names:
                yield names

    def _dropped(self, names: Sequence[bytes | str]) -> int:
        number: int = self._drop(keys=self._books, args=(self._prefix, *names))
        return number

    def _learn_usage(self) -> None:
        """Now and then: it costs a round trip."""
        if self._clock() < self._known_until_s:
            return
        self._known_until_s = self._clock() + _USAGE_TTL_S
        pipeline = self._client.pipeline(transaction=False)
        pipeline.hlen(self._books[1]).hget(self._books[3], "bytes").hgetall(self._books[2])
        num_entries, num_bytes, tenants = pipeline.execute()
        self._known = self._usage(
            num_entries=num_entries,
            num_bytes=int(num_bytes or 0),
            tenant_bytes={name.decode("utf-8", "surrogatepass"): int(size) for name, size in tenants.items()},
        )
