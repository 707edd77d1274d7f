"""Put the parts of an engine together from a configuration: model, layout, pool, backend, cache, scheduler, runner."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from kvreuse.cache.store import PrefixCache
from kvreuse.config import Config
from kvreuse.config.guards import doubts
from kvreuse.engine.attention.choose import choose_backend
from kvreuse.engine.attention.native import NativeBackend
from kvreuse.engine.attention.step import NAME, register
from kvreuse.engine.devices import log_gpus
from kvreuse.engine.fused import fuse_layers
from kvreuse.engine.grammar import Grammars
from kvreuse.engine.loader import LoadedModel, configure_threads, load_model
from kvreuse.engine.lower_tiers import LowerTiers
from kvreuse.engine.packed import pack_linears, padded_rows
from kvreuse.engine.runner import Runner
from kvreuse.engine.scheduler import Scheduler, SchedulerLimits
from kvreuse.engine.tokenizer import Tokenizer
from kvreuse.engine.waiting import GroupRules
from kvreuse.errors import ConfigError
from kvreuse.kv.codec import QUANTISED, BlockCodec
from kvreuse.kv.layout import free_bytes, num_slots_for
from kvreuse.kv.pool import KVPool
from kvreuse.kv.tiers.open import open_tiers
from kvreuse.kv.tiers.stack import TierStack

__all__ = ["EngineParts", "assemble", "build"]

log = logging.getLogger("kvreuse.engine")

_POOL_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """What the engine's thread works with, and the facts it needs of the model."""

    runner: Runner
    scheduler: Scheduler
    cache: PrefixCache
    pool: KVPool
    lower: LowerTiers | None
    tokenizer: Tokenizer
    grammars: Grammars
    model_name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    is_reuse_on: bool
    audit_rate: float
    max_outstanding: int
    defrag_interval_s: float

    def is_fatal(self, error: Exception) -> bool:
        """After an accelerator error every later call on the device fails too."""
        return isinstance(error, torch.AcceleratorError)


def build(config: Config) -> EngineParts:
    """Load everything. Raises ConfigError with one sentence when the model or an option is refused."""
    device = _device(config.device)
    if device.type == "cpu":
        configure_threads(config.num_threads)
    register()
    loaded = load_model(config, device=device, attn_implementation=NAME)
    parts = assemble(loaded, config)
    for doubt in doubts(
        config,
        num_devices=len(parts.pool.layout.devices),
        num_slots=parts.pool.num_slots,
        max_model_len=loaded.max_model_len,
        free_host_bytes=free_bytes(torch.device("cpu")),
    ):
        log.warning("%s", doubt)
    return parts


def assemble(loaded: LoadedModel, config: Config) -> EngineParts:
    """The parts around a model that was loaded with the engine's attention."""
    layout = loaded.layout.stored_as(_POOL_DTYPES.get(config.kv_cache_dtype))
    backend = choose_backend(config.attention_backend, layout)
    if isinstance(backend, NativeBackend):
        fuse_layers(loaded.model)
    is_packed = pack_linears(loaded.model)
    num_slots = num_slots_for(
        layout,
        memory_ratio=config.kv_cache_memory_ratio,
        memory_bytes=config.kv_cache_memory_bytes,
        block_size=config.kv_cache_block_size,
    )
    pool = KVPool(layout, num_slots=num_slots)
    lower = _lower_tiers(loaded, config, pool)
    cache = _cache(config, pool, lower)
    num_devices = len(layout.devices)
    concurrency = config.concurrency(num_devices=num_devices)
    is_cpu = all(device.type == "cpu" for device in layout.devices)
    log_gpus(layout.devices)
    log.info(
        "model %s: %d layers, %s, attention %s, KV pool %d tokens = %.0f MiB",
        loaded.name,
        len(layout.layers),
        layout.layers[0].dtype,
        backend.name,
        num_slots,
        pool.num_bytes / 2**20,
    )
    vocab_size = loaded.model.get_input_embeddings().weight.shape[0]
    eos_token_ids = frozenset(loaded.eos_token_ids)
    return EngineParts(
        runner=Runner(loaded.model, pool, backend, padded=padded_rows if is_packed else int),
        scheduler=Scheduler(cache, _limits(config, concurrency, is_cpu=is_cpu), lower=lower),
        cache=cache,
        pool=pool,
        lower=lower,
        tokenizer=loaded.tokenizer,
        grammars=Grammars(loaded.tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids),
        model_name=loaded.name,
        max_model_len=min(loaded.max_model_len, num_slots),
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        is_reuse_on=config.kv_cache_reuse,
        audit_rate=config.audit_rate,
        max_outstanding=concurrency + config.queue_limit(num_devices=num_devices),
        defrag_interval_s=config.kv_cache_defrag_interval,
    )


def _cache(config: Config, pool: KVPool, lower: LowerTiers | None) -> PrefixCache:
    return PrefixCache(
        num_slots=pool.num_slots,
        block_size=config.kv_cache_block_size,
        bytes_per_token=pool.layout.bytes_per_token,
        policy=config.kv_cache_policy,
        lru_weights=config.kv_cache_lru_weights,
        ttl_s=config.kv_cache_ttl_s,
        tenant_quota_bytes=None if config.tenant_mode == "off" else config.tenant_quota_bytes,
        move_slots=pool.move,
        on_evict=lower.evicted if lower else None,
    )


def _limits(config: Config, concurrency: int, *, is_cpu: bool) -> SchedulerLimits:
    return SchedulerLimits(
        max_batch_size=min(config.max_batch_size, concurrency),
        max_batch_tokens=config.step_tokens(is_cpu=is_cpu),
        groups=GroupRules(
            group_min_size=config.group_min_size,
            group_max_wait_s=config.group_max_wait_ms / 1e3,
            max_queue_delay_s=config.max_queue_delay_ms / 1e3,
            group_similarity=config.group_similarity,
        ),
    )


def _lower_tiers(loaded: LoadedModel, config: Config, pool: KVPool) -> LowerTiers | None:
    tiers = open_tiers(config, model_folder=Path(loaded.source), layout=pool.layout) if config.kv_cache_reuse else []
    if not tiers:
        return None
    codec = BlockCodec(pool.layout, block_size=config.kv_cache_block_size, group_size=config.kv_cache_quant_group_size)
    encoding = config.kv_cache_dtype if config.kv_cache_dtype in QUANTISED else "raw"
    stack = TierStack(tiers, codec, encoding=encoding, write=config.tier_write)
    return LowerTiers(stack, pool=pool, codec=codec)


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("option.device is cuda, but no CUDA device is available")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
