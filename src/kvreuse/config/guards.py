"""What a configuration makes likely to go wrong on this machine: warnings, for the start goes on.

Knows options and numbers of the machine. Knows nothing of how they were found.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvreuse.config.options import Config

__all__ = ["doubts"]

_INDEX_BYTES_PER_BLOCK = 1500  # a node per block and as many remembered ones that left; measured 1,300
_WORKER_LINES = ("minWorkers", "maxWorkers", "gpu.minWorkers", "gpu.maxWorkers", "cpu.minWorkers", "cpu.maxWorkers")
_GIB = 2**30


def doubts(
    config: Config, *, num_devices: int, num_slots: int, max_model_len: int, free_host_bytes: int
) -> Iterator[str]:
    """One sentence each: what it is, what follows, what to change.

    max_model_len: tokens of the longest request that the model takes. free_host_bytes: what the pool, where it is in
    host memory, has left.
    """
    num_fitting = config.max_batch_size * num_devices
    if config.max_concurrency is not None and config.max_concurrency > num_fitting:
        yield (
            f"option.max_concurrency is {config.max_concurrency}, more than option.max_batch_size x devices "
            f"({num_fitting}): the rest only waits; lower it, or raise option.max_batch_size"
        )
    longest = max_model_len if config.max_model_len is None else min(config.max_model_len, max_model_len)
    if num_slots < longest:
        yield (
            f"the KV pool holds {num_slots} tokens, fewer than one longest request ({longest}): longer ones get 422; "
            "raise option.kv_cache_memory_ratio or lower option.max_model_len"
        )
    index_bytes = num_slots // config.kv_cache_block_size * _INDEX_BYTES_PER_BLOCK
    if index_bytes + config.host_cache_bytes > free_host_bytes:
        yield (
            f"host memory is short: the index may take {index_bytes / _GIB:.2f} GiB and option.host_cache_bytes "
            f"{config.host_cache_bytes / _GIB:.2f} GiB, free are {free_host_bytes / _GIB:.2f} GiB; "
            "raise option.kv_cache_block_size or lower option.host_cache_bytes"
        )
    num_workers = max(config.model_server_workers, *_ignored_workers(config), 1)
    if num_workers > 1:
        yield (
            f"{num_workers} workers are configured: each would have a model and a cache of its own and hits would be "
            "split among them; kvreuse serves all requests in one process, set one worker"
        )


def _ignored_workers(config: Config) -> list[int]:
    pairs = (line.partition("=") for line in config.ignored)
    return [int(value) for name, _, value in pairs if name in _WORKER_LINES and value.isdigit()] or [1]
