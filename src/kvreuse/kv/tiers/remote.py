"""Blocks in a Valkey or Redis server, shared by every instance that serves the same model.

Per namespace the server keeps the values, a ZSET of their names by last use, a HASH of "<bytes>:<tenant>" by name, a
HASH of bytes by tenant, and the sums; scripts change them together, so the cap holds at every instant whoever writes.
What is there is only known by asking, so `find` says "may be". Knows one server. Knows nothing of what blocks mean.
"""

from __future__ import annotations

from io import BytesIO
from typing import Any, Unpack

from valkey import Valkey
from valkey.backoff import NoBackoff
from valkey.exceptions import ConnectionError as ValkeyConnectionError
from valkey.exceptions import ValkeyError
from valkey.retry import Retry

from kvreuse.kv.tiers.base import Exchanges, OnEvict, StorageTier, TierOptions
from kvreuse.kv.tiers.entry import Block, header_of, view_of
from kvreuse.types import Tier

__all__ = ["SCHEMES", "RedisTier"]

# A URL's scheme and what the client calls it.
SCHEMES = {"valkey": "valkey", "redis": "valkey", "valkeys": "valkeys", "rediss": "valkeys"}
_OVERHEAD_BYTES = 512  # of an entry's names and places in the server's memory
_NAMES_AT_ONCE = 1000
_READ_BYTES = 2**18  # at once: the client's own 64 KiB cost half as much time again
_USAGE_TTL_S = 5.0

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
# ARGV: prefix, name, GET or EXISTS. Gives what that says; what the server dropped on its own is forgotten.
_USE = """
local found = redis.call(ARGV[3], ARGV[1] .. ARGV[2])
if not found or found == 0 then
  forget(ARGV[2])
else
  -- A use that is not noted harms nobody: the server may have no memory for it.
  local uses = redis.pcall('HINCRBY', KEYS[4], 'uses', 1)
  if type(uses) == 'number' then redis.pcall('ZADD', KEYS[1], 'XX', uses, ARGV[2]) end
end
return found
"""
# ARGV: prefix, names. Gives how many were there.
_DROP = """
local dropped = 0
for i = 2, #ARGV do dropped = dropped + forget(ARGV[i]) end
return dropped
"""


class RedisTier(StorageTier):
    """url: its scheme is one of SCHEMES. timeout_s: of a connect and of an operation. Connects when first used.

    Usage is that of all instances, as of the last change that asked.
    """

    tier = Tier.REMOTE
    faults = (OSError, ValkeyError, ValueError)  # the last where what answers speaks another language

    def __init__(self, url: str, *, timeout_s: float, **options: Unpack[TierOptions]) -> None:
        """Raises ValueError for a URL that is none."""
        super().__init__(**options)
        scheme, _, rest = url.partition("://")
        self._client: Any = Valkey.from_url(  # half typed, and for asyncio too
            f"{SCHEMES[scheme]}://{rest}",
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            socket_read_size=_READ_BYTES,
            # A connection that the server closed while it was idle is no fault; a timeout is.
            retry=Retry(NoBackoff(), 1, supported_errors=(ValkeyConnectionError,)),
        )
        self._exchanges = Exchanges(timeout_s)
        self._map = self._exchanges.map
        self._prefix = f"kvreuse:{{{self._namespace.hex()}}}:"  # in braces: all in one slot of a cluster
        self._keys = [self._prefix + name for name in ("used", "entries", "tenants", "sums")]
        scripts = [self._client.register_script(_FORGET + script) for script in (_PUT, _USE, _DROP)]
        self._put, self._use, self._drop = scripts
        self._usage_until_s = 0.0

    def put(self, block: Block, *, on_evict: OnEvict | None = None) -> bool:
        is_stored = 0
        if self.is_healthy:
            with self._noting_faults():
                is_stored, num_evicted = self._exchanges.run(lambda: self._stored(block))
                self._count(num_puts=is_stored, num_evicted=num_evicted)
                self._learn_usage()
        return bool(is_stored)

    def discard(self, key: bytes) -> None:
        with self._noting_faults():
            self._exchanges.run(lambda: self._run(self._drop, key.hex()))
            self._learn_usage()

    def purge(self, tenant: str | None) -> int:
        """Not within the timeout as a whole: there may be many."""
        wanted = None if tenant is None else tenant.encode("utf-8", "surrogatepass")
        num_dropped = 0
        with self._noting_faults():
            entries = self._client.hscan_iter(self._keys[1], count=_NAMES_AT_ONCE)
            names = [name for name, entry in entries if wanted in (None, entry.partition(b":")[2])]
            for start in range(0, len(names), _NAMES_AT_ONCE):
                num_dropped += self._run(self._drop, *names[start : start + _NAMES_AT_ONCE])
            self._usage_until_s = 0.0
            self._learn_usage()
        return num_dropped

    def close(self) -> None:
        self._exchanges.close()
        self._client.close()

    def _run(self, script: Any, *args: Any) -> Any:
        return script(keys=self._keys, args=(self._prefix, *args))

    def _stored(self, block: Block) -> tuple[int, int]:
        """Whether it is there now, and how many left for it."""
        name = block.key.hex()
        if self._run(self._use, name, "EXISTS"):
            return 1, 0  # another instance was quicker
        value = b"".join((header_of(block, namespace=self._namespace), view_of(block.payload)))
        size, tenant = len(value) + _OVERHEAD_BYTES, block.tenant.encode("utf-8", "surrogatepass")
        is_stored, num_evicted = self._run(self._put, name, size, self.max_bytes, tenant, value)
        return is_stored, num_evicted

    def _opened(self, key: bytes) -> BytesIO | None:
        value = self._exchanges.run(lambda: self._run(self._use, key.hex(), "GET"))
        return None if value is None else BytesIO(value)

    def _learn_usage(self) -> None:
        """Now and then: it costs a round trip."""
        if self._clock() < self._usage_until_s:
            return
        self._usage_until_s = self._clock() + _USAGE_TTL_S
        pipeline = self._client.pipeline(transaction=False)
        pipeline.hlen(self._keys[1]).hget(self._keys[3], "bytes").hgetall(self._keys[2])
        num_entries, num_bytes, tenants = self._exchanges.run(pipeline.execute)
        with self._lock:
            self._books.num_entries, self._books.num_bytes = num_entries, int(num_bytes or 0)
            self._books.tenant_bytes = {name.decode("utf-8", "surrogatepass"): int(n) for name, n in tenants.items()}
